"""Hold a data set as it was read: one table, its name, where each row stands, which rows are unreadable.

It also says which columns a configuration asks for, whether the data has them filled, and how splits are spelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.config import misspelt
from brim.config.schema import Config, FeaturePreprocessing, OutputFeature
from brim.data.read.columns import nested_values, nested_word, problem_of, taken_apart
from brim.errors import DataError, Problem
from brim.units import format_count

INPUT, OUTPUT = "input_features[0]", "output_features[0]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column that is read: for which feature, and what happens where it is empty."""

    name: str
    feature: str  # INPUT or OUTPUT
    missing_value_strategy: str
    fill_value: str
    is_label: bool = False  # of which an empty text is none


def require_columns(source: Source, wanted: dict[str, str]) -> None:
    """Raise DataError for each wanted column (name -> who wants it) that the data lacks."""
    there = source.table.column_names
    problems = [
        Problem(
            what=f"no column `{name}`, which {who} names",
            where=source.name,
            expected=f"one of the columns that are there: {_listed(there)}",
            fix=_nearest(name, who, source),
        )
        for name, who in wanted.items()
        if name not in there
    ]
    if problems:
        raise DataError(*problems)


def require_text(source: Source, names: Sequence[str]) -> None:
    """Raise DataError for each column whose cells are no plain values (lists, objects, bytes), or of several types."""
    problems, talks = [], _conversations(source)
    for name in names:
        field = source.table.schema.field(name)
        mixed, word = problem_of(field), nested_word(field)
        if pa.types.is_nested(field.type):
            word = "objects" if pa.types.is_struct(field.type) else "lists"
        elif _is_bytes(field.type):
            word = "bytes"
        if mixed is not None:
            problems.append(mixed)
        elif word:
            problems.append(
                Problem(
                    what=f"column `{name}` holds {word}, which are no text",
                    where=source.name,
                    expected="text, numbers, true or false, or dates",
                    fix=_chat(name) if name == talks else "write what the model should read as a text column",
                )
            )
    if problems:
        raise DataError(*problems)


def notes_on_mixed(source: Source, used: Collection[str]) -> list[str]:
    """A note for each column that has no common type and is not used; who uses one looks at its cells himself."""
    others = [field for field in source.table.schema if field.name not in used]
    mixed = [problem for problem in map(problem_of, others) if problem is not None]
    return [f"{problem.where}: {problem.what}; it is not used, and was read as text" for problem in mixed]


def column_for(name: str, feature: str, preprocessing: FeaturePreprocessing, *, is_label: bool = False) -> Column:
    """A column under its feature's rule for missing cells."""
    return Column(
        is_label=is_label,
        name=name,
        feature=feature,
        missing_value_strategy=preprocessing.missing_value_strategy,
        fill_value=preprocessing.fill_value,
    )


def input_columns(config: Config, names: Sequence[str]) -> tuple[Column, ...]:
    """The columns that a prompt reads, each under the rule of its input feature, or of the first where it has none."""
    numbers = {feature.column_name: number for number, feature in enumerate(config.input_features)}
    return tuple(
        column_for(name, f"input_features[{number}]", config.input_features[number].preprocessing)
        for name in names
        for number in [numbers.get(name, 0)]
    )


def answer_column(target: OutputFeature, name: str) -> Column:
    """The answer's column under the rule of its feature."""
    return column_for(name, OUTPUT, target.preprocessing, is_label=target.categories is not None)


