"""Write predictions to a file, with the ledger and the summary beside it.

The file is parquet, jsonl or csv, by its ending, and is written whole or not at all. It holds the input's rows with
what was generated for each, a block at a time, so that a large data set is never whole in memory. The ledger lists
rows that were cut or left out; the summary says what the prediction consists of and what it took.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from brim.config.prompts import LabelReader
from brim.data.read import Ledger, Source, blocks, nested_type, nested_values, nested_word
from brim.data.tokens import TextEncoder, TokenRows
from brim.errors import DataError, InputError, OutputError, Problem, WriteError
from brim.infer.engines import Response
from brim.infer.metrics import LabelCounts
from brim.storage import whole_file, write_text, writing
from brim.train import package_versions
from brim.workflows.prediction.job import JobFolder, check_job
from brim.workflows.prediction.prompts import OnError, OnOverlong
from brim.workflows.runs import read_json

_MARK = "num_response_tokens"  # in every summary


def ledger_path(output: Path) -> Path:
    """Return the path of the ledger, which lists the rows that were cut or left out of these predictions."""
    return output.with_name(f"{output.name}.ledger.parquet")


def summary_path(output: Path) -> Path:
    """Return the path of the summary, which says what these predictions consist of, and what they took."""
    return output.with_name(f"{output.name}.summary.json")


def check_place(output: Path, *, resume: bool) -> None:
    """Raise OutputError, before any work is done, for a place that cannot be written, or must not be overwritten."""
    require_writable(output)
    check_job(output, resume=resume)
    if not JobFolder(output).path.exists():
        for path, is_own in ((ledger_path(output), _is_ledger), (summary_path(output), _is_summary)):
            if not is_own(path):
                require_free(path)


def write_ledger(ledger: Ledger, output: Path) -> Path | None:
    """Write the ledger where it has entries, and remove an earlier one where it has none. Return its path."""
    path = ledger_path(output)
    if len(ledger):
        ledger.write(path)
        return path
    with writing("the ledger", path):
        path.unlink(missing_ok=True)
    return None


def write_summary(summary: Mapping[str, Any], output: Path) -> None:
    """Write the summary, whole or not at all."""
    path = summary_path(output)
    with writing("the summary", path):
        write_text(path, json.dumps(summary, indent=1) + "\n")


def read_summary(output: Path) -> Mapping[str, Any] | None:
    """Read the summary beside an output; None where there is none."""
    summary = read_json(summary_path(output))
    return summary if _MARK in summary else None


def _is_ledger(path: Path) -> bool:
    """Return whether a file is a ledger, of an output that is gone."""
    try:
        return bool(pq.read_schema(path).names == Ledger.SCHEMA.names)
    except (pa.ArrowInvalid, OSError):
        return False


def _is_summary(path: Path) -> bool:
    output = path.with_name(path.name.removesuffix(".summary.json"))
    return not path.is_symlink() and read_summary(output) is not None


def summary_of(counts: Counts, ledger: Ledger, sittings: Sequence[Mapping[str, Any]], *, device: str) -> dict[str, Any]:
    """Return the summary file's content. sittings: what each process noted when it began and when it ended."""
    begins = [line for line in sittings if line["event"] == "begins"]
    ends = [line for line in sittings if line["event"] == "ends"]
    killed = [begin for begin, end in zip(begins, ends, strict=False) if end.get("killed")]
    seconds = sum(end["seconds"] for end in ends)
    at_most = [begin["about"].get("rows_at_once") for begin in killed]
    return {
        "num_rows": counts.num_rows,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_response_tokens": counts.num_response_tokens,
        "finish_reasons": dict(sorted(counts.finish_reasons.items())),
        "seconds": seconds,
        "rows_per_s": counts.num_rows / seconds if seconds else None,
        "response_tokens_per_s": counts.num_response_tokens / seconds if seconds else None,
        "num_resumed": max(len(begins) - 1, 0),
        "num_killed": len(killed),
        "num_rows_repeated_at_most": None if None in at_most else sum(at_most),
        **({"category": counts.labels.record()} if counts.labels.labels else {}),
        "cut_or_left_out": dict(sorted(Counter(entry.event for entry in ledger).items())),
        "generation": dict(begins[-1]["about"]) | dict(ends[-1].get("about", {})) if ends else {},
        "device": device,
        "versions": package_versions(),
    }


