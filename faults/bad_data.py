"""Bad data files, drawn by hypothesis: damaged, cut off, of another kind than their name says."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from faults.bad_input import ALL, BadInput, Edit
from faults.workshop import ROWS

ROW = "bad-data"
HEADER = "question,answer,split\n"
CSV = HEADER + "".join(f"{row['question']},{row['answer']},{row['split']}\n" for row in ROWS)
LINES = [json.dumps(row) for row in ROWS]
JSONL = "".join(f"{line}\n" for line in LINES)
JSON = json.dumps(ROWS)
_DEEP = 100_000
_HUGE_LINE_BYTES = 60_000_000


def bad_data() -> st.SearchStrategy[BadInput]:
    """Texts that are known to be bad, and files that are cut or changed at random places."""
    return st.one_of(_known(), _known(), _cut(), _flipped(), _one_bad_row(), _folders())


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


def _arrow() -> bytes:
    import pyarrow as pa

    file = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


PARQUET, ARROW = _parquet(), _arrow()
_ANSWERLESS = json.dumps({"question": "a", "split": 0})

KNOWN: dict[str, str | bytes] = {
    "empty.csv": "",
    "blank.csv": "\n\n \n",
    "header.csv": HEADER,
    "twice.csv": "question,answer,question\na,b,c\n",
    "unnamed.csv": "question,answer,\na,b,c\n",
    "answerless.csv": "question,split\na,0\n",
    "open.csv": CSV + '"a,b,0\n',
    "nul.csv": CSV + "a\0,b,0\n",
    "cututf16.csv": CSV.encode("utf-16")[:-1],
    "latin1.csv": CSV.encode() + "größer ".encode() + "café,b,0\n".encode("latin-1"),
    "splits.csv": CSV + "a,b,7\n",
    "emptysplit.csv": CSV + "a,b,\n",
    "emptycell.csv": CSV + "a,,0\n",
    "gzip.csv": gzip.compress(CSV.encode()),
    "pickle.csv": pickle.dumps(ROWS),
    "parquet.csv": PARQUET,
    "json.csv": JSON,
    "tabs.csv": CSV.replace(",", "\t"),
    "notrain.csv": HEADER + "a,b,1\nc,d,2\n",
    "huge.csv": CSV + '"' + "x " * (_HUGE_LINE_BYTES // 2) + '",b,0\n',
    "manycolumns.csv": ",".join(f"c{n}" for n in range(100_000)) + "\n" + ",".join("1" for _ in range(100_000)) + "\n",
    "commas.csv": "," * 100_000 + "\n",
    "quotes.csv": '"' * 100_001 + "\n",
    "returns.csv": CSV + "\r" * 1_000 + "a\rb,c\r",
    "evil\x1b[31m.csv": "a,b\n1\n",
    "empty.tsv": "",
    "commas.tsv": CSV,
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "list.jsonl": JSON,
    "numbers.jsonl": "1\n2\n",
    "null.jsonl": "null\n",
    "objects.jsonl": "{}\n{}\n",
    "deep.jsonl": JSONL + '{"question": ' + "[" * _DEEP + "]" * _DEEP + "}\n",
    "deepobjects.jsonl": JSONL + '{"a":' * _DEEP + "1" + "}" * _DEEP + "\n",
    "nearlydeep.jsonl": '{"question": ' + "[" * 900 + "]" * 900 + ', "answer": "x", "split": 7}\n',
    "twice.jsonl": JSONL + '{"question": "a", "question": "b", "answer": "c", "split": 0}\n',
    "digits.jsonl": JSONL + '{"question": ' + "9" * 5_000 + ', "answer": "c", "split": 0}\n',
    "beyond64.jsonl": JSONL + '{"question": "a", "answer": "c", "split": 99999999999999999999}\n',
    "surrogate.jsonl": JSONL + '{"question": "\\ud800", "answer": "c", "split": 0}\n',
    "surrogatekey.jsonl": '{"\\ud800": "a"}\n',
    "nan.jsonl": JSONL + '{"question": "a", "answer": NaN, "split": 0}\n',
    "nansplit.jsonl": JSONL + '{"question": "a", "answer": "b", "split": NaN}\n',
    "infinite.jsonl": JSONL + '{"question": "a", "answer": "b", "split": 1e999}\n',
    "textsplit.jsonl": JSONL + '{"question": "a", "answer": "b", "split": "no"}\n',
    "listsplit.jsonl": JSONL + '{"question": "a", "answer": "b", "split": [0]}\n',
    "answerless.jsonl": _ANSWERLESS + "\n",
    "nullanswer.jsonl": JSONL + '{"question": "a", "answer": null, "split": 0}\n',
    "commaed.jsonl": ",\n".join(LINES),
    "comments.jsonl": "// rows\n" + JSONL,
    "single.jsonl": JSONL.replace('"', "'"),
    "utf16.jsonl": JSONL.encode("utf-16"),
    "gzip.jsonl": gzip.compress(JSONL.encode()),
    "pickle.jsonl": pickle.dumps(ROWS),
    "overlong.jsonl": JSONL + json.dumps({"question": "add " * 500, "answer": "b", "split": 0}) + "\n",
    "huge.jsonl": JSONL + '{"question": "' + "a" * _HUGE_LINE_BYTES + '", "answer": "b", "split": 0}\n',
    "hugetruncated.jsonl": JSONL + '{"question": "' + "a" * _HUGE_LINE_BYTES,
    "emptykey.jsonl": '{"": "a"}\n',
    "empty.json": "",
    "list.json": "[]",
    "numbers.json": "[1, 2]",
    "lists.json": "[[1], [2]]",
    "scalar.json": "3",
    "text.json": '"x"',
    "ragged.json": '{"question": ["a", "b"], "answer": ["c"], "split": [0, 0]}',
    "scalars.json": '{"question": "a", "answer": "c"}',
    "deep.json": "[" * _DEEP,
    "deepin.json": '[{"question": ' + "[" * _DEEP,
    "more.json": JSON + JSON,
    "null.json": "null",
    "nothing.parquet": "",
    "magic.parquet": b"PAR1",
    "magics.parquet": b"PAR1PAR1",
    "lying.parquet": b"PAR1" + b"\xff" * 4 + b"PAR1",
    "csv.parquet": CSV,
    "encrypted.parquet": PARQUET[:-4] + b"PARE",
    "rows.pkl": pickle.dumps(ROWS),
    "rows.xlsx": b"PK\x03\x04",
    "rows": JSONL,
    "rows.py": "open('canary', 'w')\n",
    "rows.jsonl.gz": gzip.compress(JSONL.encode()),
    ".jsonl": JSONL,
}

PLACES: dict[str, tuple[Edit, ...]] = {
    "": (),
    " ": (),
    "no.jsonl": (),
    "no/where.csv": (),
    "x" * 300 + ".csv": (),
    "a\nb.csv": (),
    "-": (),
    "~nobody/rows.csv": (),
    "https://u:p@example.org/rows.csv": (),
    "s3://bucket/rows.csv": (),
    "hf://datasets/x/rows.csv": (),
    "/dev/null": (),
    "/dev/zero": (),
    "/proc/self/mem": (),
    "pipe.jsonl": (Edit(path="pipe.jsonl", how="fifo"),),
    "pipe.csv": (Edit(path="pipe.csv", how="fifo"),),
    "pipe.parquet": (Edit(path="pipe.parquet", how="fifo"),),
    "folder.csv": (Edit(path="folder.csv", how="folder"),),
    "zero.csv": (Edit(path="zero.csv", how="link", target="/dev/zero"),),
    "loop.csv": (Edit(path="loop.csv", how="link", target="loop.csv"),),
    "base": (),
    "run": (),
    ".": (),
    "/": (),
}
# What evaluate and predict do not look at where they take all rows: training rows, splits.
_TRAINING = {"notrain.csv", "beyond64.jsonl", "infinite.jsonl", "nansplit.jsonl", "textsplit.jsonl", "listsplit.jsonl"}
_TRAINING |= {"splits.csv", "emptysplit.csv"}


@st.composite
def _known(draw: st.DrawFn) -> BadInput:
    name = draw(st.sampled_from([*KNOWN, *PLACES]))
    if name in PLACES:
        return BadInput(row=ROW, name=f"{name[:40]!r}", edits=PLACES[name], dataset=name)
    content = KNOWN[name]
    edit = Edit(path=name, content=content.encode() if isinstance(content, str) else content)
    answers = name.startswith(("answerless", "objects"))
    left_out = name.startswith(("nullanswer", "nan.", "emptycell"))  # rows without an answer
    return BadInput(
        row=ROW,
        name=name.encode("unicode_escape").decode(),
        edits=(edit,),
        dataset=name,
        says=(name.partition(".")[0].partition("\x1b")[0], name),
        may_pass=ALL if left_out else ("evaluate", "predict") if name in _TRAINING else ("predict",) if answers else (),
    )


@st.composite
def _cut(draw: st.DrawFn) -> BadInput:
    """Files that end too early. A CSV or JSON lines may end anywhere between two rows."""
    name, content = draw(st.sampled_from([("cut.parquet", PARQUET), ("cut.json", JSON.encode())]))
    at = draw(st.integers(1, len(content) - 1))
    edit = Edit(path=name, content=content[:at])
    return BadInput(row=ROW, name=f"{name} after byte {at:,}", edits=(edit,), dataset=name, says=(name,))


@st.composite
def _flipped(draw: st.DrawFn) -> BadInput:
    """Some bytes otherwise: the file may still be one, but nothing may break."""
    name, content = draw(
        st.sampled_from([("flip.parquet", PARQUET), ("flip.csv", CSV.encode()), ("flip.jsonl", JSONL.encode())])
    )
    changes = draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), min_size=1, max_size=4))
    changed = bytearray(content)
    for at, byte in changes:
        changed[at] = byte
    edit = Edit(path=name, content=bytes(changed))
    return BadInput(row=ROW, name=f"{name}: {changes}", edits=(edit,), dataset=name, may_pass=ALL, says=(name,))


@st.composite
def _one_bad_row(draw: st.DrawFn) -> BadInput:
    at = draw(st.integers(0, len(LINES)))
    kind = draw(st.sampled_from(["jsonl", "csv"]))
    if kind == "jsonl":
        bad = draw(
            st.sampled_from(["{", "[1]", "3", "null", '"x"', "{'a': 1}", '{"question": }', "\x00", "{}}", "\xff"])
        )
        lines, name, where = [*LINES[:at], bad, *LINES[at:]], "one.jsonl", f"one.jsonl:{at + 1}"
    else:
        bad = draw(st.sampled_from(["a,b", "a,b,0,c", "a", ",,,,,"]))
        rows = CSV.splitlines()[1:]
        lines, name, where = [HEADER.strip(), *rows[:at], bad, *rows[at:]], "one.csv", f"one.csv:{at + 2}"
    edit = Edit(path=name, content="".join(f"{line}\n" for line in lines).encode("latin-1"))
    return BadInput(row=ROW, name=f"{name}: line {bad!r} at {at}", edits=(edit,), dataset=name, says=(where,))


@st.composite
def _folders(draw: st.DrawFn) -> BadInput:
    """What `datasets` saves, damaged."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": "data.arrow"}],
        "_fingerprint": "x",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {
        "features": {
            name: {"dtype": kind, "_type": "Value"}
            for name, kind in (("question", "string"), ("answer", "string"), ("split", "int64"))
        }
    }
    whole = {
        "state.json": json.dumps(state).encode(),
        "dataset_info.json": json.dumps(info).encode(),
        "data.arrow": ARROW,
    }
    name, change, may_pass = draw(st.sampled_from(_FOLDER_CHANGES))
    files = change(dict(whole), draw(st.integers(0, len(ARROW) - 1)))
    edits = tuple(Edit(path=f"saved/{file}", content=content) for file, content in files.items())
    outside = (Edit(path="outside.arrow", content=ARROW),)
    return BadInput(
        row=ROW,
        name=f"saved: {name}",
        edits=(*edits, *outside),
        dataset="saved",
        says=("saved",),
        may_pass=ALL if may_pass else (),
    )


