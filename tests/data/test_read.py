"""Every kind of source gives the same table, what is wrong is told with its place, and mixed columns are text."""

import json
import os
import sys
from types import ModuleType

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, strategies as st
from tests.data.conftest import jsonl
from tests.messages import refused
from tests.properties import examples

from brim.config.schema import PreprocessingConfig
from brim.data.read import json as read_jsonl, read
from brim.data.read.encoding import require_utf8
from brim.data.usable import usable
from brim.errors import DataError

ROWS = [
    {"q": "two\nlines", "n": 3, "x": 0.5, "a": 'said "hi", left'},
    {"q": "NaN", "n": 4, "x": 1.0, "a": "NULL"},
    {"q": "ünï", "n": 5, "x": -2.25, "a": "x"},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
CSV = 'q,n,x,a\n"two\nlines",3,0.5,"said ""hi"", left"\nNaN,4,1.0,NULL\nünï,5,-2.25,x\n'
TSV = 'q\tn\tx\ta\n"two\nlines"\t3\t0.5\t"said ""hi"", left"\nNaN\t4\t1.0\tNULL\nünï\t5\t-2.25\tx\n'
JSONL = jsonl(*ROWS)
AS_JSON = [json.dumps(ROWS, indent=2, ensure_ascii=False), json.dumps(COLUMNS), JSONL]


def test_every_format_gives_the_same_rows_with_a_byte_order_mark_or_without(tmp_path):
    for name in ("data.parquet", "data.pq"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    texts = [("data.csv", CSV), ("data.CSV", CSV), ("data.tsv", TSV), ("data.jsonl", JSONL), ("data.ndjson", JSONL)]
    for name, text in [*texts, *(("data.json", text) for text in AS_JSON), ("data.parquet", None), ("data.pq", None)]:
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
        source = read(str(tmp_path / name))
        assert source.name == name
        assert source.table.to_pylist() == ROWS
        assert [str(field.type) for field in source.table.schema] == ["string", "int64", "double", "string"]
    objects = b'{"q": "x", "a": "y"}\r\n'
    for name, text in [("data.csv", b"q,a\r\nx,y\r\n"), ("data.jsonl", objects), ("data.json", b"[" + objects + b"]")]:
        assert read(write_content(tmp_path / name, b"\xef\xbb\xbf" + text)).table.to_pylist() == [{"q": "x", "a": "y"}]


def test_data_in_memory_gives_the_same_rows_and_a_frames_cells_are_values(monkeypatch):
    table = pa.Table.from_pylist(ROWS)
    for data in [COLUMNS, pd.DataFrame(COLUMNS), table, ROWS, tuple(ROWS), Dataset.from_list(ROWS)]:
        source = read(data)
        assert source.table.to_pylist() == ROWS
        assert source.locate(2) == f"{source.name}, row 2"
    rows = [{"q": "a", "n": 1}, {"q": "b"}, {"n": 3, "more": [1, 2]}]
    assert read(rows).table.to_pydict() == {"q": ["a", "b", None], "n": [1, None, 3], "more": [None, None, [1, 2]]}
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))  # a module of one's own is no hindrance
    assert read({"a": ["1", "2"]}).table.num_rows == 2
    source = read(pd.DataFrame({"q": pd.Categorical(["b", "a", "b"])}))
    assert source.table["q"].to_pylist() == ["b", "a", "b"]
    assert not pa.types.is_dictionary(source.table.schema.field("q").type)
    frame = pd.DataFrame({"q": ["x", None], "n": [1.5, float("nan")]})
    assert read(frame).table.to_pylist() == [{"q": "x", "n": 1.5}, {"q": None, "n": None}]