@dataclass(slots=True, kw_only=True)
class Counts:
    """Count what the blocks consist of."""

    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    labels: LabelCounts = field(default_factory=LabelCounts)

    def add(self, responses: list[Response], lengths: NDArray[np.int64]) -> None:
        """Count responses to prompts of these lengths."""
        self.num_rows += len(responses)
        self.num_prompt_tokens += int(lengths.sum())
        self.num_response_tokens += sum(len(response.token_ids) for response in responses)
        self.finish_reasons.update(response.finish_reason for response in responses)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Hold prompts of a source with their responses. response, log_probability: by the prompt's position."""

    source: Source
    prompts: TokenRows  # in the order of the source
    encoder: TextEncoder
    name: str  # of the column of responses
    response: Callable[[int], Response]
    log_probability: Callable[[int], float] | None  # None: no such column
    labels: tuple[str, LabelReader] | None = None  # a column's name, and what finds its labels in the responses
    typed: bool = False  # lists and objects of the input as Arrow's types, where they have one; else as JSON

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of each block: row, the input's columns, the responses and their figures."""
        types = self._types
        fields = [
            pa.field(each.name, types[each.name]) if each.name in types else self.source.plain_field(each.name)
            for each in self.source.table.schema
        ]
        return pa.schema([pa.field(ROW, pa.int64()), *fields, *self._added_fields()])

    def blocks(self, counts: Counts) -> Iterator[pa.Table]:
        """Yield all rows in the order of the source, in blocks, and count them in `counts` meanwhile."""
        schema, types, lengths = self.schema, self._types, self.prompts.lengths
        done = 0
        for rows, block in blocks(self.source.table, self.prompts.keys):
            positions = np.arange(done, done + len(rows))
            done += len(rows)
            responses = [self.response(position) for position in positions.tolist()]
            added = self._added(positions, responses, lengths[positions], counts)
            counts.add(responses, lengths[positions])
            given = [
                nested_values(column) if name in types else column
                for name, column in zip(block.column_names, block.columns, strict=True)
            ]
            yield pa.table([rows, *given, *added], schema=schema)

    @cached_property
    def _types(self) -> dict[str, pa.DataType]:
        """Return the types of the columns that are lists or objects, where they are to be typed."""
        table = self.source.table
        nested = [each.name for each in table.schema if nested_word(each)] if self.typed else []
        found = {name: nested_type(table[name]) for name in nested}
        return {name: kind for name, kind in found.items() if kind is not None}

    def table(self, counts: Counts) -> pa.Table:
        """Return all blocks as one table."""
        return pa.concat_tables([self.schema.empty_table(), *self.blocks(counts)])

    def _added_fields(self) -> list[pa.Field]:
        return [
            pa.field(self.name, pa.string()),
            *([] if self.labels is None else [pa.field(self.labels[0], pa.string())]),
            pa.field("finish_reason", pa.string()),
            pa.field("num_prompt_tokens", pa.int64()),
            pa.field("num_response_tokens", pa.int64()),
            *([] if self.log_probability is None else [pa.field(LOG_PROBABILITY, pa.float64())]),
        ]

    def _added(
        self, positions: NDArray[np.intp], responses: list[Response], lengths: NDArray[np.int64], counts: Counts
    ) -> list[Sequence[Any] | NDArray[Any]]:
        """Return the columns of `_added_fields`."""
        texts = [self.encoder.decode(response.token_ids, skip_special_tokens=True) for response in responses]
        return [
            texts,
            *([] if self.labels is None else [counts.labels.extract(texts, self.labels[1])]),
            [response.finish_reason for response in responses],
            lengths,
            [len(response.token_ids) for response in responses],
            *([] if self.log_probability is None else [list(map(self.log_probability, positions.tolist()))]),
        ]


ROW, LOG_PROBABILITY = "row", "log_probability"


_OWN_COLUMNS = (ROW, "finish_reason", "num_prompt_tokens", "num_response_tokens")


_ROWS_AT_ONCE = 1024


