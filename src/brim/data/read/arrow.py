"""Read Arrow data: saved `datasets` folders, parquet files, and tables that are in memory already.

A folder that `datasets` saved (save_to_disk) holds a data set, or several under the names of their splits. Its small
files are read before `datasets` acts on them, since they name its other files. A parquet file is read row group by
row group. Data in memory is a dict of columns, a pandas frame or an Arrow table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from brim.data.read.columns import column_of, is_text, require_no_text
from brim.data.read.encoding import without_undecodable
from brim.data.read.source import Source, plain, require_distinct, row_number, source_of, spellings, split_code
from brim.data.read.spill import Faults, gather, kept_or
from brim.errors import DataError, Problem

if TYPE_CHECKING:
    import datasets
    import pandas as pd


def read_folder(path: Path) -> Source:
    """Read a saved Dataset as it is, and a saved DatasetDict as one table with a column `split` (0, 1, 2)."""
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        raise DataError(
            what="the folder is not a saved data set",
            where=str(path),
            expected="what `datasets` writes with save_to_disk (state.json or dataset_dict.json)",
            fix=_files_in(path),
        )
    require_plain_folder(path)
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise _refused(" ".join(str(error).split()), str(path)) from None
    return read_dataset(loaded, name=path.name)


def read_dataset(dataset: datasets.Dataset | datasets.DatasetDict, *, name: str = "the data set") -> Source:
    """Read a Dataset's rows as selected, and a DatasetDict as one table with a column `split` (0, 1, 2)."""
    table = _joined(dataset, name) if isinstance(dataset, Mapping) else _table_of_dataset(dataset)
    require_names(table.column_names, name)
    table, faults = without_undecodable(table, name)
    return Source(table=table, name=name, locate=row_number(name), faults=faults)


def _files_in(path: Path) -> str:
    """Say what to name instead, by the files that are there."""
    endings = sorted({entry.suffix for entry in path.iterdir() if entry.suffix in _ENDINGS})
    if not endings:
        return "name a file in it instead"
    return f"name a file in it instead, or all of them: '{path / f'*{endings[0]}'}'"


_ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")


def _joined(parts: Any, name: str) -> pa.Table:
    """Join the splits one after the other, with the number of each row's split."""
    problems = list(_split_problems(list(parts), name))
    tables = []
    for part, dataset in parts.items():
        table = _table_of_dataset(dataset)
        if "split" in table.column_names:
            what = "the data set has splits and also a column `split`"
            problems.append(Problem(what=what, where=name, fix="rename the column"))
        DataError.raise_for(problems)
        code = pa.scalar(split_code(part), pa.int8())
        tables.append(table.append_column("split", pa.repeat(code, table.num_rows)))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        what = f"the splits of the data set differ in their columns: {error}"
        raise DataError(what=what, where=name, expected="the same columns in all splits") from None


def _split_problems(names: list[str], where: str) -> Iterator[Problem]:
    unknown = [name for name in names if split_code(name) is None]
    if unknown:
        yield Problem(
            what=f"splits of the data set have unknown names: {', '.join(unknown)}",
            where=where,
            expected="train, validation, test",
            fix="keep only the splits to learn from, under these names",
        )
    for split, ways in spellings(names).items():
        what = f"the data set has the {split} split twice: {', '.join(ways)}"
        yield Problem(what=what, where=where, fix="keep it under one of these names")


def _table_of_dataset(dataset: Any) -> pa.Table:
    table = dataset.with_format("arrow")[:]
    return table.cast(plain(table.schema))


_BATCH_ROWS = 4096


_BUFFER_BYTES = 2**20  # of each column of a parquet file


def read_parquet(path: Path) -> Source:
    """Read a parquet file; a row with text that is not UTF-8 has a fault. Raises DataError for a damaged file."""
    try:
        table, _ = kept_or(lambda keep_as, _: _read_table(path, keep_as), path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError):
            raise
        raise DataError(
            what=f"the parquet file cannot be read: {_first_sentence(error)}",
            where=path.name,
            expected="a whole parquet file",
            fix="write or download it again",
        ) from None
    table, faults = without_undecodable(table, path.name)
    return Source(table=table, name=path.name, locate=row_number(path.name), faults=faults)


def _read_table(path: Path, keep_as: Path) -> pa.Table:
    # What is read ahead would be kept until the end of a row group, and that may be the whole file.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        require_names(file.schema_arrow.names, path.name)
        schema = plain(file.schema_arrow)
        return gather(_batches(file, schema), schema=schema, keep_as=keep_as)


