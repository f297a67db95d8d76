"""A csv file is read as programs write it: its separator and its encoding are recognised, and told."""

import csv
import io
import re
import shutil
import subprocess

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.data import prepare
from brim.data.read import cell_texts, read
from brim.data.read.encoding import csv_form, likely_encoding
from brim.errors import DataError
from brim.notes import kind_of, short_of, topic_of

TICKETS = "Nr;Betreff;Kategorie\r\n1;Gerät läuft nicht;Störung\r\n2;Rückfrage, dringend;Auskunft\r\n"
ROWS = [
    {"Nr": 1, "Betreff": "Gerät läuft nicht", "Kategorie": "Störung"},
    {"Nr": 2, "Betreff": "Rückfrage, dringend", "Kategorie": "Auskunft"},
]
OTHER_SEPARATOR = "give it a first line that names the sign, such as sep="
AS_UTF8 = "save it as UTF-8, as with `iconv -f ENCODING -t UTF-8 d.csv > d-utf8.csv`"


def source_of(tmp_path, content, name="d.csv"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "sign", "other", "words"),
    [
        ("d.csv", ";", ",", "semicolons"),
        ("d.csv", "\t", ",", "tabs"),
        ("d.csv", "|", ",", "bars"),
        ("d.tsv", ",", ",", "commas"),
        ("d.tsv", ";", ",", "semicolons"),
    ],
)
def test_another_separator_is_read_and_noted(tmp_path, name, sign, other, words):
    text = f'question{sign}answer\nwhat is it{sign}this and that\n"a {sign} b"{sign}007\n'
    source = source_of(tmp_path, text, name)
    assert source.table.to_pylist() == [
        {"question": "what is it", "answer": "this and that"},
        {"question": f"a {sign} b", "answer": "007"},
    ]
    assert source.notes == (
        f"{name} is read with {words} between its fields; if that is wrong, {OTHER_SEPARATOR}{other}",
    )
    (note,) = source.notes
    assert (kind_of(note), topic_of(note)) == ("warning", "rows"), "every cell depends on it"
    assert short_of(note) == f"{name} is read with {words} between its fields"
    assert source.locate(1) == f"{name}:3"


@pytest.mark.parametrize(
    ("encoding", "note"),
    [
        ("utf-8", "with semicolons between its fields"),
        ("utf-8-sig", "with semicolons between its fields"),
        ("cp1252", "as Windows-1252, with semicolons between its fields"),
        ("latin-1", "as Windows-1252, with semicolons between its fields"),
        ("utf-16", "as UTF-16, with semicolons between its fields"),
        ("utf-32", "as UTF-32, with semicolons between its fields"),
    ],
)
def test_what_excel_saves_is_read_and_noted(tmp_path, encoding, note):
    source = source_of(tmp_path, TICKETS.encode(encoding))
    assert source.table.to_pylist() == ROWS
    utf8 = "" if "utf-8" in encoding else f"{AS_UTF8}, or "
    assert source.notes == (f"d.csv is read {note}; if that is wrong, {utf8}{OTHER_SEPARATOR},",)
    assert source.locate(1) == "d.csv:3"


def test_marks_of_both_byte_orders(tmp_path):
    for codec, mark in (("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff"), ("utf-32-be", b"\0\0\xfe\xff")):
        assert source_of(tmp_path, mark + TICKETS.encode(codec)).table.to_pylist() == ROWS


def test_plain_utf8_with_commas_is_read_without_a_word(tmp_path):
    assert source_of(tmp_path, "q,a\nGröße; und; so,x\n").notes == ()


def test_a_first_line_names_the_separator(tmp_path):
    source = source_of(tmp_path, "sep=;\r\n" + TICKETS)
    assert (source.table.to_pylist(), source.notes) == (ROWS, ())
    assert source.locate(0) == "d.csv:3"
    one_column = source_of(tmp_path, "sep=|\na;b\nx;y\nz;w\n")
    assert one_column.table.to_pylist() == [{"a;b": "x;y"}, {"a;b": "z;w"}]
    assert source_of(tmp_path, "sep=|\na|b\nx|y\nbroken\n").locate(1) == "d.csv:4"
    assert source_of(tmp_path, "sep=^\na^b\nx^y\n").table.to_pylist() == [{"a": "x", "b": "y"}]


@pytest.mark.parametrize("text", ["a;b\nx\ny;z;w\n", "one column\nthis; that\n", "a;b\nfirst; second; third\n"])
def test_one_column_may_hold_semicolons(tmp_path, text):
    assert source_of(tmp_path, text).table.num_columns == 1


def test_commas_within_the_cells_of_a_file_of_semicolons(tmp_path):
    rows = source_of(tmp_path, "from, to;text\nhello, there;short, one\nbye, then;over\n").table.to_pylist()
    assert rows[1] == {"from, to": "bye, then", "text": "over"}