Files = dict[str, bytes]
FolderChange = Callable[[Files, int], Files]


def _state(**changes: object) -> FolderChange:
    def change(files: Files, at: int) -> Files:
        return {**files, "state.json": json.dumps({**json.loads(files["state.json"]), **changes}).encode()}

    return change


def _without(name: str) -> FolderChange:
    return lambda files, at: {file: content for file, content in files.items() if file != name}


def _with(name: str, content: bytes) -> FolderChange:
    return lambda files, at: {**files, name: content}


_FOLDER_CHANGES: list[tuple[str, FolderChange, bool]] = [
    ("no state.json", _without("state.json"), False),
    ("no dataset_info.json", _without("dataset_info.json"), False),
    ("no arrow file", _without("data.arrow"), False),
    ("state.json is no JSON", _with("state.json", b"{"), False),
    ("state.json is a list", _with("state.json", b"[]"), False),
    ("state.json is nested deeply", _with("state.json", b"[" * _DEEP), False),
    ("dataset_info.json is no JSON", _with("dataset_info.json", b"{"), False),
    ("dataset_info.json is a list", _with("dataset_info.json", b"[]"), False),
    ("unknown feature", _with("dataset_info.json", b'{"features": {"a": {"_type": "os.system"}}}'), False),
    ("features that are none", _with("dataset_info.json", b'{"features": 3}'), False),
    ("a file outside", _state(_data_files=[{"filename": "../outside.arrow"}]), False),
    ("a file anywhere", _state(_data_files=[{"filename": "/etc/passwd"}]), False),
    ("file names that are none", _state(_data_files=[{"filename": 3}]), False),
    ("files that are none", _state(_data_files=3), False),
    ("no files", _state(_data_files=[]), False),
    ("the file thrice", _state(_data_files=[{"filename": "data.arrow"}] * 3), True),
    ("a format of nobody's", _state(_format_type="os"), True),
    ("an empty arrow file", _with("data.arrow", b""), False),
    ("a pickled arrow file", _with("data.arrow", pickle.dumps(ROWS)), False),
    (
        "a script beside",
        lambda files, at: {**_without("state.json")(files, at), "saved.py": b"open('canary', 'w')"},
        False,
    ),
    ("splits outside", _with("dataset_dict.json", b'{"splits": ["../../x"]}'), False),
    ("splits that are none", _with("dataset_dict.json", b'{"splits": 3}'), False),
    ("an arrow file cut", lambda files, at: {**files, "data.arrow": files["data.arrow"][:at]}, True),
    ("an arrow file flipped", lambda files, at: {**files, "data.arrow": _flip(files["data.arrow"], at)}, True),
]


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
