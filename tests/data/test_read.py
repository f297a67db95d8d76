"""Every kind of source gives the same table."""

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
from tests.properties import examples

from brim.config.schema import PreprocessingConfig
from brim.data.read import read
from brim.data.read.encoding import require_utf8
from brim.data.usable import usable
from brim.errors import DataError

ROWS = [
    {"q": "two\nlines", "n": 3, "x": 0.5, "a": 'said "hi", left'},
    {"q": "NaN", "n": 4, "x": 1.0, "a": "NULL"},
    {"q": "ünï", "n": 5, "x": -2.25, "a": "x"},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


def as_csv(path):
    path.write_text(
        'q,n,x,a\n"two\nlines",3,0.5,"said ""hi"", left"\nNaN,4,1.0,NULL\nünï,5,-2.25,x\n', encoding="utf-8"
    )


def as_tsv(path):
    path.write_text('q\tn\tx\ta\n"two\nlines"\t3\t0.5\t"said ""hi"", left"\nNaN\t4\t1.0\tNULL\nünï\t5\t-2.25\tx\n')


def as_json(path):
    path.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False))


def as_json_columns(path):
    path.write_text(json.dumps(COLUMNS))


def as_jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def as_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("data.csv", as_csv),
        ("data.CSV", as_csv),
        ("data.tsv", as_tsv),
        ("data.json", as_json),
        ("data.json", as_json_columns),
        ("data.json", as_jsonl),
        ("data.jsonl", as_jsonl),
        ("data.ndjson", as_jsonl),
        ("data.parquet", as_parquet),
        ("data.pq", as_parquet),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)
    source = read(str(tmp_path / name))
    assert source.name == name
    assert source.table.to_pylist() == ROWS
    assert [str(field.type) for field in source.table.schema] == ["string", "int64", "double", "string"]


@pytest.mark.parametrize(
    "data",
    [COLUMNS, pd.DataFrame(COLUMNS), pa.Table.from_pylist(ROWS), ROWS, tuple(ROWS), Dataset.from_list(ROWS)],
    ids=["dict", "frame", "table", "list", "tuple", "data set"],
)
def test_data_in_memory_gives_the_same_rows(data):
    source = read(data)
    assert source.table.to_pylist() == ROWS
    assert source.locate(2) == f"{source.name}, row 2"


def test_a_column_that_a_row_of_a_list_does_not_have_is_empty_there():
    rows = [{"q": "a", "n": 1}, {"q": "b"}, {"n": 3, "more": [1, 2]}]
    assert read(rows).table.to_pylist() == [
        {"q": "a", "n": 1, "more": None},
        {"q": "b", "n": None, "more": None},
        {"q": None, "n": 3, "more": [1, 2]},
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    (tmp_path / "data.csv").write_bytes(b"\xef\xbb\xbfq,a\r\nx,y\r\n")
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"q": "x", "a": "y"}\r\n')
    (tmp_path / "data.json").write_bytes(b'\xef\xbb\xbf[{"q": "x", "a": "y"}]')
    for name in ("data.csv", "data.jsonl", "data.json"):
        assert read(tmp_path / name).table.to_pylist() == [{"q": "x", "a": "y"}]


def test_categories_become_their_values():
    source = read(pd.DataFrame({"q": pd.Categorical(["b", "a", "b"])}))
    assert source.table.to_pylist() == [{"q": "b"}, {"q": "a"}, {"q": "b"}]
    assert not pa.types.is_dictionary(source.table.schema.field("q").type)


def test_missing_cells_of_a_frame_are_missing():
    assert read(pd.DataFrame({"q": ["x", None], "n": [1.5, float("nan")]})).table.to_pylist() == [
        {"q": "x", "n": 1.5},
        {"q": None, "n": None},
    ]


def test_a_frame_of_objects_is_read_value_by_value():
    frame = pd.DataFrame({"q": pd.Series(["x", None, "y"], dtype=object)})
    assert read(frame).table["q"].to_pylist() == ["x", None, "y"]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