def test_a_broken_row_hides_no_separator(tmp_path):
    source = source_of(tmp_path, "a;b\n1;2\n3;4\nbroken\n5;6\n")
    assert [source.locate(row) for row in source.faults] == ["d.csv:4"]


def test_a_name_that_a_shell_would_run_is_no_part_of_the_command(tmp_path):
    (note,) = source_of(tmp_path, TICKETS.encode("cp1252"), "$(reboot).csv").notes
    assert "`iconv -f ENCODING -t UTF-8 FILE > NEW_FILE`" in note


# Numbers with a decimal comma


def test_numbers_with_a_decimal_comma_stay_as_they_are_written(tmp_path, make_config, encoder):
    source = source_of(tmp_path, "q;Preis;a\nx;12,50;ja\ny;;nein\nz;3;ja\n")
    assert source.table["Preis"].to_pylist() == ["12,50", None, "3"]
    whole = {"preprocessing__split__probabilities": [1.0, 0.0, 0.0]}
    made = prepare(source, make_config(**whole, prompt__template="{q} {Preis}: "), encoder, context_length=64)
    assert encoder.decode(made.splits["train"][0].input_ids.tolist(), skip_special_tokens=True) == "x 12,50: ja"
    drop = {"input__preprocessing__missing_value_strategy": "drop_row"}
    config = make_config(**whole, **drop, prompt__template="{q} {Preis:.1f}: ")
    made = prepare(source, config, encoder, context_length=64)
    texts = [encoder.decode(row.input_ids.tolist(), skip_special_tokens=True) for row in made.splits["train"]]
    assert texts == ["x 12.5: ja", "z 3.0: ja"]


def test_a_comma_in_a_number_is_none_of_its_decimals_where_commas_separate(tmp_path, make_config, encoder):
    source = source_of(tmp_path, 'q,Preis,a\nx,"1,234",ja\n')
    config = make_config(prompt__template="{q} {Preis:.1f}: ")
    with pytest.raises(DataError, match="column Preis holds '1,234'"):
        prepare(source, config, encoder, context_length=64)


@given(
    cells=st.lists(st.sampled_from(["1", "-7", "2.5", "1,5", "-0,25", "007", "", "x", "NaN", "+1,0"]), min_size=1),
    data=st.data(),
)
def test_the_kind_of_a_column_with_commas_does_not_depend_on_the_blocks_it_is_read_in(cells, data):
    import pyarrow as pa

    from brim.data.read.csv import ColumnKind, refine

    cut = data.draw(st.integers(0, len(cells)))
    kinds = set()
    for parts in ([cells], [cells[:cut], cells[cut:]], [cells[cut:], cells[:cut]]):
        kind = ColumnKind.EMPTY
        for part in parts:
            kind = refine(kind, pa.array(part, pa.string()), decimal_commas=True)
        kinds.add(kind)
    assert len(kinds) == 1


# What is not read


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


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoding_that_is_not_certain_is_refused_with_a_command_that_works(tmp_path, name):
    codec, text = REFUSED[name]
    (tmp_path / "d.csv").write_bytes(text.encode(codec))
    with pytest.raises(DataError, match="is not UTF-8 text; the file looks like") as caught:
        read(tmp_path / "d.csv")
    command = re.search("`(iconv .*?)`", str(caught.value))[1]
    assert command == f"iconv -f {name} -t UTF-8 d.csv > d-utf8.csv"
    if shutil.which("iconv") is None:
        pytest.skip("no iconv here")
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


@pytest.mark.parametrize("name", WESTERN)
def test_western_languages_are_read_as_windows_1252(tmp_path, name):
    text = f"q;a\n{WESTERN[name]};x\n"
    assert source_of(tmp_path, text.encode("cp1252")).table["q"].to_pylist() == [WESTERN[name]]
    assert likely_encoding(tmp_path / "d.csv") == "WINDOWS-1252"


def test_damaged_bytes_are_no_letters_of_windows_1252(tmp_path):
    source = source_of(tmp_path, b"q,a\nadd,x\nadd \xff\xfe =,y\nadd,z\n")
    assert (list(source.faults), source.notes) == ([1], ())


def test_a_file_of_utf8_with_a_wrong_byte_stays_utf8(tmp_path):
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
    assert western.faults[40].what == "byte 0x81 is no Windows-1252 text, as which the file is read"
    assert western.table["q"].to_pylist()[39:] == ["café", None]
    with pytest.raises(DataError, match=r"d\.csv:42: this is no UTF-16 text, as which the file begins: truncated data"):
        source_of(tmp_path, ("q,a\n" + "x,y\n" * 40 + "x,y").encode("utf-16") + b"x")
    with pytest.raises(DataError, match=r"d\.csv:3: this is no UTF-16 text, as which the file begins: byte 0x00"):
        source_of(tmp_path, "q,a\nx,y\n\0,y\n".encode("utf-16"))