def _batches(file: pq.ParquetFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
        yield from pa.Table.from_batches([batch]).cast(schema).to_batches()


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")


def read_columns(columns: Mapping[str, Sequence[Any]], *, name: str = "the given columns") -> Source:
    """Read a dict of equally long columns. A row with a value that no column can hold has a fault."""
    locate = row_number(name)
    no_lists = [f"`{column}`" for column, values in columns.items() if not _is_list(values)]
    if no_lists:
        raise DataError(what=f"not a list: {', '.join(no_lists)}", where=name, expected="a list a column")
    require_names([str(column) for column in columns], name)
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{column}` {length:,}" for column, length in lengths.items())
        raise DataError(
            what=f"the columns differ in length: {listed}", where=name, expected="a value a row in each column"
        )
    faults: Faults = {}
    read = [
        column_of(str(column), values if hasattr(values, "dtype") else list(values), locate=locate, faults=faults)
        for column, values in columns.items()
    ]
    return _source(table_of_columns(read), name, faults)


def read_rows(rows: Sequence[Mapping[str, Any]]) -> Source:
    """Read a list of dicts, one a row; a column that a row does not have is empty there."""
    columns = {name: None for row in rows for name in row}
    return read_columns({name: [row.get(name) for row in rows] for name in columns}, name="the given rows")


def read_pandas(frame: pd.DataFrame) -> Source:
    """Read a pandas frame; its index is not read, and its NaN cells are missing."""
    name = "the data frame"
    names = [str(column) for column in frame.columns]
    require_names(names, name)
    faults: Faults = {}
    read = []
    for position, column in enumerate(names):
        series = frame.iloc[:, position]
        try:
            array = pa.Array.from_pandas(series)
            if pa.types.is_binary(array.type):
                require_no_text(series)
            read.append((pa.field(column, array.type), array))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            values = [None if missing else value for value, missing in zip(series, series.isna(), strict=True)]
            read.append(column_of(column, values, locate=row_number(name), faults=faults))
    return _source(table_of_columns(read), name, faults)


def read_table(table: pa.Table) -> Source:
    """Read an Arrow table as it is; dictionary-encoded columns become their values."""
    require_names(table.column_names, "the table")
    return _source(table, "the table", {})


def table_of_columns(columns: Sequence[tuple[pa.Field, pa.Array | pa.ChunkedArray]]) -> pa.Table:
    """Return the table of these columns and their fields."""
    return pa.table([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _source(table: pa.Table, name: str, faults: Faults) -> Source:
    """Return the source of a table. faults: of Python's values; those of Arrow's bytes are added."""
    table, undecodable = without_undecodable(table.cast(plain(table.schema)), name)
    return source_of(table, name=name, locate=row_number(name), faults={**undecodable, **faults})


def _is_list(values: Any) -> bool:
    return hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)


def require_names(names: list[str], where: str) -> None:
    """Raise DataError for column names that stand twice, or that no table can have."""
    strange = [name for name in names if name.startswith("\0") or not is_text(name)]
    if strange:
        listed = ", ".join(f"`{name.encode(errors='backslashreplace').decode()!r}`" for name in strange)
        raise DataError(what=f"column names that are not text: {listed}", where=where, fix="rename them")
    require_distinct(names, where)


STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


_MOST_BYTES = 32 << 20


def require_plain_folder(path: Path) -> None:
    """Raise DataError where a file is missing, was not written by `datasets`, or names one elsewhere."""
    if not (path / SPLITS).exists():
        _require_part(path, path.name)
        return
    splits = _mapping(path / SPLITS, path.name).get("splits")
    if not _is_full(splits) or not all(_is_plain(split) for split in splits):
        raise _refused(f"{SPLITS} does not name the folders of its splits", path.name)
    for split in splits:
        _require_part(path / split, f"{path.name}/{split}")


def _require_part(path: Path, name: str) -> None:
    if path.is_symlink():
        raise _refused("it is a link", name)
    _mapping(path / INFO, name)
    files = _mapping(path / STATE, name).get("_data_files")
    names = [each.get("filename") if isinstance(each, dict) else None for each in files] if _is_full(files) else [None]
    if not all(_is_plain(file) for file in names):
        raise _refused(f"{STATE} does not name Arrow files of this folder", name)
    for file in sorted({str(file) for file in names}):
        if (path / file).is_symlink() or not (path / file).is_file():
            raise _refused(f"{file} is missing, or is not a regular file", name)


def _mapping(file: Path, name: str) -> dict[str, Any]:
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            raise _refused(f"{file.name} is missing, or is not a regular file of at most {_MOST_BYTES:,} bytes", name)
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(f"{file.name}: {error}", name) from None
    except RecursionError:
        raise _refused(f"{file.name} is nested too deeply", name) from None
    if not isinstance(value, dict):
        raise _refused(f"{file.name} does not hold a mapping", name)
    return value


def _is_full(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value)


def _is_plain(name: object) -> bool:
    """Return whether this is the name of an entry of the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def _refused(why: str, name: str) -> DataError:
    what, fix = f"the saved data set cannot be read: {why}", "save it again with save_to_disk"
    return DataError(what=what, where=name, expected="what `datasets` writes with save_to_disk", fix=fix)
