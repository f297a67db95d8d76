"""The table of bad rows: among good ones, each is an error with its place, or left out and named, by policy.

The campaign gives each to every verb; the suite reads and prepares each (`tests/data/test_bad_rows.py`).

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
NUM_SHORT = 4

_OVERLONG = "add 1 and 2 = " * 40  # the base model's context has 128 tokens
_UNDECODABLE = b"add \xff\xfe ="

Sections = dict[str, Any]
_DROP_BAD: Sections = {"preprocessing": {"on_bad_row": "drop"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way in which a row is bad."""

    name: str
    endings: tuple[str, ...]  # of the formats that can hold it
    says: str  # of the row, in the ledger
    row: bytes | None = None  # the row as it stands in the file: JSON, or cells between commas, which are tabs in a tsv
    question: Any = None  # where that is None: instead of the row's own question
    column: str = "question"  # the one that is bad; answers do not matter where texts are predicted
    event: str = "dropped_bad"  # in the ledger
    policy: Sections = field(default_factory=lambda: _DROP_BAD)  # of the configuration, under which the job goes on
    strict: Sections = field(default_factory=dict)  # under which it is refused, where that is no default


def _missing(strategy: str) -> Sections:
    cells = {"missing_value_strategy": strategy}
    return {"input_features": [{"name": "question", "type": "text", "preprocessing": cells}]}


_ALL = ("csv", "tsv", "json", "jsonl", "parquet")
_JSON, _LINES, _CELLS = ("json", "jsonl"), ("jsonl",), ("csv", "tsv")
_HALF = "column `question` holds half of a character (a lone surrogate such as \\ud83d), which no text can hold"
_HERE = "column `question` holds {} here and text in most rows"

# name, formats, the row as it stands in the file, what is said of it
_WRITTEN: tuple[tuple[str, tuple[str, ...], bytes, str], ...] = (
    ("broken", _LINES, b"{broken", "not valid JSON: Expecting property name enclosed in double quotes at character 2"),
    ("cut short", _LINES, b'{"question": "x", "a', "not valid JSON: Unterminated string starting at at character 19"),
    (
        "a key twice", _JSON, b'{"question": "x", "question": "y", "answer": "z", "split": 0}',
        "JSON that cannot be read: the key 'question' stands twice in one object",
    ),
    ("half a character", _JSON, b'{"question": "\\ud83d", "answer": "x", "split": 0}', _HALF),
    ("half a character in a list", _JSON, b'{"question": ["\\ud83d"], "answer": "x", "split": 0}', _HALF),
    (
        "a name with NUL", _JSON, b'{"\\u0000fault": "x", "question": "x", "answer": "x", "split": 0}',
        "a column's name begins with the character NUL",
    ),
    ("a number", _JSON, b'{"question": 3, "answer": "x", "split": 0}', _HERE.format("a number")),
    ("a huge number", _JSON, b'{"question": 1' + b"0" * 30 + b', "answer": "x", "split": 0}', _HERE.format("a number")),
    ("a list", _JSON, b'{"question": ["x"], "answer": "x", "split": 0}', _HERE.format("a list")),
    ("an object", _JSON, b'{"question": {"b": "x"}, "answer": "x", "split": 0}', _HERE.format("an object")),
    (
        "a truth", _JSON, b'{"question": "x", "answer": true, "split": 0}',
        "column `answer` holds true or false here and text in most rows",
    ),
    ("a list alone", _JSON, b"[1]", " is a list"),
    ("null alone", _JSON, b"null", " is null"),
    ("text alone", _JSON, b'"x"', " is text"),
    ("a number alone", _JSON, b"3", " is a number"),
    ("too few cells", _CELLS, b"x", "1 field where the header has 3"),
    ("too many cells", _CELLS, b"x,y,0,z", "4 fields where the header has 3"),
    ("Latin-1 after UTF-8", _CELLS, b"\xc3\xb6\xc3\xa4\xc3\xbcf\xe9,x,0", "byte 0xE9 is not UTF-8 text; the file"),
    ("a NUL", _CELLS, b"x\0,y,0", "byte 0x00 (NUL) is not text"),
    ("a stray quote", _CELLS, b'"x" y",z,"w",0', "text follows a closing quote"),
)  # fmt: skip

KINDS = (
    Kind(
        name="too long",
        endings=_ALL,
        question=_OVERLONG,
        says="preprocessing.on_overlong is drop",
        policy={"preprocessing": {"on_overlong": "drop"}},
        event="dropped_overlong",
    ),
    Kind(name="undecodable", endings=_ALL, question=_UNDECODABLE, says="not UTF-8 text"),
    Kind(
        name="empty",
        endings=("json", "jsonl", "parquet"),
        says="no value in `question`",
        policy=_missing("drop_row"),
        event="dropped_missing",
        strict=_missing("error"),
    ),
    *(
        Kind(name=name, endings=endings, row=row, says=says, column="answer" if "`answer`" in says else "question")
        for name, endings, row, says in _WRITTEN
    ),
)
VERBS = {"train": ["--output-directory", "new"], "evaluate": ["--split", "full", "--json"], "predict": []}