_ROWS_A_GROUP = 4096  # of a parquet file: held in memory together


def check_output(path: Path) -> None:
    """Raise OutputError, before any work is done, for a file that cannot be written or exists already."""
    require_writable(path)
    require_free(path)


def require_free(path: Path) -> None:
    """Raise OutputError where something exists there already."""
    if path.exists() or path.is_symlink():
        raise OutputError(
            what="the output file exists already; nothing was changed", where=str(path), fix="name another"
        )


def require_writable(path: Path) -> None:
    """Raise OutputError, before any work is done, for a file that cannot be written."""
    if path.suffix not in _WRITERS:
        raise OutputError(
            what=f"the output's ending {path.suffix!r} is not known" if path.suffix else "the output has no ending",
            where=str(path),
            expected=", ".join(_WRITERS),
            fix="name the file predictions.parquet, say",
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
    """Raise DataError, before any work is done, for data with columns named like those that predictions add."""
    own = (ROW, *responses, *_OWN_COLUMNS[1:], *([LOG_PROBABILITY] if with_scores else []))
    taken = [name for name in own if name in source.table.column_names]
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken)
        columns, names, them = ("a column", "a name", "it") if len(taken) == 1 else ("columns", "names", "them")
        what = f"the data has {columns} {listed}, {names} that predictions use themselves"
        raise DataError(what=what, where=source.name, fix=f"rename or remove {them}")


def write_predictions(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame in the format of the path's ending. Raises WriteError when it cannot be written."""
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    try:
        blocks = (pa.Table.from_batches([batch]) for batch in table.to_batches(_ROWS_AT_ONCE))
        write_blocks(table.schema, blocks, path)
    except OSError as error:
        raise WriteError(_unwritable(path, error)) from error


def write_blocks(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    """Write tables of one schema, one after the other, in the format of the path's ending, whole or not at all."""
    with whole_file(path) as temporary:
        _WRITERS[path.suffix](schema, blocks, temporary)


def frame_of(table: pa.Table) -> pd.DataFrame:
    """Return a table for pandas; whole numbers stay whole beside empty cells, lists and objects are Python's."""
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for name, values in _nested(table).items():
        frame[name] = pd.Series(values, index=frame.index, dtype=object)
    return frame


def _nested(table: pa.Table) -> dict[str, list[Any]]:
    """Return the values of the columns that hold lists or objects, as such or as JSON."""
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
    """Join blocks by their numbers of rows alone, so that a resumed file is equal to one written at once."""
    held: list[pa.Table] = []
    for block in blocks:
        held.append(block)
        if sum(each.num_rows for each in held) >= _ROWS_A_GROUP:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _write_jsonl(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    """Write JSON without pandas, which rounds numbers to ten digits and turns dates into milliseconds."""
    with path.open("w", encoding="utf-8") as file:
        for block in blocks:
            for record in frame_of(block).to_dict("records"):
                plain = {name: _plain(value) for name, value in record.items()}
                file.write(_json(plain) + "\n")


def _write_csv(schema: pa.Schema, blocks: Iterable[pa.Table], path: Path) -> None:
    """Write CSV with all texts quoted, so that a carriage return does not end a line; lists and objects as JSON."""
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
    """Return None for a missing value, since JSON has no NaN."""
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
        fix="name a file in a folder that can be written to, on a disk with free space",
    )


_WRITERS: dict[str, Callable[[pa.Schema, Iterable[pa.Table], Path], None]] = {
    ".parquet": _write_parquet,
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Say what is asked of a prediction, beside the configuration."""

    output: Path | None
    split: str
    resume: bool = False
    scores: bool = False
    key: str | None = None  # the column by which rows are identified; None: by their numbers
    on_error: OnError | None = None  # None: as the configuration says
    on_overlong: OnOverlong | None = None
    num_members: int = 1  # processes that generate
    is_unnamed: bool = False  # the data set is the configuration's, since none was named

    def require_place(self) -> None:
        """Refuse, before anything is read, an output that cannot be written, or exists and cannot be resumed."""
        if self.output is not None:
            check_place(self.output, resume=self.resume)
        elif self.resume:
            raise InputError(what="without an output there is nothing to resume", fix="name the output")
