"""Files whose fields are separated by another sign than their ending says."""

import subprocess
import sys

import pytest

from brim.data import read
from brim.errors import DataError


@pytest.mark.parametrize(
    ("name", "sign", "says"),
    [
        (
            "d.csv",
            ";",
            "the fields are separated by semicolons\n  expected: commas, as the ending .csv says\n  fix: write",
        ),
        (
            "d.csv",
            "\t",
            "the fields are separated by tabs\n  expected: commas, as the ending .csv says\n  fix: rename it",
        ),
        (
            "d.csv",
            "|",
            "the fields are separated by bars\n  expected: commas, as the ending .csv says\n  fix: write it",
        ),
        (
            "d.tsv",
            ",",
            "the fields are separated by commas\n  expected: tabs, as the ending .tsv says\n  fix: rename it",
        ),
    ],
)
def test_another_separator_is_named_and_the_fix_works(tmp_path, monkeypatch, name, sign, says):
    text = f'question{sign}answer\nwhat is it{sign}this and that\n"a {sign} b"{sign}007\n'
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(f"{name}:1: {says}")
    command = str(caught.value).split('python -c "')[1].removesuffix('"')
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", command], check=True)
    assert read(tmp_path / "d-commas.csv").table.to_pylist() == [
        {"question": "what is it", "answer": "this and that"},
        {"question": f"a {sign} b", "answer": "007"},
    ]


def test_rows_with_commas_in_a_file_of_semicolons(tmp_path):
    (tmp_path / "d.csv").write_text("dialogue;summary\nhello, there;short, one\nbye, then;over, now\n")
    with pytest.raises(DataError, match=r"d\.csv:1: the fields are separated by semicolons"):
        read(tmp_path / "d.csv")


@pytest.mark.parametrize("text", ["a;b\nx\ny;z;w\n", "one column\nthis; that\n", "a;b\nfirst; second; third\n"])
def test_one_column_may_hold_semicolons(tmp_path, text):
    (tmp_path / "d.csv").write_text(text)
    assert read(tmp_path / "d.csv").table.num_columns == 1


def test_a_name_that_a_shell_would_run_is_no_part_of_the_command(tmp_path):
    (tmp_path / "$(reboot).csv").write_text("a;b\n1;2\n")
    with pytest.raises(DataError, match=r"pandas\.read_csv\('FILE', sep=';'"):
        read(tmp_path / "$(reboot).csv")