def missing_of(source: Source, column: Column) -> npt.NDArray[np.bool_]:
    """Which cells of a column are missing for its feature."""
    cells = source.table[column.name]
    if column.is_label and (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        cells = pc.if_else(pc.equal(pc.utf8_trim_whitespace(cells), ""), None, cells)
    return missing(cells)


def missing(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Which cells are missing: null, or NaN in a number column."""
    if column.null_count == 0 and not pa.types.is_floating(column.type):
        return np.zeros(len(column), dtype=np.bool_)
    return np.asarray(pc.is_null(column, nan_is_null=True).to_numpy(), dtype=np.bool_)


def require_filled(source: Source, columns: Sequence[Column], rows: npt.NDArray[np.int64]) -> None:
    """Raise DataError for each column with missing cells in these rows whose strategy is `error`."""
    problems = []
    for column in columns:
        empty = rows[missing_of(source, column)[rows]]
        if len(empty) and column.missing_value_strategy == "error":
            count = format_count(len(empty), "row")
            problems.append(
                Problem(
                    what=f"column `{column.name}` is empty in {count}",
                    where=places(source, empty.tolist()),
                    expected="a value in every row",
                    fix=f"fill the cells, or set {column.feature}.preprocessing.missing_value_strategy "
                    "to drop_row or fill_with_const",
                )
            )
    if problems:
        raise DataError(*problems)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _nearest(name: str, who: str, source: Source) -> str:
    meant = misspelt(name, source.table.column_names)
    talks = _conversations(source) if who in (INPUT, OUTPUT, "prompt.template") else None
    if talks is not None and meant in (None, talks):
        return _chat(talks)
    return f"did you mean `{meant}`?" if meant else "name a column of the data, or add this one"


def _chat(column: str) -> str:
    chat = "{}" if column == "messages" else f"{{messages: {column}}}"
    return f"set chat: {chat} to learn from the conversations in `{column}`, without input_features and output_features"


def _conversations(source: Source) -> str | None:
    """The column that holds conversations: lists of turns, each with a role (or `from`), or the name `messages`."""
    for column in source.table.schema:
        if nested_word(column) == "lists" or pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            cells = source.table[column.name].slice(0, 100).drop_null()
            first = next(iter(nested_values(cells) if nested_word(column) else cells.to_pylist()), None)
            if first and isinstance(first[0], dict) and first[0].keys() & {"role", "from"}:
                return str(column.name)
    return "messages" if "messages" in source.table.column_names else None


MAX_PLACES = 5  # a message locates this many rows and counts the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows to learn from or to run over. `locate(12)` says where row 12 (0-based) stands: "data.jsonl:13".

    A row that could not be read keeps its number: its cells are missing and `faults` says why. What becomes of it is
    decided later (see usable.py).
    """

    table: pa.Table
    name: str  # the file's or folder's name, or what kind of thing was given
    locate: Callable[[int], str]
    faults: Mapping[int, Problem] = field(default_factory=dict)  # why rows cannot be used, by row; without a place
    kinds: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)  # of each cell of a mixed column: "a number", …
    notes: tuple[str, ...] = ()  # what to know of how it was read

    def usable_rows(self) -> npt.NDArray[np.int64]:
        """The rows without a fault, in their order."""
        is_usable = np.ones(self.table.num_rows, dtype=np.bool_)
        is_usable[list(self.faults)] = False
        return np.flatnonzero(is_usable)


def source_of(
    table: pa.Table, *, name: str, locate: Callable[[int], str], faults: Mapping[int, Problem] | None = None
) -> Source:
    """Return a table, as it was read, as a source."""
    table, kinds = taken_apart(table)
    return Source(table=table, name=name, locate=locate, faults=faults or {}, kinds=kinds)


def row_number(name: str) -> Callable[[int], str]:
    """Places as row numbers, for data that has no lines."""
    return lambda row: f"{name}, row {row}"


def places(source: Source, rows: list[int]) -> str:
    """Where the first few of these rows stand: "data.csv:2, data.csv:7 and 12 more"."""
    located = ", ".join(source.locate(row) for row in rows[:MAX_PLACES])
    return located if len(rows) <= MAX_PLACES else f"{located} and {len(rows) - MAX_PLACES:,} more"


def require_rows(table: pa.Table, name: str) -> pa.Table:
    """The table, unless it is empty."""
    if table.num_columns == 0 or table.num_rows == 0:
        raise DataError(
            Problem(
                what="the data set has no rows",
                where=name,
                expected="at least one row of data",
                fix="look at what makes it, such as a filter that keeps no row, or give another one",
            )
        )
    return table


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema with dictionary-encoded columns as their values and text as one type."""
    return pa.schema([pa.field(field.name, _plain_type(field.type), metadata=field.metadata) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return kind


SPLITS = ("train", "validation", "test")


FIXED_VALUES = {
    "0": 0,
    "1": 1,
    "2": 2,
    "train": 0,
    "training": 0,
    "validation": 1,
    "valid": 1,
    "val": 1,
    "dev": 1,
    "test": 2,
}


def spellings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Splits that are written in more than one way, with the ways: {"train": ["0", "train"]}."""
    ways: dict[int, set[str]] = {}
    for value in {normal_split_value(text) for text in set(texts)}:
        if value in FIXED_VALUES:
            ways.setdefault(FIXED_VALUES[value], set()).add(value)
    return {SPLITS[code]: sorted(values) for code, values in sorted(ways.items()) if len(values) > 1}


def normal_split_value(text: str) -> str:
    """The value without what a spreadsheet adds: " Train" -> "train", "1.0" -> "1"."""
    value = text.strip().lower()
    return value[:-2] if value in ("0.0", "1.0", "2.0") else value
