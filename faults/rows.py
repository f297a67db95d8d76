"""Rows that cannot be used, among good ones: an error with their places, or left out and named, by policy.

python -m faults --only rows
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from faults import Settings, Trial
from faults.cases import Case, spread, trials
from faults.forked import Brim, Done
from faults.workshop import CONFIG, ROWS, as_yaml, build

BAD = (3, 12)  # rows, 0-based; a row for training and one for training or evaluation
NUM_SHORT = 6

_OVERLONG = "add 1 and 2 = " * 40  # the base model's context has 128 tokens
_UNDECODABLE = b"add \xff\xfe ="
_MARK = "?undecodable?"  # stands for those bytes until the file is written

Table = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way in which a row is bad."""

    name: str
    question: Any  # instead of the row's own
    endings: tuple[str, ...]  # of the formats that can hold it
    policy: dict[str, Any]  # sections of the configuration under which the job goes on
    event: str  # in the ledger
    strict: dict[str, Any] = field(default_factory=dict)  # sections under which it is refused, where that is no default


_DROP_BAD = {"preprocessing": {"on_bad_row": "drop"}}
_DROP_OVERLONG = {"preprocessing": {"on_overlong": "drop"}}
_DROP_MISSING = {
    "input_features": [{"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}]
}
_MISSING_REFUSED = {
    "input_features": [{"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "error"}}]
}
_ALL = ("csv", "tsv", "json", "jsonl", "parquet")

KINDS = (
    Kind(name="too long", question=_OVERLONG, endings=_ALL, policy=_DROP_OVERLONG, event="dropped_overlong"),
    Kind(name="undecodable", question=_MARK, endings=_ALL, policy=_DROP_BAD, event="dropped_bad"),
    Kind(name="a list for a text", question=[1], endings=("json", "jsonl"), policy=_DROP_BAD, event="dropped_bad"),
    Kind(name="a number for a text", question=7, endings=("json", "jsonl"), policy=_DROP_BAD, event="dropped_bad"),
    Kind(
        name="empty",
        question=None,
        endings=("json", "jsonl", "parquet"),
        policy=_DROP_MISSING,
        event="dropped_missing",
        strict=_MISSING_REFUSED,
    ),
)
VERBS = {"train": ["--output-directory", "new"], "evaluate": ["--split", "full", "--json"], "predict": []}


def run(settings: Settings) -> Iterator[Trial]:
    """Every kind of bad row, in every format, for every verb, under both policies."""
    project = settings.folder / "project"
    project.mkdir()
    build(project, settings.brim)
    cases = _cases(project, settings.brim)
    chosen = spread(len(cases), NUM_SHORT, seed=settings.seed) if settings.short else range(len(cases))
    yield from trials([cases[number] for number in chosen], settings)


def _cases(project: Path, brim: Brim) -> list[Case]:
    judges: list[tuple[str, Callable[..., str]]] = [("error", _judge_refused), ("goes on", _judge_left_out)]
    return [
        Case(
            row="bad-rows",
            name=f"{verb}: {kind.name}, {ending}, {policy}",
            judge=partial(judge, project, brim, kind, ending, verb),
        )
        for kind in KINDS
        for ending, verb, (policy, judge) in product(kind.endings, VERBS, judges)
    ]


def _judge_refused(project: Path, brim: Brim, kind: Kind, ending: str, verb: str) -> str:
    """By default, or where it is asked for: exit code 2, the first row's place, a way out, and nothing left behind."""
    data, command = _prepared(project, kind, ending, verb, policy=kind.strict)
    before = set(project.rglob("*"))
    done = brim(*(part for part in command if part != "--json"), folder=project)  # an error as JSON goes to stdout
    if done.code != 2 or "Traceback" in done.err:
        return f"exit code {done.code}: {done.err[-300:]}"
    if not any(place in done.err for place in _places(data, BAD[0])):
        return f"the place is not named: {done.err[-300:]}"
    if "\n  fix: " not in done.err:
        return f"no way out is named: {done.err[-300:]}"
    left = sorted(path.name for path in set(project.rglob("*")) - before)
    return f"left behind: {left}" if left else ""


def _judge_left_out(project: Path, brim: Brim, kind: Kind, ending: str, verb: str) -> str:
    """Under the policy: the job goes on with all other rows, and says which ones it left out."""
    _, command = _prepared(project, kind, ending, verb, policy=kind.policy)
    done = brim(*command, folder=project)
    if done.code != 0:
        return f"exit code {done.code}: {done.err[-300:]}"
    if f"{len(BAD)} of {len(ROWS)} rows were dropped" not in done.err:
        return f"the rows are not told: {done.err[-300:]}"
    judges = {"train": _of_run, "evaluate": _of_evaluation, "predict": _of_predictions}
    return judges[verb](project, done, kind)


def _of_run(project: Path, done: Done, kind: Kind) -> str:
    counted = json.loads((project / "new" / "plan.json").read_text())["rows"]
    if sum(counted.values()) != len(ROWS) - len(BAD):
        return f"rows by split: {counted}"
    return _fault_of_ledger(project / "new" / "ledger.parquet", kind)


def _of_evaluation(project: Path, done: Done, kind: Kind) -> str:
    num_rows = json.loads(done.out)["num_rows"]
    return "" if num_rows == len(ROWS) - len(BAD) else f"{num_rows} rows were evaluated"


def _of_predictions(project: Path, done: Done, kind: Kind) -> str:
    lines = (project / "new.jsonl").read_text().splitlines()
    rows = [json.loads(line)["row"] for line in lines]
    if rows != [row for row in range(len(ROWS)) if row not in BAD]:
        return f"predicted: rows {rows}"
    return _fault_of_ledger(project / "new.jsonl.ledger.parquet", kind)


def _fault_of_ledger(path: Path, kind: Kind) -> str:
    import pyarrow.parquet as pq

    entries = [(entry["key"], entry["event"]) for entry in pq.read_table(path).to_pylist()]
    return "" if entries == [(row, kind.event) for row in BAD] else f"the ledger holds {entries}"


def _prepared(project: Path, kind: Kind, ending: str, verb: str, *, policy: dict[str, Any]) -> tuple[str, list[str]]:
    """The project without what an earlier trial left, with bad data; the data's name, and the command."""
    shutil.rmtree(project / "new", ignore_errors=True)
    for path in project.glob("new.*"):
        path.unlink()
    table = [{**row, "question": kind.question} if number in BAD else row for number, row in enumerate(ROWS)]
    data = f"bad.{ending}"
    (project / data).write_bytes(_WRITERS[ending](table).replace(_MARK.encode(), _UNDECODABLE))
    config = {**CONFIG, **policy}
    if "preprocessing" in policy:
        config["preprocessing"] = {**CONFIG["preprocessing"], **policy["preprocessing"]}
    (project / "bad.yaml").write_text(as_yaml(config))
    ends = ["--output", "new.jsonl"] if verb == "predict" else VERBS[verb]
    return data, [verb, "bad.yaml", "--dataset", data, *ends]


def _places(data: str, row: int) -> tuple[str, ...]:
    """How a row may be named: by its line (csv has a header), or by its number."""
    line = row + (1 if data.endswith(".jsonl") else 2)
    return f"{data}:{line}", f"{data}, row {row}", f"{data}, row {row + 1}"


def _separated(delimiter: str) -> Callable[[Table], bytes]:
    def write(table: Table) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(table[0]), delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        return text.getvalue().encode()

    return write


def _json(table: Table) -> bytes:
    return json.dumps(table, indent=1).encode()


def _json_lines(table: Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table).encode()


def _parquet(table: Table) -> bytes:
    """Plain and uncompressed, with undecodable bytes in a text column, as careless writers leave them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array([row[name] for row in table]) for name in table[0]}
    texts = [_UNDECODABLE if row["question"] == _MARK else row["question"] for row in table]
    columns["question"] = pa.array(texts, type=pa.binary()).view(pa.string())
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


_WRITERS: dict[str, Callable[[Table], bytes]] = {
    "csv": _separated(","),
    "tsv": _separated("\t"),
    "json": _json,
    "jsonl": _json_lines,
    "parquet": _parquet,
}
