"""What stands in a csv file is what comes out, and each row is found on its line."""

import csv

import pytest
from hypothesis import HealthCheck, given, strategies as st
from tests.properties import examples

from brim.data.read import cell_texts, csv as read_csv, read
from brim.data.read.csv import ColumnKind, refine
from brim.errors import DataError, Problem


def table_of(tmp_path, text):
    (tmp_path / "data.csv").write_bytes(text.encode())
    return read(tmp_path / "data.csv").table


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "-20", "3"], "int64", [1, -20, 3]),
        (["1", "", "NaN"], "int64", [1, None, None]),
        (["0.5", "1.0", "-2.25"], "double", [0.5, 1.0, -2.25]),
        (["0.5", "NA", ""], "double", [0.5, None, None]),
        (["007", "8"], "string", ["007", "8"]),
        (["1.10", "2.5", ""], "string", ["1.10", "2.5", None]),
        (["3", "3.5"], "string", ["3", "3.5"]),
        (["1e3", "5"], "string", ["1e3", "5"]),
        (["+5", "5"], "string", ["+5", "5"]),
        (["9223372036854775808", "1"], "string", ["9223372036854775808", "1"]),
        (["true", "false", ""], "string", ["true", "false", None]),
        (["2024-01-31", ""], "string", ["2024-01-31", None]),
        (["NULL", "text", "", "nan"], "string", ["NULL", "text", None, "nan"]),
        (["NA", "", "NULL"], "string", ["NA", None, "NULL"]),
        (["5", "", "five"], "string", ["5", None, "five"]),
    ],
)
def test_a_column_is_numbers_only_where_that_changes_no_text(tmp_path, cells, kind, values):
    column = table_of(tmp_path, "id,x\n" + "".join(f"r,{cell}\n" for cell in cells))["x"]
    assert str(column.type) == kind
    assert column.to_pylist() == values


@given(
    cells=st.lists(st.sampled_from(["1", "-7", "2.5", "1.0", "007", "", "x", "NaN", "1e9", " 4"]), min_size=1),
    data=st.data(),
)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_kind_of_a_column_does_not_depend_on_the_blocks_it_is_read_in(cells, data):
    import pyarrow as pa

    whole = refine(ColumnKind.EMPTY, pa.array(cells))
    cut = data.draw(st.integers(0, len(cells)))
    parts = [pa.array(cells[:cut], pa.string()), pa.array(cells[cut:], pa.string())]
    assert refine(refine(ColumnKind.EMPTY, parts[0]), parts[1]) is whole
    assert refine(refine(ColumnKind.EMPTY, parts[1]), parts[0]) is whole


CELLS = st.text(st.sampled_from(["a", "1", "0", ".", ",", '"', "\n", "\r", " ", "ü", "\u2028", "\x0b"]), max_size=6)


@given(
    rows=st.lists(st.tuples(CELLS, CELLS, st.booleans(), st.integers(0, 2)), min_size=1, max_size=12),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cells_come_out_as_they_went_in_and_rows_are_found_on_their_lines(tmp_path, rows, ending):
    text = f"q,a{ending}"
    lines = []
    for *cells, all_quoted, num_blank in rows:
        text += ending * num_blank
        lines.append(1 + _num_line_ends(text))
        text += ",".join(_written(cell, all_quoted) for cell in cells) + ending
    (tmp_path / "data.csv").write_bytes(text.encode())
    source = read(tmp_path / "data.csv")
    for position, name in enumerate(("q", "a")):
        assert cell_texts(source.table[name]) == [row[position] for row in rows]
    assert [source.locate(row) for row in range(len(rows))] == [f"data.csv:{line}" for line in lines]


def _written(cell, quoted):
    return '"' + cell.replace('"', '""') + '"' if quoted or set(cell) & set(',"\n\r') else cell


def _num_line_ends(text):
    return text.count("\n") + text.count("\r") - text.count("\r\n")


def test_empty_lines_and_quoted_line_breaks_are_counted(tmp_path):
    (tmp_path / "data.csv").write_text('\nq,a\n\n"one\n\ntwo",x\n\n\ny,"z\n"\nlast,row\n')
    source = read(tmp_path / "data.csv")
    assert source.table["q"].to_pylist() == ["one\n\ntwo", "y", "last"]
    assert [source.locate(row) for row in range(3)] == ["data.csv:4", "data.csv:9", "data.csv:11"]


def test_a_row_longer_than_a_block_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(read_csv, "BLOCK_BYTES", 100)
    long = "x" * 150_000
    table = table_of(tmp_path, f"q,n\nshort,1\n{long},2\n" + "short,3\n" * 50)
    assert table["q"].to_pylist() == ["short", long, *["short"] * 50]
    assert table["n"].to_pylist() == [1, 2, *[3] * 50]


def test_a_broken_line_is_located_behind_a_very_long_cell(tmp_path):
    (tmp_path / "data.csv").write_text("q,a\n" + "x" * 200_000 + ",y\nz\n")
    source = read(tmp_path / "data.csv")
    assert [source.locate(row) for row in source.faults] == ["data.csv:3"]
    assert source.table["q"].to_pylist() == ["x" * 200_000, None]
    assert csv.field_size_limit() == 131_072


def test_a_cell_that_ends_in_a_line_break_is_no_open_quote(tmp_path):
    assert table_of(tmp_path, 'q,a\nx,"y\n"\n').to_pylist() == [{"q": "x", "a": "y\n"}]


def test_a_stray_quote_is_told_where_the_file_cannot_be_read(tmp_path):
    (tmp_path / "data.csv").write_text('q,a\nx,y\n"x" y,z\n"x" y", z,"w"\n')
    source = read(tmp_path / "data.csv")
    assert source.table.to_pylist()[:2] == [{"q": "x", "a": "y"}, {"q": "x y", "a": "z"}]
    assert source.faults == {
        2: Problem(
            what="text follows a closing quote",
            expected="the separator or the end of the line",
            fix='inside a quoted cell, write a quote twice: ""',
        )
    }


def test_a_quote_that_runs_over_lines_leaves_open_which_are_rows(tmp_path):
    with pytest.raises(DataError) as caught:
        table_of(tmp_path, 'q,a\nx,y\n1,"x\n2,y\n3,"z",w\n4,5\n')
    assert str(caught.value) == (
        "data.csv:3: text follows a closing quote; where the next row begins, in the 3 lines that it takes, cannot be "
        "told\n  expected: the separator or the end of the line\n"
        '  fix: inside a quoted cell, write a quote twice: ""'
    )


def test_a_ragged_row_of_several_lines_is_one_row(tmp_path):
    (tmp_path / "data.csv").write_text('q,a\nx,y\n1,"x\n\ny",3\n4,5\n')
    source = read(tmp_path / "data.csv")
    assert {source.locate(row): problem.what for row, problem in source.faults.items()} == {
        "data.csv:3": "3 fields where the header has 2"
    }
    assert source.table.to_pylist()[2] == {"q": "4", "a": "5"}
    assert source.locate(2) == "data.csv:6"


def test_a_header_of_one_field_is_told_in_the_singular(tmp_path):
    (tmp_path / "rows.csv").write_text("q\na\nb,c\nd\n")
    (problem,) = read(tmp_path / "rows.csv").faults.values()
    assert (problem.what, problem.expected) == ("2 fields where the header has 1", "1 field")
