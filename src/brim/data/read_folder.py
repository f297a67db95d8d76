"""Read what `datasets` has in memory or saved to a folder: a data set, or several under the names of their splits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from brim.data.read_frame import require_names
from brim.data.saved_folder import require_plain_folder
from brim.data.source import Source, plain, row_number
from brim.data.split import FIXED_VALUES, spellings
from brim.data.undecodable import without_undecodable
from brim.errors import DataError, Problem

if TYPE_CHECKING:
    import datasets


def read_folder(path: Path) -> Source:
    """A saved Dataset as it is; a saved DatasetDict as one table with a column `split` (0, 1, 2)."""
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        raise DataError(
            Problem(
                what="the folder is no saved data set",
                where=str(path),
                expected="what `datasets` writes with save_to_disk (state.json or dataset_dict.json)",
                fix=_files_in(path),
            )
        )
    require_plain_folder(path)
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise DataError(
            Problem(
                what=f"the saved data set cannot be read: {' '.join(str(error).split())}",
                where=str(path),
                expected="what `datasets` writes with save_to_disk",
                fix="save it anew with save_to_disk",
            )
        ) from None
    return read_dataset(loaded, name=path.name)


def read_dataset(dataset: datasets.Dataset | datasets.DatasetDict, *, name: str = "the data set") -> Source:
    """A Dataset's rows as they are selected; a DatasetDict as one table with a column `split` (0, 1, 2)."""
    table = _joined(dataset, name) if isinstance(dataset, Mapping) else _table(dataset)
    require_names(table.column_names, name)
    table, faults = without_undecodable(table, name)
    return Source(table=table, name=name, locate=row_number(name), faults=faults)


def _files_in(path: Path) -> str:
    """What to name instead, by the files that are there."""
    endings = sorted({entry.suffix for entry in path.iterdir() if entry.suffix in _ENDINGS})
    if not endings:
        return "name a file in it instead"
    return f"name a file in it instead, or all of them: '{path / f'*{endings[0]}'}'"


_ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")


def _joined(parts: Any, name: str) -> pa.Table:
    """The splits one after the other, with the number of each row's split."""
    problems = _split_problems(list(parts), name)
    tables = []
    for part, dataset in parts.items():
        table = _table(dataset)
        if "split" in table.column_names:
            what = "the data set has splits and also a column `split`"
            problems.append(Problem(what=what, where=name, fix="rename the column"))
        if problems:
            raise DataError(*problems)
        code = pa.scalar(FIXED_VALUES[part], pa.int8())
        tables.append(table.append_column("split", pa.repeat(code, table.num_rows)))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        what = f"the splits of the data set differ in their columns: {error}"
        raise DataError(Problem(what=what, where=name, expected="the same columns in all splits")) from None


def _split_problems(names: list[str], where: str) -> list[Problem]:
    problems = []
    unknown = [name for name in names if name not in FIXED_VALUES]
    if unknown:
        problems.append(
            Problem(
                what=f"splits of the data set have unknown names: {', '.join(unknown)}",
                where=where,
                expected="train, validation, test",
                fix="keep only the splits to learn from, under these names",
            )
        )
    for split, ways in spellings(names).items():
        what = f"the data set has the {split} split twice: {', '.join(ways)}"
        problems.append(Problem(what=what, where=where, fix="keep it under one of these names"))
    return problems


def _table(dataset: Any) -> pa.Table:
    table = dataset.with_format("arrow")[:]
    return table.cast(plain(table.schema))