def test_only_the_beginning_of_a_large_file_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr("brim.data.read.encoding.HEAD_BYTES", 1000)
    (tmp_path / "d.csv").write_bytes(b"a;b\n" + b"x;y\n" * 100_000 + b"\xff" * 10)
    form = csv_form(tmp_path / "d.csv", usual=",")
    assert (form.encoding, form.separator) == ("utf-8", ";")


# Any table

LETTERS = ["a", "1", "0", ".", ",", ";", "\t", "|", '"', "\n", "\r", " ", "ü", "é", "ß"]
CELLS = st.text(st.sampled_from(LETTERS), max_size=6)


@st.composite
def tables(draw):
    """A header of plain names, and rows of as many cells."""
    names = draw(st.lists(st.sampled_from(["Nr", "Straße", "Ort", "q", "a"]), min_size=2, max_size=4, unique=True))
    row = st.tuples(*[CELLS] * len(names)).filter(any)
    return names, draw(st.lists(row, min_size=1, max_size=25))


def written(names, rows, *, sign, all_quoted, ending):
    """As programs write a table: in quotes where it has to be, or throughout."""

    def cell(text):
        return '"' + text.replace('"', '""') + '"' if all_quoted or set(text) & {sign, '"', "\r", "\n"} else text

    return "".join(sign.join(map(cell, row)) + ending for row in [names, *rows])


@given(
    table=tables(),
    sign=st.sampled_from([",", ";", "\t", "|"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "cp1252"]),
    all_quoted=st.booleans(),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    says=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_any_table_comes_out_of_any_form_as_it_went_in(tmp_path, table, sign, encoding, all_quoted, ending, says):
    names, rows = table
    text = written(names, rows, sign=sign, all_quoted=all_quoted, ending=ending)
    if encoding == "cp1252":  # which is recognised by words, not by letters drawn by chance
        text = text.replace("ü", "o").replace("é", "o").replace("ß", "o")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    content = (mark + (f"sep={sign}{ending}" if says else "") + text).encode(encoding)
    source = source_of(tmp_path, content)
    expected = [cells for cells in csv.reader(io.StringIO(text, newline=""), delimiter=sign) if cells]
    assert source.table.column_names == expected[0]
    for position, name in enumerate(expected[0]):
        assert cell_texts(source.table[name]) == [row[position] for row in expected[1:]]


# Columns without a name


@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "with a broken row"])
def test_columns_without_a_name_are_named_as_pandas_does_or_left_out_where_empty(tmp_path, separator, broken):
    """Excel writes empty columns that were once used; pandas writes its index under no name."""
    lines = [",q,a, ,,", "0,x,1,,,note", "1,y,2,,,"]
    lines += ["2,z"] if broken else []
    source = source_of(tmp_path, "\n".join(lines).replace(",", separator) + "\n")
    rows = source.table.slice(0, 2).to_pylist()
    assert rows == [
        {"Unnamed: 0": 0, "q": "x", "a": 1, "Unnamed: 5": "note"},
        {"Unnamed: 0": 1, "q": "y", "a": 2, "Unnamed: 5": None},
    ]
    assert list(source.faults) == ([2] if broken else [])
    assert source.notes[-2:] == (
        "d.csv: columns 4, 5 have neither a name nor a value, and are left out",
        "d.csv: columns without a name are read: column 1 as `Unnamed: 0`, column 6 as `Unnamed: 5`",
    )
    named = pd.read_csv(tmp_path / "d.csv", sep=separator, nrows=2)
    assert [name for name in source.table.column_names if name not in ("q", "a")] == [
        named.columns[0],
        named.columns[5],
    ]


def test_a_single_column_without_a_name_is_told_in_the_singular(tmp_path):
    assert source_of(tmp_path, "q,a,\nx,1,\n").notes == (
        "d.csv: column 3 has neither a name nor a value, and is left out",
    )
    source = source_of(tmp_path, "q,a,\nx,1,z\n", name="e.csv")
    assert source.notes == ("e.csv: a column without a name is read: column 3 as `Unnamed: 2`",)
    assert read(tmp_path / "e.csv").notes == source.notes  # also where an earlier reading was kept


def test_a_name_that_is_taken_is_not_given_again(tmp_path):
    source = source_of(tmp_path, "Unnamed: 1,\nx,y\n")
    assert source.table.to_pylist() == [{"Unnamed: 1": "x", "Unnamed: 1.1": "y"}]


def test_a_file_without_any_name_keeps_its_columns(tmp_path):
    assert source_of(tmp_path, ",\n1,2\n").table.to_pylist() == [{"Unnamed: 0": 1, "Unnamed: 1": 2}]
    with pytest.raises(DataError, match="there is a header but no rows"):
        source_of(tmp_path, ",,\n", name="none.csv")
    assert source_of(tmp_path, ",\n,\n", name="empty.csv").table.to_pylist() == [
        {"Unnamed: 0": None, "Unnamed: 1": None}
    ]