def run(settings: Settings) -> Iterator[Trial]:
    """Every kind of bad row, in every format, under both policies, for every verb or for one after the other."""
    project = settings.folder / "project"
    project.mkdir()
    build(project, settings.brim)
    cases = _cases(project, settings.brim)
    chosen = spread(len(cases), NUM_SHORT, seed=settings.seed) if settings.short else range(len(cases))
    yield from trials([cases[number] for number in chosen], settings)


def _cases(project: Path, brim: Brim) -> list[Case]:
    judges: list[tuple[str, Callable[..., str]]] = [("error", _judge_refused), ("goes on", _judge_left_out)]
    told = [
        (kind, ending, verb)
        for number, kind in enumerate(KINDS)
        for place, ending in enumerate(kind.endings)
        for verb in (VERBS if kind.row is None else [list(VERBS)[(number + place) % len(VERBS)]])
    ]
    return [
        Case(
            row="bad-rows",
            name=f"{verb}: {kind.name}, {ending}, {policy}",
            judge=partial(judge, project, brim, kind, ending, verb),
        )
        for (kind, ending, verb), (policy, judge) in product(told, judges)
        if (kind.column, verb) != ("answer", "predict")
    ]


def _judge_refused(project: Path, brim: Brim, kind: Kind, ending: str, verb: str) -> str:
    """By default, or where it is asked for: exit code 2, the first row's place, a way out, and nothing left behind."""
    data, command = _prepared(project, kind, ending, verb, policy=kind.strict)
    before = set(project.rglob("*"))
    done = brim(*(part for part in command if part != "--json"), folder=project)  # an error as JSON goes to stdout
    if done.code != 2 or "Traceback" in done.err:
        return f"exit code {done.code}: {done.err[-300:]}"
    if place_of(BAD[0], data) not in done.err:
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

    entries = [(entry["key"], entry["event"], entry["why"]) for entry in pq.read_table(path).to_pylist()]
    rows = [(key, event) for key, event, why in entries if kind.says in why]
    return "" if rows == [(row, kind.event) for row in BAD] else f"the ledger holds {entries}"


def _prepared(project: Path, kind: Kind, ending: str, verb: str, *, policy: dict[str, Any]) -> tuple[str, list[str]]:
    """The project without what an earlier trial left, with bad data; the data's name, and the command."""
    shutil.rmtree(project / "new", ignore_errors=True)
    for path in project.glob("new.*"):
        path.unlink()
    data = f"bad.{ending}"
    (project / data).write_bytes(file_of(kind, ending))
    config = {**CONFIG, **policy}
    if "preprocessing" in policy:
        config["preprocessing"] = {**CONFIG["preprocessing"], **policy["preprocessing"]}
    (project / "bad.yaml").write_text(as_yaml(config))
    ends = ["--output", "new.jsonl"] if verb == "predict" else VERBS[verb]
    return data, [verb, "bad.yaml", "--dataset", data, *ends]


def place_of(row: int, data: str) -> str:
    """How a message names a row, numbered from 0, of a data file: by its line (csv has a header) or by its number."""
    if data.endswith(("json", "parquet")):
        return f"{data}, row {row}"
    return f"{data}:{row + (1 if data.endswith('jsonl') else 2)}"


def file_of(kind: Kind, ending: str) -> bytes:
    """The workshop's rows, of which those in BAD are bad in this way, as a file of a format."""
    if ending == "parquet":
        return _parquet(kind)
    write = _as_json if ending.startswith("json") else _as_cells
    rows = [write(kind, row) if number in BAD else write(None, row) for number, row in enumerate(ROWS)]
    if ending == "json":
        return b"[" + b",\n".join(rows) + b"]"
    lines = rows if ending == "jsonl" else [b"question,answer,split", *rows]
    content = b"".join(line + b"\n" for line in lines)
    return content.replace(b",", b"\t") if ending == "tsv" else content


def _as_json(kind: Kind | None, row: dict[str, Any]) -> bytes:
    if kind is None:
        return json.dumps(row).encode()
    if kind.row is not None:
        return kind.row
    if isinstance(kind.question, bytes):
        return json.dumps({**row, "question": "MARK"}).encode().replace(b"MARK", kind.question)
    return json.dumps({**row, "question": kind.question}).encode()


def _as_cells(kind: Kind | None, row: dict[str, Any]) -> bytes:
    if kind is not None and kind.row is not None:
        return kind.row
    if kind is not None and isinstance(kind.question, bytes):
        return kind.question + f",{row['answer']},{row['split']}".encode()
    text = io.StringIO()
    cells = row if kind is None else {**row, "question": kind.question}
    csv.writer(text, lineterminator="").writerow(cells.values())
    return text.getvalue().encode()


def _parquet(kind: Kind) -> bytes:
    """Plain and uncompressed, with undecodable bytes in a text column, as careless writers leave them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array([row[name] for row in ROWS]) for name in ROWS[0]}
    texts = [kind.question if number in BAD else row["question"] for number, row in enumerate(ROWS)]
    columns["question"] = pa.array(texts, type=pa.binary()).view(pa.string())
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()
