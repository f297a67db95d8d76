"""A quote that is left open and closed by a later one: the rows between are one cell, which is told."""

import pytest

from brim.data.read import read

ROWS = [f"question {number},answer {number}" for number in range(20)]


def notes(path, lines):
    path.write_text("\n".join(["question,answer", *lines]) + "\n")
    return read(path).notes


@pytest.mark.parametrize(
    ("opened", "closed"),
    [('"question 4,answer 4', 'question 12","answer 12"'), ('question 4,"answer 4', 'question 12,answer 12"')],
)
def test_rows_within_a_cell_are_told_with_their_place(tmp_path, opened, closed):
    lines = [opened if row == 4 else closed if row == 12 else line for row, line in enumerate(ROWS)]
    (note,) = notes(tmp_path / "a.csv", lines)
    assert note.startswith("1 cell holds lines that look like rows of their own: a.csv:6 (7 of them); look whether a")


@pytest.mark.parametrize(
    "cell",
    [
        "one\ntwo, three\nfour\nfive, six\nseven",  # prose: not each line is cut alike
        "a\n1,\n2,\n3,\n4,\nb",  # a list: nothing follows its commas
        "a\nb,c\nd,e\nf",  # too few to tell
    ],
)
def test_other_cells_of_several_lines_are_not_told(tmp_path, cell):
    assert notes(tmp_path / "a.csv", [*ROWS, f'question,"{cell}"']) == ()


def test_data_that_is_about_tables_is_not_told(tmp_path):
    table = "a,b\n" * 6
    assert len(notes(tmp_path / "a.csv", [f'question,"{table}"'] * 5)) == 1
    assert notes(tmp_path / "b.csv", [f'question,"{table}"'] * 6) == ()


def test_a_file_of_one_column_has_no_rows_to_recognise(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text\n"a\nb\nc\nd\ne\nf"\n')
    assert read(path).notes == ()
