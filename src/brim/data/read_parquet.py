"""Read a parquet file, row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from brim.data.read_frame import require_names
from brim.data.source import Source, plain, row_number
from brim.data.spill import gather, kept_or
from brim.data.undecodable import without_undecodable
from brim.errors import DataError, Problem

_BATCH_ROWS = 4096


def read_parquet(path: Path) -> Source:
    """A parquet file; a row with a text that is no UTF-8 has a fault. Raises DataError where it is damaged or none."""
    try:
        table = kept_or(lambda keep_as: _read_table(path, keep_as), path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError):
            raise
        raise DataError(
            Problem(
                what=f"the parquet file cannot be read: {_first_sentence(error)}",
                where=path.name,
                expected="a whole parquet file",
                fix="write or download it again",
            )
        ) from None
    table, faults = without_undecodable(table, path.name)
    return Source(table=table, name=path.name, locate=row_number(path.name), faults=faults)


def _read_table(path: Path, keep_as: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        require_names(file.schema_arrow.names, path.name)
        schema = plain(file.schema_arrow)
        return gather(_batches(file, schema), schema=schema, keep_as=keep_as)


def _batches(file: pq.ParquetFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
        yield from pa.Table.from_batches([batch]).cast(schema).to_batches()


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