JSON_EXPECTED = "\n  expected: a list of objects (one a row), or one object of lists (one a column)"

NO_ROWS = (
    "the data set has no rows\n  expected: at least one row of data\n"
    "  fix: look at what makes it, such as a filter that keeps no row, or give another one"
)

BAD_FILES = {
    "empty": ("data.jsonl", "", "data.jsonl: the file is empty\n  expected: at least one row of data"),
    "only blanks": ("data.jsonl", "\n\n", f"data.jsonl: {NO_ROWS}"),
    "empty json list": ("data.json", "[]", f"data.json: {NO_ROWS}"),
    "blank json": ("data.json", " \n", "data.json: the file is empty\n  expected: at least one row of data"),
    "blank csv": (
        "data.csv",
        "\n\n",
        "data.csv: the file is empty\n  expected: a header line and at least one row of data",
    ),
    "header only": (
        "data.csv",
        "q,a\n",
        "data.csv: there is a header but no rows\n  expected: at least one row of data",
    ),
    "unknown ending": (
        "data.docx",
        "x",
        "{folder}/data.docx: the ending '.docx' is not known\n"
        "  expected: csv, tsv, json, jsonl (or ndjson), parquet (or pq), or a folder saved by `datasets`\n"
        "  fix: rename the file to what it holds, or convert it",
    ),
    "no ending": (
        "data",
        "x",
        "{folder}/data: the file has no ending that says its format\n"
        "  expected: csv, tsv, json, jsonl (or ndjson), parquet (or pq), or a folder saved by `datasets`\n"
        "  fix: rename the file to what it holds, or convert it",
    ),
    "one broken line": (
        "data.jsonl",
        '{"q": "x"}\n\n{"q": "y"\n{"q": "z"}\n',
        "data.jsonl:3: not valid JSON: Expecting ',' delimiter at character 10\n  expected: one JSON object a line\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "broken lines": (
        "data.jsonl",
        '{"q": 1}\n' * 7 + "{]\n" * 7,
        "".join(
            f"data.jsonl:{line}: not valid JSON: Expecting property name enclosed in double quotes at character 2\n"
            "  expected: one JSON object a line\n"
            for line in range(8, 13)
        )
        + "data.jsonl: 2 more rows are bad\n  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "no objects": (
        "data.jsonl",
        '{"q": 1}\n[1]\nnull\n3\n{"q": 1}\n{"q": 1}\n',
        "data.jsonl:2: this line is a list\n  expected: one JSON object a line\n"
        "data.jsonl:3: this line is null\n  expected: one JSON object a line\n"
        "data.jsonl:4: this line is a number\n  expected: one JSON object a line\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "a list as lines": (
        "data.jsonl",
        '[\n  {"q": 1}\n]\n',
        "data.jsonl: the file is one JSON list, not one object a line\n  fix: rename it to data.json",
    ),
    "half a character": (
        "data.jsonl",
        '{"q": "x"}\n{"q": "\\ud83d"}\n',
        "data.jsonl:2: column `q` holds half of a character (a lone surrogate such as \\ud83d), which no text can hold\n"
        "  fix: write the whole character, or remove it; or set preprocessing.on_bad_row: drop to go on without such "
        "rows",
    ),
    "half a character, nested": (
        "data.jsonl",
        '{"q": "x"}\n{"q": ["\\ud83d"]}\n',
        "data.jsonl:2: column `q` holds half of a character (a lone surrogate such as \\ud83d), which no text can hold\n"
        "  fix: write the whole character, or remove it; or set preprocessing.on_bad_row: drop to go on without such "
        "rows",
    ),
    "a key twice": (
        "data.jsonl",
        '{"q": "x"}\n{"q": "x", "a": "", "a": "y"}\n',
        "data.jsonl:2: JSON that cannot be read: the key 'a' stands twice in one object\n"
        "  expected: one JSON object a line\n  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "a nested key twice": (
        "data.json",
        '[{"q": "x"},\n {"q": {"b": 1, "b": 1}}]\n',
        "data.json, row 1: JSON that cannot be read: the key 'b' stands twice in one object\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "broken json": (
        "data.json",
        '[\n  {"q": "x"},\n  {"q": }\n]\n',
        "data.json:3: not valid JSON: Expecting value at character 9 of the line" + JSON_EXPECTED,
    ),
    "json without a comma": (
        "data.json",
        '[{"q": "x"}\n {"q": "y"}]',
        "data.json:2: not valid JSON: Expecting ',' delimiter at character 2 of the line" + JSON_EXPECTED,
    ),
    "json cut short": (
        "data.json",
        '[{"q": "x"},\n',
        "data.json:2: not valid JSON: Expecting value at character 1 of the line" + JSON_EXPECTED,
    ),
    "json with more": (
        "data.json",
        '[{"q": 1}]\nx',
        "data.json:2: not valid JSON: Extra data at character 1 of the line" + JSON_EXPECTED,
    ),
    "json of numbers": (
        "data.json",
        '[{"q": 1}, 2]',
        "data.json, row 1: this is a number, not an object\n  expected: a list of objects\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "json object": (
        "data.json",
        '{"q": "x"}',
        "data.json: the file holds an object whose values are not lists\n"
        "  expected: a list of objects (one a row), or one object of lists (one a column)",
    ),
    "json text": (
        "data.json",
        '"x"',
        "data.json: the file holds text\n  expected: a list of objects (one a row), or one object of lists (one a column)",
    ),
    "uneven columns": (
        "data.json",
        '{"q": ["x", "y"], "a": ["z"]}',
        "data.json: the columns differ in length: `q` 2, `a` 1\n  expected: a value a row in each column",
    ),
    "too few fields": (
        "data.csv",
        'q,a,b\n"x\ny",2,3\n1,2\n',
        "data.csv:4: 2 fields where the header has 3\n  expected: 3 fields\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "too many fields": (
        "data.csv",
        "q,a\n1,2\n1,2,3\n",
        "data.csv:3: 3 fields where the header has 2\n  expected: 2 fields\n"
        '  fix: put cells that hold commas, quotes or line breaks in "double quotes"; or '
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "many ragged lines": (
        "data.csv",
        "q,a\n" + "1\n" * 8,
        "".join(f"data.csv:{line}: 1 field where the header has 2\n  expected: 2 fields\n" for line in range(2, 7))
        + "data.csv: 3 more rows are bad\n"
        "data.csv: 8 of 8 rows are bad, more than preprocessing.on_bad_row: drop leaves out\n"
        "  expected: a file of another kind, or other columns: at most half of the rows may be bad\n"
        "  fix: look at the first of them",
    ),
    "open quote": (
        "data.csv",
        'q,a\n1,"x\n2,y\n',
        "data.csv:2: a quoted cell begins in this row and never ends; where the next row begins, in the 2 lines that it "
        'takes, cannot be told\n  expected: a closing "\n'
        '  fix: close the quote; inside a quoted cell, write a quote twice: ""',
    ),
    "a name twice": (
        "data.csv",
        "q,a,q\n1,2,3\n",
        "data.csv:1: column names stand twice in the header: `q`\n  expected: a name of its own for each column\n"
        "  fix: rename or remove one of them",
    ),
    "Windows-1252": (
        "data.jsonl",
        b'{"q": "x"}\n{"q": "y"}\n{"q": "caf\xe9"}\n',
        "data.jsonl:3: byte 0xE9 is not UTF-8 text; the file looks like WINDOWS-1252\n"
        "  expected: a text file in UTF-8\n"
        "  fix: save it as UTF-8, e.g. `iconv -f WINDOWS-1252 -t UTF-8 data.jsonl > data-utf8.jsonl`; or "
        "set preprocessing.on_bad_row: drop to go on without such rows",
    ),
    "UTF-16": (
        "data.jsonl",
        '{"q": "x"}'.encode("utf-16"),
        "data.jsonl:1: byte 0xFF (byte 0 of the file) is not UTF-8 text; the file looks like UTF-16\n"
        "  expected: a text file in UTF-8\n"
        "  fix: save it as UTF-8, e.g. `iconv -f UTF-16 -t UTF-8 data.jsonl > data-utf8.jsonl`",
    ),
    "UTF-16 without a mark": (
        "data.csv",
        "q,a\nx,y\n".encode("utf-16-le"),
        "data.csv:1: byte 0x00 (byte 1 of the file) is not UTF-8 text; the file looks like UTF-16LE\n"
        "  expected: a text file in UTF-8\n"
        "  fix: save it as UTF-8, e.g. `iconv -f UTF-16LE -t UTF-8 data.csv > data-utf8.csv`",
    ),
    "cut character": (
        "data.tsv",
        b"q\ta\nx\ty\xc3",
        "data.tsv:2: byte 0xC3 (byte 7 of the file) is not UTF-8 text; the file looks like WINDOWS-1252\n"
        "  expected: a text file in UTF-8\n"
        "  fix: save it as UTF-8, e.g. `iconv -f WINDOWS-1252 -t UTF-8 data.tsv > data-utf8.tsv`",
    ),
    "no parquet": (
        "data.parquet",
        "PAR1 but no more",
        "data.parquet: the parquet file cannot be read: Parquet magic bytes not found in footer\n"
        "  expected: a whole parquet file\n  fix: write or download it again",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_what_is_wrong_with_a_file_is_told_with_its_place(tmp_path, name, content, message):
    write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        usable(read(tmp_path / name), [], PreprocessingConfig(on_bad_row="error"))
    assert str(caught.value) == message.replace("{folder}", str(tmp_path))


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "tain.jsonl")
    assert str(caught.value) == f"no such file: {tmp_path}/tain.jsonl\n  fix: did you mean {tmp_path}/train.jsonl?"
    with pytest.raises(DataError, match=r"no such file: .*/x/data.csv \(there is no folder .*/x\)"):
        read(tmp_path / "x" / "data.csv")
    with pytest.raises(DataError, match="fix: check the path; it is taken from the current folder"):
        read(tmp_path / "something-else.csv")


WHAT_IT_CAN_BE = (
    "  expected: a path or a list of paths, a pandas frame, a dict of columns, a list of dicts, an Arrow table, or a "
    "Dataset or DatasetDict of `datasets`\n"
    "  fix: a stream or an iterator is not read: save it to a file, or make a list of it"
)
BAD_DATA = {
    "nothing": ({}, f"the given columns: {NO_ROWS}"),
    "no rows": ({"q": []}, f"the given columns: {NO_ROWS}"),
    "text for a list": ({"q": "xyz"}, "the given columns: not a list: `q`\n  expected: a list a column"),
    "uneven": (
        {"q": [1, 2], "a": [1]},
        "the given columns: the columns differ in length: `q` 2, `a` 1\n  expected: a value a row in each column",
    ),
    "frame with a name twice": (
        pd.DataFrame([[1, 2]], columns=["q", "q"]),
        "the data frame: column names stand twice: `q`\n  expected: a name of its own for each column\n"
        "  fix: rename or remove one of them",
    ),
    "an empty path": ("", "an empty path was given as the data set\n  expected: a file, or a saved folder"),
    "a login": (
        "https://me:secret@host/x/data.csv",
        "no such file: https:/***@host/x/data.csv (there is no folder https:/***@host/x)\n  fix: check the path",
    ),
    "a list": (
        [1],
        f"a data set cannot be of the type list of int\n{WHAT_IT_CAN_BE}",
    ),
    "an iterator": (iter(ROWS), f"a data set cannot be of the type list_iterator\n{WHAT_IT_CAN_BE}"),
    "rows and files": (
        [ROWS[0], "more.csv"],
        f"a data set cannot be of the type list of dict and str\n{WHAT_IT_CAN_BE}",
    ),
}


@pytest.mark.parametrize(("data", "message"), BAD_DATA.values(), ids=BAD_DATA)
def test_what_is_wrong_with_data_in_memory_is_told_with_its_place(data, message):
    with pytest.raises(DataError) as caught:
        read(data)
    assert str(caught.value) == message


def test_a_damaged_parquet_file_is_told(tmp_path):
    pq.write_table(pa.table({"q": [str(number) for number in range(1000)]}), tmp_path / "data.parquet")
    whole = (tmp_path / "data.parquet").read_bytes()
    (tmp_path / "data.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data\.parquet: the parquet file cannot be read: "):
        read(tmp_path / "data.parquet")


@pytest.mark.parametrize(("name", "start"), [("data.jsonl", '{"q": '), ("data.json", "["), ("data.json", '{"q": ')])
def test_json_beyond_pythons_limits_is_told(tmp_path, name, start):
    (tmp_path / name).write_text(start + "[" * 100_000)
    with pytest.raises(DataError, match=r"data\.jsonl?:1: JSON that cannot be read: maximum recursion depth exceeded"):
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


def test_what_may_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    for name in (str(tmp_path / "pipe.csv"), "/dev/zero"):
        with pytest.raises(DataError, match=f"{name}: this is no regular file\n"):
            read(name)


@pytest.mark.parametrize("name", ["x" * 300 + ".csv", "~nobody-of-this-name/rows.csv"])
def test_names_that_no_file_can_have(name):
    with pytest.raises(DataError, match="no file can be read by this name"):
        read(name)


SAVE_AS = "open it in the program that wrote it and save the sheet as csv (in Excel: Save As, CSV UTF-8)"
NO_TEXT = {
    "Excel": ("d.xlsx", b"PK\x03\x04x", "the file is a spreadsheet, which is not read", SAVE_AS),
    "LibreOffice": ("d.ods", b"PK\x03\x04x", "the file is a spreadsheet, which is not read", SAVE_AS),
    "Excel by another name": (
        "d.csv",
        b"PK\x03\x04x",
        "the file is a spreadsheet or a zip archive",
        f"{SAVE_AS}; or unpack it",
    ),
    "old Excel as csv": ("d.csv", b"\xd0\xcf\x11\xe0\xa1", "the file is an old Excel file", SAVE_AS),
    "zip": (
        "d.zip",
        b"PK\x03\x04x",
        "the file is an archive, which is not read",
        "unpack it, and name the file that it holds",
    ),
    "gzip": (
        "d.jsonl.gz",
        b"\x1f\x8bx",
        "the file is compressed, which is not read",
        "unpack it, and name the file that it holds",
    ),
    "gzip as jsonl": (
        "d.jsonl",
        b"\x1f\x8bx",
        "the file is compressed by gzip",
        "unpack it with gunzip, once it is named as such (.gz)",
    ),
    "parquet as csv": ("d.csv", b"PAR1xx", "the file is parquet", "rename it to .parquet"),
}


@pytest.mark.parametrize(("name", "content", "what", "fix"), NO_TEXT.values(), ids=NO_TEXT)
def test_what_is_no_text_file_is_one_message(tmp_path, name, content, what, fix):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    (problem,) = caught.value.problems
    assert (problem.what, problem.fix) == (what, fix)


def test_a_folder_of_files_says_how_to_name_them(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(DataError, match=r"fix: name a file in it instead$"):
        read(folder)
    for name in ("a.csv", "b.csv", "notes.txt"):
        (folder / name).write_text("q\nx\n")
    with pytest.raises(DataError) as caught:
        read(folder)
    assert caught.value.problems[0].fix == f"name a file in it instead, or all of them: '{folder}/*.csv'"
    assert read(f"{folder}/*.csv").table.num_rows == 2


def test_a_module_of_ones_own_called_datasets_is_no_hindrance(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    assert read({"a": ["1", "2"]}).table.num_rows == 2
