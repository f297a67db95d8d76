"""Predictions as a file: parquet, jsonl or csv, by its ending, whole or not at all."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from brim.data import Source
from brim.data.as_text import nested_values, nested_word
from brim.errors import DataError, OutputError, Problem, WriteError
from brim.files import whole_file

ROW, LOG_PROBABILITY = "row", "log_probability"
_OWN_COLUMNS = (ROW, "finish_reason", "num_prompt_tokens", "num_response_tokens")
_ROWS_AT_ONCE = 1024
_ROWS_A_GROUP = 4096  # of a parquet file: held in memory together


def check_output(path: Path) -> None:
    """Refuse, before any work is done, a file that could not be written or stands there already."""
    require_writable(path)
    if path.exists() or path.is_symlink():
        raise OutputError(
            Problem(what="the output file exists already; nothing was changed", where=str(path), fix="name another")
        )


def require_writable(path: Path) -> None:
    """Refuse, before any work is done, a file that could not be written."""
    if path.suffix not in _WRITERS:
        raise OutputError(
            Problem(
                what=f"the output's ending {path.suffix!r} is not known" if path.suffix else "the output has no ending",
                where=str(path),
                expected=", ".join(_WRITERS),
                fix="name the file predictions.parquet, say",
            )
        )
    try:
        path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(_unwritable(path, error)) from error


def require_free_names(source: Source, responses: Sequence[str], *, with_scores: bool = False) -> None:
    """Refuse, before any work is done, data whose columns are called like those that predictions add."""
    own = (ROW, *responses, *_OWN_COLUMNS[1:], *([LOG_PROBABILITY] if with_scores else []))
    taken = [name for name in own if name in source.table.column_names]
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken)
        raise DataError(
            Problem(
                what=f"the data has {'a column' if len(taken) == 1 else 'columns'} {listed}, "
                f"{'a name' if len(taken) == 1 else 'names'} that predictions use themselves",
                where=source.name,
                fix="rename or remove it" if len(taken) == 1 else "rename or remove them",
            )
        )


def write_predictions(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame in the format of the path's ending. Raises WriteError when it cannot be written."""
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    try:
        write_blocks(table.schema, map(_table, table.to_batches(_ROWS_AT_ONCE)), path)
    except OSError as error:
        raise WriteError(_unwritable(path, error)) from error


def write_blocks(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    """Write tables of one schema, one after the other, in the format of the path's ending, whole or not at all."""
    with whole_file(path) as temporary:
        _WRITERS[path.suffix](schema, blocks, temporary)


def _table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def frame_of(table: pa.Table) -> pd.DataFrame:
    """A table for pandas; whole numbers stay whole numbers beside empty cells, lists and objects are Python's."""
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for name, values in _nested(table).items():
        frame[name] = pd.Series(values, index=frame.index, dtype=object)
    return frame


def _nested(table: pa.Table) -> dict[str, list[Any]]:
    """The values of the columns that hold lists or objects, as such or as JSON."""
    found = {}
    for each in table.schema:
        if nested_word(each):
            found[each.name] = nested_values(table[each.name])
        elif pa.types.is_nested(each.type):
            found[each.name] = table[each.name].to_pylist()
    return found


def _write_parquet(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    plain = pa.schema([pa.field(each.name, each.type) for each in schema])
    with pq.ParquetWriter(path, plain) as writer:
        for group in _groups(block.cast(plain) for block in blocks):
            writer.write_table(group, row_group_size=_ROWS_A_GROUP)


def _groups(blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Blocks together, by their rows alone, so that a file does not depend on how it came about."""
    held: list[pa.Table] = []
    for block in blocks:
        held.append(block)
        if sum(each.num_rows for each in held) >= _ROWS_A_GROUP:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _write_jsonl(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    """By hand, since pandas rounds numbers to ten digits and turns dates into milliseconds."""
    with path.open("w", encoding="utf-8") as file:
        for block in blocks:
            for record in frame_of(block).to_dict("records"):
                plain = {name: _plain(value) for name, value in record.items()}
                file.write(_json(plain) + "\n")


def _write_csv(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    """All texts quoted, so that a lone carriage return in one ends no line; lists and objects are JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        frame_of(schema.empty_table()).to_csv(file, index=False, quoting=csv.QUOTE_NONNUMERIC)
        for block in blocks:
            frame = frame_of(block)
            for name in _nested(block):
                frame[name] = frame[name].map(_json, na_action="ignore")
            for name in frame.select_dtypes(["datetime", "datetimetz"]):
                # pandas leaves out the time of day where no row of a block has one.
                frame[name] = frame[name].astype(object).map(str, na_action="ignore")
            frame.to_csv(file, index=False, header=False, quoting=csv.QUOTE_NONNUMERIC)


def _plain(value: Any) -> Any:
    """Null for what is missing; JSON has no NaN."""
    missing = value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value))
    return None if missing else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _unwritable(path: Path, error: OSError) -> Problem:
    below_a_file = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "its path leads through a file" if below_a_file else error.strerror or str(error)
    return Problem(
        what=f"the output cannot be written: {reason}",
        where=str(path),
        fix="name a file in a folder that may be written to and has room",
    )


_WRITERS: dict[str, Callable[[pa.Schema, Iterable[pa.Table], Path], None]] = {
    ".parquet": _write_parquet,
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
}
