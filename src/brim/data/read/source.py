"""Hold a data set as it was read: one table, its name, where each row stands, which rows are unreadable.

It says whether columns are there and hold what can be read as text, and how splits are spelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.config.text import misspelt
from brim.data.read.columns import nested_values, nested_word, of_one_kind, problem_of, taken_apart, without_origin
from brim.errors import DataError, Problem

DECIMAL_COMMA = b"brim.decimal_comma"  # of a field whose numbers are text, with a comma before their decimals


_AS_TEXT = "text, numbers, true or false, or dates"


MAX_PLACES = 5  # a message locates this many rows and counts the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows to learn from or to run over. `locate(12)` says where row 12 (0-based) stands: "data.jsonl:13".

    A row that could not be read keeps its number: its cells are missing and `faults` says why. What becomes of it is
    decided later (see data/usable).
    """

    table: pa.Table
    name: str  # the file's or folder's name, or what kind of thing was given
    locate: Callable[[int], str]
    faults: Mapping[int, Problem] = field(default_factory=dict)  # why rows cannot be used, by row; without a place
    kinds: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)  # of each cell of a mixed column: "a number", …
    notes: tuple[str, ...] = ()  # what to know of how it was read

    def usable_rows(self) -> npt.NDArray[np.int64]:
        """Return the rows without a fault, in their order."""
        return np.delete(np.arange(self.table.num_rows), list(self.faults))

    def places(self, rows: Sequence[int], remarks: Sequence[str] | None = None) -> str:
        """Return where the first few of these rows stand: "data.csv:2, data.csv:7 and 12 more".

        remarks: on each row, behind its place.
        """
        located = [
            f"{self.locate(row)}{remark}"
            for row, remark in zip(rows[:MAX_PLACES], remarks or [""] * MAX_PLACES, strict=False)
        ]
        more = f" and {len(rows) - MAX_PLACES:,} more" if len(rows) > MAX_PLACES else ""
        return f"{', '.join(located)}{more}"

    def missing(self, column: str, *, is_label: bool = False) -> npt.NDArray[np.bool_]:
        """Return which cells are missing: null, NaN in a number column, or an empty text where it is a label."""
        cells = self.table[column]
        if is_label and (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
            empty = (pc.equal(pc.utf8_trim_whitespace(chunk), "").fill_null(True) for chunk in cells.chunks)
            return np.concatenate([np.zeros(0, np.bool_), *(each.to_numpy(zero_copy_only=False) for each in empty)])
        if cells.null_count == 0 and not pa.types.is_floating(cells.type):
            return np.zeros(len(cells), dtype=np.bool_)
        return np.asarray(pc.is_null(cells, nan_is_null=True).to_numpy(), dtype=np.bool_)

    def of_one_type(self, names: Sequence[str]) -> Source:
        """Return the source with those of these columns that are mixed as columns of one type.

        It is as if other rows were not there; what the cells of such a row were goes to the source's faults.
        """
        faults, table = dict(self.faults), self.table
        mixed = [name for name in dict.fromkeys(names) if name in self.kinds]
        for name in mixed:
            texts, kinds = (each.combine_chunks() for each in (table[name], self.kinds[name]))
            table = table.set_column(table.column_names.index(name), *of_one_kind(name, texts, kinds, faults))
        kinds_left = {name: kinds for name, kinds in self.kinds.items() if name not in mixed}
        return replace(self, table=table, faults=faults, kinds=kinds_left) if mixed else self

    def require_columns(self, wanted: Mapping[str, str]) -> None:
        """Raise DataError for each wanted column (name -> who wants it) that the data lacks."""
        there = self.table.column_names
        DataError.raise_for(
            Problem(
                what=f"no column `{name}`, which {who} names",
                where=self.name,
                expected=f"one of the columns that are there: {listed_columns(there)}",
                fix=self._nearest(name, who),
            )
            for name, who in wanted.items()
            if name not in there
        )

    def require_text(self, names: Sequence[str]) -> None:
        """Raise DataError for each column whose cells are lists, objects or bytes, or of many types."""
        problems, talks = [], self._conversations()
        for name in names:
            column = self.table.schema.field(name)
            mixed, word = problem_of(column), _word(column)
            if mixed is not None:
                problems.append(mixed)
            elif word:
                fix = _chat(name) if name == talks else "write what the model should read as a text column"
                what = f"column `{name}` holds {word}, which are not text"
                problems.append(Problem(what=what, where=self.name, expected=_AS_TEXT, fix=fix))
        DataError.raise_for(problems)

    def has_decimal_commas(self, column: str) -> bool:
        """Return whether a column holds numbers as text, with a comma before their decimals."""
        return DECIMAL_COMMA in (self.table.schema.field(column).metadata or {})

    def plain_field(self, column: str) -> pa.Field:
        """Return a column's field without metadata other than that its text is JSON."""
        return without_origin(self.table.schema.field(column))

    def notes_on_mixed(self, used: Collection[str]) -> list[str]:
        """Return a note for each unused column that has no common type; a used one is checked cell by cell."""
        others = [column for column in self.table.schema if column.name not in used]
        mixed = [problem for problem in map(problem_of, others) if problem is not None]
        return [f"{problem.where}: {problem.what}; it is not used, and was read as text" for problem in mixed]

    def _nearest(self, name: str, who: str) -> str:
        meant = misspelt(name, self.table.column_names)
        talks = self._conversations() if who in _MAY_TALK else None
        if talks is not None and meant in (None, talks):
            return _chat(talks)
        return f"did you mean `{meant}`?" if meant else "name a column of the data, or add this one"

    def _conversations(self) -> str | None:
        """Return the column of conversations: lists of turns with a role (or `from`), or the name `messages`."""
        for column in self.table.schema:
            if _word(column) == "lists":
                cells = self.table[column.name].slice(0, 100).drop_null()
                first = next(iter(nested_values(cells) if nested_word(column) else cells.to_pylist()), None)
                if first and isinstance(first[0], dict) and first[0].keys() & {"role", "from"}:
                    return str(column.name)
        return "messages" if "messages" in self.table.column_names else None


_MAY_TALK = ("input_features[0]", "output_features[0]", "prompt.template")  # who may name conversations by mistake


def _word(column: pa.Field) -> str:
    """Return what a column holds in place of plain values, else nothing."""
    kind = column.type
    if pa.types.is_nested(kind):
        return "objects" if pa.types.is_struct(kind) else "lists"
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return "bytes" if is_bytes or pa.types.is_binary_view(kind) else nested_word(column)


def listed_columns(names: Sequence[str]) -> str:
    """Return the names of columns for a message: "`q`, `a` and 3 more"."""
    shown = ", ".join(f"`{name}`" for name in names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _chat(column: str) -> str:
    chat = "{}" if column == "messages" else f"{{messages: {column}}}"
    return f"set chat: {chat} to learn from the conversations in `{column}`, without input_features and output_features"


def source_of(
    table: pa.Table, *, name: str, locate: Callable[[int], str], faults: Mapping[int, Problem] | None = None
) -> Source:
    """Return a table, as it was read, as a source."""
    table, kinds = taken_apart(table)
    return Source(table=table, name=name, locate=locate, faults=faults or {}, kinds=kinds)


def line_number(name: str, lines: Callable[[], Iterable[int]]) -> Callable[[int], str]:
    """Return places as file:line. lines: the number of each row's line, which are looked up at the first need."""
    found = lru_cache(maxsize=1)(lambda: array("q", lines()))
    return lambda row: f"{name}:{found()[row]}"


def row_number(name: str) -> Callable[[int], str]:
    """Return places as row numbers, for data that has no lines."""
    return lambda row: f"{name}, row {row}"


def require_distinct(names: Sequence[str], where: str, *, what: str = "column names stand twice") -> None:
    """Raise DataError for column names of which one stands twice."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        listed = ", ".join(f"`{name}`" for name in twice)
        expected, fix = "a name of its own for each column", "rename or remove one of them"
        raise DataError(what=f"{what}: {listed}", where=where, expected=expected, fix=fix)


def plain(schema: pa.Schema) -> pa.Schema:
    """Return the schema with dictionary-encoded columns as their values and text as one type."""
    return pa.schema([pa.field(field.name, _plain_type(field.type), metadata=field.metadata) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return kind


SPLITS = ("train", "validation", "test")


_WORDS = (("0", "train", "training"), ("1", "validation", "valid", "val", "dev"), ("2", "test"))


def split_code(text: str) -> int | None:
    """Return the number of the split that a text names, without what a spreadsheet adds (" Train", "1.0")."""
    return next((code for code, words in enumerate(_WORDS) if _plain_word(text) in words), None)


def spellings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the splits that are written in more than one way, with the ways: {"train": ["0", "train"]}."""
    ways: dict[int, set[str]] = {}
    for text in set(texts):
        code = split_code(text)
        if code is not None:
            ways.setdefault(code, set()).add(_plain_word(text))
    return {SPLITS[code]: sorted(words) for code, words in sorted(ways.items()) if len(words) > 1}


def _plain_word(text: str) -> str:
    word = text.strip().lower()
    return word[:-2] if word in ("0.0", "1.0", "2.0") else word