DROP = "set preprocessing.on_bad_row: drop to go on without such rows"
JSON = "expected: a list of objects (one a row), or one object of lists (one a column)"
ENDINGS = "csv, tsv, json, jsonl (or ndjson), parquet (or pq), or a folder saved by `datasets`"
NO_ROWS = "the data set has no rows … at least one row of data … look at what makes it, such as a filter"
# A name, its content, and the words of each problem; a row of which a line is wrong may be dropped. Other files, and
# rows of each kind, stand in faults/mistakes.py and faults/rows.py.
BAD_FILES = [
    ("data.jsonl", "\n\n", [f"data.jsonl: {NO_ROWS}"]),
    ("data.json", "[]", [f"data.json: {NO_ROWS}"]),
    ("data.json", " \n", ["data.json: the file is empty"]),
    ("data.csv", "\n\n", ["data.csv: the file is empty … a header line and at least one row"]),
    ("data.docx", "x", [f"{{folder}}/data.docx: the ending '.docx' is not known … {ENDINGS} … rename the file"]),
    ("data", "x", [f"{{folder}}/data: the file has no ending that says its format … {ENDINGS}"]),
    ("data.jsonl", '{"q": 1}\n\n[1]\n{"q": 1}\n', [f"data.jsonl:3: this line is a list … one JSON object a line … {DROP}"]),
    ("data.json", '[{"q": "x"}\n {"q": "y"}]', [
        f"data.json:2: not valid JSON: Expecting ',' delimiter at character 2 of the line … {JSON}"]),
    ("data.json", '[{"q": 1}]\nx', ["data.json:2: not valid JSON: Extra data at character 1 of the line"]),
    ("data.json", '[{"q": 1}, 2]', [f"data.json, row 1: this is a number, not an object … {DROP}"]),
    ("data.json", '{"q": "x"}', [f"data.json: the file holds an object whose values are not lists … {JSON}"]),
    ("data.json", '"x"', [f"data.json: the file holds text … {JSON}"]),
    ("data.json", '{"q": ["x", "y"], "a": ["z"]}', ["data.json: the columns differ in length: `q` 2, `a` 1"]),
    ("data.csv", 'q,a,b\n"x\ny",2,3\n1,2\n', [f"data.csv:4: 2 fields where the header has 3 … 3 fields … {DROP}"]),
    ("data.parquet", "PAR1 but no more", ["data.parquet: the parquet file cannot be read: … write or download it again"]),
    ("~nobody-of-this-name/rows.csv", None, ["… no file can be read by this name"]),
    ("x" * 300 + ".csv", None, ["… no file can be read by this name"]),
]  # fmt: skip


def test_what_is_wrong_with_a_file_is_told_with_its_place(tmp_path):
    for name, content, words in BAD_FILES:
        given = name if content is None else write_content(tmp_path / name, content)
        with refused(*(each.replace("{folder}", str(tmp_path)) for each in words), by=DataError):
            usable(read(given), [], PreprocessingConfig(on_bad_row="error"))


CELLS = st.text('a1\\"]},ü😀\n', max_size=5) | st.integers() | st.none()
LISTS = st.lists(st.dictionaries(st.sampled_from("qa"), CELLS, max_size=2), min_size=1, max_size=8)


