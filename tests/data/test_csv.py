"""A csv file as programs write it: what stands in it comes out, each row on its line; its form is recognised, and told."""

import csv
import re
import shutil
import subprocess

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, strategies as st
from tests.data.conftest import texts_of
from tests.messages import refused, says
from tests.properties import examples

from brim.data.read import cell_texts, csv as read_csv, read
from brim.data.read.csv import ColumnKind, refine
from brim.data.read.encoding import likely_encoding
from brim.errors import DataError
from brim.notes import kind_of, short_of, topic_of

TICKETS = "Nr;Betreff;Kategorie\r\n1;Gerät läuft nicht;Störung\r\n2;Rückfrage, dringend;Auskunft\r\n"
ROWS = [
    {"Nr": 1, "Betreff": "Gerät läuft nicht", "Kategorie": "Störung"},
    {"Nr": 2, "Betreff": "Rückfrage, dringend", "Kategorie": "Auskunft"},
]


def source_of(tmp_path, content, name="d.csv"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(tmp_path / name)


KINDS = [  # cells, the kind of their column, and its values
    (["1", "-20", "3"], "int64", [1, -20, 3]), (["1", "", "NaN"], "int64", [1, None, None]),
    (["0.5", "1.0", "-2.25"], "double", [0.5, 1.0, -2.25]), (["0.5", "NA", ""], "double", [0.5, None, None]),
    (["007", "8"], "string", ["007", "8"]), (["1.10", "2.5", ""], "string", ["1.10", "2.5", None]),
    (["3", "3.5"], "string", ["3", "3.5"]), (["1e3", "5"], "string", ["1e3", "5"]), (["+5", "5"], "string", ["+5", "5"]),
    (["9223372036854775808", "1"], "string", ["9223372036854775808", "1"]),
    (["true", "false", ""], "string", ["true", "false", None]), (["2024-01-31", ""], "string", ["2024-01-31", None]),
    (["NULL", "text", "", "nan"], "string", ["NULL", "text", None, "nan"]),
    (["NA", "", "NULL"], "string", ["NA", None, "NULL"]), (["5", "", "five"], "string", ["5", None, "five"]),
]  # fmt: skip


def test_a_column_is_numbers_only_where_that_changes_no_text(tmp_path):
    for cells, kind, values in KINDS:
        column = source_of(tmp_path, "id,x\n" + "".join(f"r,{cell}\n" for cell in cells)).table["x"]
        assert (str(column.type), column.to_pylist()) == (kind, values)


@pytest.mark.parametrize("commas", [False, True])
@given(data=st.data())
def test_the_kind_of_a_column_does_not_depend_on_the_blocks_it_is_read_in(data, commas):
    others = ["1,5", "-0,25", "+1,0"] if commas else ["1.0", "-0.5", "1e9", " 4"]
    written = st.sampled_from(["1", "-7", "3", "2.5", "", "NaN", *others]) | st.sampled_from(["007", "x"])
    numbers = st.sampled_from(["1", "2.5", "", others[0]])
    cells = data.draw(st.lists(written if data.draw(st.booleans()) else numbers, min_size=1))
    cut = data.draw(st.integers(0, len(cells)))
    kinds = set()
    for parts in ([cells], [cells[:cut], cells[cut:]], [cells[cut:], cells[:cut]]):
        kind = ColumnKind.EMPTY
        for part in parts:
            kind = refine(kind, pa.array(part, pa.string()), decimal_commas=commas)
        kinds.add(kind)
    assert len(kinds) == 1


def _num_line_ends(text):
    return text.count("\n") + text.count("\r") - text.count("\r\n")


LETTERS = ["a", "1", "0", ".", ",", ";", "\t", "|", '"', "\n", "\r", " ", "ü", "é", "ß", "\u2028", "\x0b"]
CELLS = st.text(st.sampled_from(LETTERS), max_size=6)


@st.composite
def tables(draw):
    """A header of plain names, and rows of as many cells, each in quotes throughout or not, behind some empty lines."""
    names = draw(st.lists(st.sampled_from(["Nr", "Straße", "Ort", "q", "a"]), min_size=2, max_size=4, unique=True))
    row = st.tuples(st.tuples(*[CELLS] * len(names)).filter(any), st.booleans(), st.integers(0, 2))
    return names, draw(st.lists(row, min_size=1, max_size=25))


def _written(cell, sign, in_quotes):
    return '"' + cell.replace('"', '""') + '"' if in_quotes or set(cell) & {sign, '"', "\r", "\n"} else cell


@given(
    table=tables(),
    sign=st.sampled_from([",", ";", "\t", "|"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "cp1252"]),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    says=st.booleans(),
)
@examples(250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table_comes_out_of_any_form_as_it_went_in_with_its_lines(tmp_path, table, sign, encoding, ending, says):
    names, rows = table
    # Windows-1252 is recognised by words, not by letters drawn by chance.
    letters = str.maketrans(dict.fromkeys("üéß\u2028", "o") if encoding == "cp1252" else {})
    names = [name.translate(letters) for name in names]
    rows = [([cell.translate(letters) for cell in cells], *how) for cells, *how in rows]
    text, lines = (f"sep={sign}{ending}" if says else "") + sign.join(names) + ending, []
    for cells, in_quotes, num_blank in rows:
        text += ending * num_blank
        lines.append(1 + _num_line_ends(text))
        text += sign.join(_written(cell, sign, in_quotes) for cell in cells) + ending
    source = source_of(tmp_path, (("\ufeff" if encoding == "utf-16-be" else "") + text).encode(encoding))
    assert source.table.column_names == names
    for position, name in enumerate(names):
        assert cell_texts(source.table[name]) == [cells[position] for cells, *_ in rows]
    assert [source.locate(row) for row in range(len(rows))] == [f"d.csv:{line}" for line in lines]


def test_empty_lines_are_counted_and_rows_longer_than_a_block_are_read(tmp_path, monkeypatch):
    source = source_of(tmp_path, '\nq,a\n\n"one\n\ntwo",x\n,\n\ny,"z\n"\n')
    assert source.table["q"].to_pylist() == ["one\n\ntwo", None, "y"]
    assert [source.locate(row) for row in range(3)] == ["d.csv:4", "d.csv:7", "d.csv:9"]
    source = source_of(tmp_path, "q,a\n" + "x" * 200_000 + ",y\nz\n")
    assert (source.table["q"].to_pylist(), list(source.faults)) == (["x" * 200_000, None], [1])
    assert csv.field_size_limit() == 131_072
    monkeypatch.setattr(read_csv, "BLOCK_BYTES", 100)
    long = "x" * 150_000
    table = source_of(tmp_path, f"q,n\nshort,1\n{long},2\n" + "short,3\n" * 50).table
    assert table["q"].to_pylist() == ["short", long, *["short"] * 50]
    assert table["n"].to_pylist() == [1, 2, *[3] * 50]


def test_a_stray_quote_is_told_where_it_can_be_and_refused_where_it_cannot(tmp_path):
    source = source_of(tmp_path, 'q,a\nx,y\n"x" y,z\n"x" y", z,"w"\n')
    assert source.table.to_pylist()[:2] == [{"q": "x", "a": "y"}, {"q": "x y", "a": "z"}]
    (problem,) = source.faults.values()
    assert (list(source.faults), problem.what) == ([2], "text follows a closing quote")
    assert problem.fix == 'inside a quoted cell, write a quote twice: ""'
    with refused("d.csv:3: text follows a closing quote; … in the 3 lines that it takes, cannot be told", by=DataError):
        source_of(tmp_path, 'q,a\nx,y\n1,"x\n2,y\n3,"z",w\n4,5\n')
    source = source_of(tmp_path, 'q,a\nx,y\n1,"x\n\ny",3\n4,5\n')  # a ragged row of several lines is one row
    assert {row: problem.what for row, problem in source.faults.items()} == {1: "3 fields where the header has 2"}
    assert [source.locate(row) for row in range(3)] == ["d.csv:2", "d.csv:3", "d.csv:6"]
    assert source.table.to_pylist()[2] == {"q": "4", "a": "5"}


def test_another_separator_is_read_and_noted_and_signs_within_cells_are_none(tmp_path):
    signs = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
    for name, sign in [("d.csv", ";"), ("d.csv", "\t"), ("d.csv", "|"), ("d.tsv", ","), ("d.tsv", ";")]:
        source = source_of(tmp_path, f'q{sign}a\nwhat is it{sign}this and that\n"a {sign} b"{sign}007\n', name)
        assert source.table.to_pydict() == {"q": ["what is it", f"a {sign} b"], "a": ["this and that", "007"]}
        (note,) = source.notes
        assert note.endswith("such as sep=,")
        assert (kind_of(note), topic_of(note)) == ("warning", "rows"), "every cell depends on it"
        assert short_of(note) == f"{name} is read with {signs[sign]} between its fields"
        assert source.locate(1) == f"{name}:3"
    for text in ["a;b\nx\ny;z;w\n", "one column\nthis; that\n", "a;b\nfirst; second; third\n"]:
        assert source_of(tmp_path, text).table.num_columns == 1
    rows = source_of(tmp_path, "from, to;text\nhello, there;short, one\nbye, then;over\n").table.to_pylist()
    assert rows[1] == {"from, to": "bye, then", "text": "over"}


def test_what_excel_saves_is_read_and_noted_and_a_first_line_names_the_separator(tmp_path):
    windows = dict.fromkeys(("cp1252", "latin-1"), "as Windows-1252, ")
    names = {"utf-8": "", "utf-8-sig": "", **windows, "utf-16": "as UTF-16, ", "utf-32": "as UTF-32, "}
    for encoding, name in names.items():
        source = source_of(tmp_path, TICKETS.encode(encoding))
        assert source.table.to_pylist() == ROWS
        (note,) = source.notes
        assert note.startswith(f"d.csv is read {name}with semicolons between its fields; if that is wrong, ")
        assert note.endswith("give it a first line that names the sign, such as sep=,")
        assert ("iconv -f ENCODING -t UTF-8 d.csv > d-utf8.csv" in note) == bool(name)
        assert source.locate(1) == "d.csv:3"
    (note,) = source_of(tmp_path, TICKETS.encode("cp1252"), "$(reboot).csv").notes
    assert "`iconv -f ENCODING -t UTF-8 FILE > NEW_FILE`" in note  # no part of the command is run by a shell
    assert source_of(tmp_path, b"\0\0\xfe\xff" + TICKETS.encode("utf-32-be")).table.to_pylist() == ROWS
    assert source_of(tmp_path, "q,a\nGröße; und; so,x\n").notes == ()
    source = source_of(tmp_path, "sep=;\r\n" + TICKETS)
    assert (source.table.to_pylist(), source.notes) == (ROWS, ())
    assert source.locate(0) == "d.csv:3"
    assert source_of(tmp_path, "sep=|\na;b\nx;y\nz;w\n").table.to_pydict() == {"a;b": ["x;y", "z;w"]}
    assert source_of(tmp_path, "sep=^\na^b\nx^y\n").table.to_pylist() == [{"a": "x", "b": "y"}]


def test_numbers_with_a_decimal_comma_stay_as_they_are_written(tmp_path, make_config):
    source = source_of(tmp_path, "q;Preis;a\nx;12,50;ja\ny;;nein\nz;3;ja\n")
    assert source.table["Preis"].to_pylist() == ["12,50", None, "3"]
    assert texts_of(make_config(prompt__template="{q} {Preis}"), source)[0] == ("x 12,50", "ja")
    config = make_config(prompt__template="{q} {Preis:.1f}")
    assert texts_of(config, source) == [("x 12.5", "ja"), ("z 3.0", "ja")]  # an empty cell is no number
    source = source_of(tmp_path, 'q,Preis,a\nx,"1,234",ja\n')  # where commas separate, none is of a number's decimals
    assert texts_of(config, source) == []


CYRILLIC = "вопрос;ответ\n" + "Как сбросить пароль от почты?;Через настройки профиля\n" * 3
REFUSED = {
    "WINDOWS-1251": ("cp1251", CYRILLIC),
    "KOI8-R": ("koi8_r", CYRILLIC),
    "WINDOWS-1250": ("cp1250", "pytanie;odpowiedź\nMoże później? Główną chciałbym;Wziąłem są\n"),
    "WINDOWS-1253": ("cp1253", "ερώτηση;απάντηση\nπώς αλλάζω τον κωδικό;στις ρυθμίσεις\n"),
    "GB18030": ("gb18030", "问题;回答\n如何重置我的密码？;请打开设置页面。\n"),
    "EUC-KR": ("euc_kr", "질문;대답\n비밀번호를 어떻게 바꾸나요?;설정에서 바꿉니다\n"),
    "SHIFT_JIS": ("shift_jis", "質問;答え\nパスワードを忘れました。どうすればいいですか。;設定から変更できます。\n"),
    "EUC-JP": ("euc_jp", "質問;答え\nパスワードを忘れました。どうすればいいですか。;設定から変更できます。\n"),
    "MACINTOSH": ("mac_roman", "Frage;Antwort\nFür größere Übung später möglich?;Natürlich für Gäste\n"),
    "CP850": ("cp850", "Frage;Antwort\nFür größere Übung später möglich?;Natürlich für Gäste\n"),
    "UTF-16LE": ("utf-16-le", TICKETS * 3),
    "UTF-16BE": ("utf-16-be", TICKETS * 3),
}


@pytest.mark.process
def test_an_encoding_that_is_not_certain_is_refused_with_a_command_that_works(tmp_path):
    for name, (codec, text) in REFUSED.items():
        (tmp_path / "d.csv").write_bytes(text.encode(codec))
        with pytest.raises(DataError, match="is not UTF-8 text; the file looks like") as caught:
            read(tmp_path / "d.csv")
        command = re.search("`(iconv .*?)`", str(caught.value))[1]
        assert command == f"iconv -f {name} -t UTF-8 d.csv > d-utf8.csv"
        if shutil.which("iconv") is None:
            continue
        subprocess.run(["sh", "-c", command], check=True, cwd=tmp_path)
        assert (tmp_path / "d-utf8.csv").read_bytes().decode() == text
        assert read(tmp_path / "d-utf8.csv").table.num_columns == len(text.splitlines()[0].split(";"))


WESTERN = {
    "German": "Über größere Maßnahmen für Gäste – „schön“, 20 °C, 5 m², 3 €",
    "French": "L’été où naïfs Noëls créés à l’œuvre : « garçon », n° 3 … ça",
    "Spanish": "¿Qué pasó mañana? ¡Añadí 50 %! ªº",
    "Danish": "Æblegrød på øen, så få ærter",
    "Portuguese": "Não há opções: ações, pães, avô",
    "Catalan": "Col·legi, l’anyell",
    "dashes": "so – – – ————— ……… “quoted” it’s",
}


def test_western_languages_are_read_as_windows_1252_and_damaged_bytes_are_not(tmp_path):
    for text in WESTERN.values():
        source = source_of(tmp_path, f"q;a\n{text};x\n".encode("cp1252"))
        assert source.table["q"].to_pylist() == [text]
        assert likely_encoding(tmp_path / "d.csv") == "WINDOWS-1252"
    source = source_of(tmp_path, b"q,a\nadd,x\nadd \xff\xfe =,y\nadd,z\n")
    assert (list(source.faults), source.notes) == ([1], ())
    source = source_of(tmp_path, "q,a\nGröße,x\n".encode() + b"caf\xe9,y\n")
    assert source.notes == ()
    assert source.faults[1].what.startswith("byte 0xE9 is not UTF-8 text")


def test_a_wrong_byte_beyond_the_beginning_is_told_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr("brim.data.read.encoding.HEAD_BYTES", 64)
    plain = source_of(tmp_path, b"q,a\n" + b"plain,x\n" * 40 + b"caf\xe9,y\n")
    assert plain.faults[40].what == "byte 0xE9 is not UTF-8 text; the file looks like WINDOWS-1252"
    assert plain.faults[40].fix == "save it as UTF-8, e.g. `iconv -f WINDOWS-1252 -t UTF-8 d.csv > d-utf8.csv`"
    assert plain.locate(40) == "d.csv:42"
    western = source_of(tmp_path, b"q,a\n" + b"caf\xe9,x\n" * 40 + b"\x81,y\n")
    assert western.faults[40].what == "byte 0x81 is not Windows-1252 text, as which the file is read"
    assert western.table["q"].to_pylist()[39:] == ["café", None]
    for text, words in [
        (("q,a\n" + "x,y\n" * 40 + "x,y").encode("utf-16") + b"x", "d.csv:42: … UTF-16 text, … truncated data"),
        ("q,a\nx,y\n\0,y\n".encode("utf-16"), "d.csv:3: … UTF-16 text, … byte 0x00"),
    ]:
        with refused(words, by=DataError):
            source_of(tmp_path, text)


@pytest.mark.parametrize("separator", [",", ";"])
def test_columns_without_a_name_are_named_as_pandas_does_or_left_out_where_empty(tmp_path, separator):
    """Excel writes empty columns that were once used; pandas writes its index under no name."""
    source = source_of(tmp_path, ",q,a, ,,\n0,x,1,,,note\n1,y,2,,,\n2,z\n".replace(",", separator))
    assert source.table.slice(0, 2).to_pylist() == [
        {"Unnamed: 0": 0, "q": "x", "a": 1, "Unnamed: 5": "note"},
        {"Unnamed: 0": 1, "q": "y", "a": 2, "Unnamed: 5": None},
    ]
    assert list(source.faults) == [2]
    empty, unnamed = source.notes[-2:]
    assert says(empty, "d.csv: columns 4, 5 have neither a name nor a value")
    assert says(unnamed, "d.csv: … column 1 as `Unnamed: 0`, column 6 as `Unnamed: 5`")
    named = pd.read_csv(tmp_path / "d.csv", sep=separator, nrows=2).columns
    assert [name for name in source.table.column_names if name not in ("q", "a")] == [named[0], named[5]]


def test_one_column_without_a_name_a_name_that_is_taken_and_a_file_without_any(tmp_path):
    (note,) = source_of(tmp_path, "q,a,\nx,1,\n").notes
    assert note == "d.csv: column 3 has neither a name nor a value, and is left out"
    source = source_of(tmp_path, "q,a,\nx,1,z\n", name="e.csv")
    assert source.notes == ("e.csv: a column without a name is read: column 3 as `Unnamed: 2`",)
    assert read(tmp_path / "e.csv").notes == source.notes  # also where an earlier reading was kept
    assert source_of(tmp_path, "Unnamed: 1,\nx,y\n").table.to_pylist() == [{"Unnamed: 1": "x", "Unnamed: 1.1": "y"}]
    with refused("none.csv: there is a header but no rows"):
        source_of(tmp_path, ",,\n", name="none.csv")


QUESTIONS = [f"question {number},answer {number}" for number in range(20)]


def notes_on(path, lines):
    path.write_text("\n".join(["question,answer", *lines]) + "\n")
    return read(path).notes


def test_rows_within_a_cell_are_told_with_their_place_and_other_cells_of_several_lines_are_not(tmp_path):
    for begin, end in [('"question,4', 'question 12","answer 12"'), ('question 4,"answer 4', 'question 12,answer 12"')]:
        (note,) = notes_on(tmp_path / "a.csv", [*QUESTIONS[:4], begin, *QUESTIONS[5:12], end, *QUESTIONS[13:]])
        assert says(note, "1 cell holds lines that look like rows of their own: a.csv:6 (7 of them)")
    for cell in [
        "one\ntwo, three\nfour\nfive, six\nseven",  # prose: not each line is cut alike
        "a\n1,\n2,\n3,\n4,\nb",  # a list: nothing follows its commas
        "a\nb,c\nd,e\nf",  # too few to tell
    ]:
        assert notes_on(tmp_path / "a.csv", [*QUESTIONS, f'question,"{cell}"']) == ()
    table = "a,b\n" * 6  # data that is about tables is not told
    assert [len(notes_on(tmp_path / f"{n}.csv", [f'question,"{table}"'] * n)) for n in (5, 6)] == [1, 0]
    assert source_of(tmp_path, 'text\n"a\nb\nc\nd\ne\nf"\n').notes == ()  # one column has no rows to recognise