@given(
    rows=LISTS,
    indent=st.sampled_from([None, 1]),
    ascii=st.booleans(),
    window=st.integers(1, 40),
    cut=st.integers(0, 99),
)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_list_is_read_as_a_whole_would_be_by_any_window(tmp_path, monkeypatch, rows, indent, ascii, window, cut):
    """What comes out, and where it stops being JSON."""
    monkeypatch.setattr(read_jsonl, "_WINDOW", window)
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii)
    write_content(tmp_path / "data.json", text)
    expected = [{name: row.get(name) for name in dict.fromkeys(key for each in rows for key in each)} for row in rows]
    if expected[0]:
        texts = [list(map(str, row.values())) for row in read(tmp_path / "data.json").table.to_pylist()]
        assert texts == [list(map(str, row.values())) for row in expected]
    part = text[: len(text) * cut // 100]
    write_content(tmp_path / "data.json", part)
    if part:
        with pytest.raises(json.JSONDecodeError) as whole:
            json.loads(part)
        with pytest.raises(DataError) as caught:
            read(tmp_path / "data.json")
        assert caught.value.problems[0].where == f"data.json:{whole.value.lineno}"
        assert f" at character {whole.value.colno:,} of the line" in caught.value.problems[0].what


def write_content(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_missing_files_and_pipes_are_not_read(tmp_path):
    for name, words in [
        ("x/data.csv", f"no such file: {tmp_path}/x/data.csv (there is no folder {tmp_path}/x)"),
        ("something-else.csv", "no such file: … check the path; it is taken from the current folder"),
    ]:
        with refused(words, by=DataError):
            read(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.csv")
    for name in (str(tmp_path / "pipe.csv"), "/dev/zero"):
        with pytest.raises(DataError, match=f"{name}: this is not a regular file\n"):
            read(name)


BAD_DATA = [
    ({}, f"the given columns: {NO_ROWS}"),
    ({"q": []}, f"the given columns: {NO_ROWS}"),
    ({"q": "xyz"}, "the given columns: not a list: `q` … a list a column"),
    ({"q": [1, 2], "a": [1]}, "the given columns: the columns differ in length: `q` 2, `a` 1"),
    (pd.DataFrame([[1, 2]], columns=["q", "q"]), "the data frame: column names stand twice: `q` … rename"),
    ("https://me:secret@host/x/data.csv", "no such file: https:/***@host/x/data.csv (there is no folder https:/***@host/x)"),
    ([1], "a data set cannot be of the type list of int … a path or a list of paths, … a list of dicts, … make a list of it"),
    (iter(ROWS), "a data set cannot be of the type list_iterator … make a list of it"),
    ([ROWS[0], "more.csv"], "a data set cannot be of the type list of dict and str"),
]  # fmt: skip


def test_what_is_wrong_with_data_in_memory_is_told_with_its_place():
    for data, words in BAD_DATA:
        with refused(words, by=DataError):
            read(data)


def test_json_beyond_pythons_limits_is_told(tmp_path):
    for name, start in [("data.jsonl", '{"q": '), ("data.json", "["), ("data.json", '{"q": ')]:
        (tmp_path / name).write_text(start + "[" * 100_000)
        with pytest.raises(DataError, match=f"^{name}:1: JSON that cannot be read: maximum recursion depth exceeded"):
            read(tmp_path / name)


@given(text=st.text(max_size=30), bad=st.sampled_from([b"\xff", b"\x00", b"\xc3", b"\xe9x"]), block=st.integers(1, 9))
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_first_bad_byte_is_found_across_blocks(tmp_path, monkeypatch, text, bad, block):
    monkeypatch.setattr("brim.data.read.encoding._BLOCK_BYTES", block)
    start = text.replace("\0", "").encode()
    path = tmp_path / "data.csv"
    path.write_bytes(start + b"\n" * 3)
    require_utf8(path)
    path.write_bytes(start + bad)
    with pytest.raises(DataError) as caught:
        require_utf8(path)
    line = 1 + start.count(b"\n")
    assert f"data.csv:{line}: byte 0x{bad[0]:02X} (byte {len(start)} of the file)" in str(caught.value)


SAVE_AS = "open it in the program that wrote it and save the sheet as csv (in Excel: Save As, CSV UTF-8)"
UNPACK = "unpack it, and name the file that it holds"
NO_TEXT = [
    ("d.csv", b"PK\x03\x04x", "the file is a spreadsheet or a zip archive", f"{SAVE_AS}; or unpack it"),
    ("d.csv", b"\xd0\xcf\x11\xe0\xa1", "the file is an old Excel file", SAVE_AS),
    ("d.zip", b"PK\x03\x04x", "the file is an archive, which is not read", UNPACK),
    ("d.jsonl.gz", b"\x1f\x8bx", "the file is compressed, which is not read", UNPACK),
    ("d.jsonl", b"\x1f\x8bx", "the file is compressed by gzip", "unpack it with gunzip, once it is named as such (.gz)"),
    ("d.csv", b"PAR1xx", "the file is parquet", "rename it to .parquet"),
]  # fmt: skip


def test_what_is_no_text_file_and_a_folder_of_files_are_one_message(tmp_path):
    for name, content, what, fix in NO_TEXT:
        with pytest.raises(DataError) as caught:
            read(write_content(tmp_path / name, content))
        (problem,) = caught.value.problems
        assert (problem.what, problem.fix) == (what, fix)
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.csv", "b.csv", "notes.txt"):
        (folder / name).write_text("q\nx\n")
    with refused(f"… fix: name a file in it instead, or all of them: '{folder}/*.csv'", by=DataError):
        read(folder)
    assert read(f"{folder}/*.csv").table.num_rows == 2


ONE_TYPE = f"one type in all rows of a column … e.g. all as text; or {DROP}"
MIXED_FILES = [
    ("data.jsonl", '{"q": "x"}\n\n{"q": null}\n{"q": 3}\n',
     f"data.jsonl:4: column `q` changes its type: a number here, text in data.jsonl:1 … {ONE_TYPE}"),
    ("data.jsonl", '{"q": 1}\n{"q": 99999999999999999999}\n',
     f"data.jsonl:2: column `q` holds a whole number beyond 64 bits … as text, in quotes; or {DROP}"),
    ("data.jsonl", '{"q": 0.5}\n{"q": 9007199254740993}\n',
     f"data.jsonl:2: column `q` holds fractions and a whole number beyond 53 bits … as text, in quotes; or {DROP}"),
    ("data.json", '[{"q": {}}, {"q": []}]',
     "data.json, row 1: column `q` changes its type: a list here, an object in data.json, row 0"),
]  # fmt: skip
MIXED_DATA = [
    ({"q": ["x", None, 3]},
     "the given columns, row 2: column `q` changes its type: a number here, text in the given columns, row 0"),
    ({"q": [[1], [2], ["x"]]}, "the given columns, row 2: column `q` holds values of different shapes"),
    (pd.DataFrame({"q": ["x", 3]}), f"the data frame, row 1: column `q` changes its type: … row 0 … {ONE_TYPE}"),
]  # fmt: skip


def require_mixed(source, words):
    with refused(words, by=DataError):
        source.require_text(["q"])
    assert [note.endswith("; it is not used, and was read as text") for note in source.notes_on_mixed([])] == [True]
    assert source.notes_on_mixed(["q"]) == []


def test_a_column_of_mixed_types_is_an_error_where_it_is_used_and_else_a_note(tmp_path, monkeypatch, prepared):
    for data, words in MIXED_DATA:
        require_mixed(read(data), words)
    for name, content, words in MIXED_FILES:
        path = write_content(tmp_path / name, content)
        require_mixed(read(path), words)
        with monkeypatch.context() as patch:
            patch.setattr("brim.data.read.spill.SPILL_BYTES", 0)
            for _ in range(2):  # the second time from the copy that was kept
                require_mixed(read(path), words)
    mixed = '{"q": "x", "a": "y", "id": 1}\n{"q": "x", "a": "y", "id": "31"}\n' * 10
    path, changes_type = write_content(tmp_path / "data.jsonl", mixed), "data.jsonl:2: column `id` changes its type"
    for policy in ("auto", "drop"):
        done = prepared(path, preprocessing__on_bad_row=policy)
        said = f"{changes_type}: text here, a number in data.jsonl:1; it is not used, and was read as text"
        assert said in done.notes
        assert (len(done.ledger), len(done.splits["train"])) == (0, 20)
    for changes in ({"input__name": "id"}, {"preprocessing__split": {"type": "hash", "column": "id"}}):
        with refused(changes_type, by=DataError):
            prepared(path, **changes)


@pytest.mark.parametrize("batch_rows", [1, 2, 4096])
def test_what_is_mixed_or_nested_is_read_as_text(tmp_path, monkeypatch, batch_rows):
    monkeypatch.setattr("brim.data.read.columns.BATCH_ROWS", batch_rows)
    monkeypatch.setattr("brim.data.read.spill.SPILL_BYTES", 100)
    rows = [
        {"q": "x", "id": 1, "meta": {"a": 1}, "n": 1},
        {"q": "y", "id": "31", "meta": None, "late": [1, "ü"]},
        {"q": "z", "id": True, "meta": {"b": {"c": 0.5}}, "n": 0.5},
        {"q": "ü", "id": {"n": [1]}},
    ]
    source = read(write_content(tmp_path / "data.jsonl", jsonl(*rows)))
    assert source.table.to_pydict() == {
        "q": ["x", "y", "z", "ü"],
        "id": ["1", "31", "true", '{"n": [1]}'],
        "meta": ['{"a": 1}', None, '{"b": {"c": 0.5}}', None],
        "n": [1.0, None, 0.5, None],
        "late": [None, '[1, "ü"]', None, None],
    }
    source.require_text(["q"])
    changes = "data.jsonl:2: column `id` changes its type: text here, a number in data.jsonl:1"
    with refused(changes, "… column `meta` holds objects, which are not text", "… column `late` holds lists"):
        source.require_text(["id", "meta", "late"])
    assert source.notes_on_mixed(["q"]) == [f"{changes}; it is not used, and was read as text"]


def test_reading_starts_over_once_however_often_types_change(tmp_path, monkeypatch):
    monkeypatch.setattr("brim.data.read.columns.BATCH_ROWS", 2)
    rows = [{"q": "x", f"k{number // 3}": number if number % 2 else "x"} for number in range(40)]
    write_content(tmp_path / "data.jsonl", jsonl(*rows))
    opened = []
    lines = read_jsonl._lines
    monkeypatch.setattr(read_jsonl, "_lines", lambda path: opened.append(path) or lines(path))
    assert read(tmp_path / "data.jsonl").table.num_columns == 15
    assert len(opened) == 3  # types, values, and once for the lines to name


@given(
    values=st.lists(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text("aü1"), min_size=1
    )
)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_column_of_one_type_keeps_its_values_and_another_its_text(tmp_path, values):
    path = write_content(tmp_path / "data.jsonl", jsonl(*({"q": value, "x": "x"} for value in values)))
    column = read(path).table["q"]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        assert repr(column.to_pylist()) == repr(values)
    elif kinds == {int, float} and not pa.types.is_string(column.type):
        assert repr(column.to_pylist()) == repr([None if value is None else float(value) for value in values])
        assert all(value == int(float(value)) for value in values if isinstance(value, int))
    else:
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        assert column.to_pylist() == texts
