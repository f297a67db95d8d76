"""Several files as one data set."""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.config import dump, load_config
from brim.data import prepare
from brim.data.read import cell_texts, read
from brim.errors import DataError

WHOLE = {"preprocessing__split__probabilities": [1.0, 0.0, 0.0]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which files are written: folder(name, text)."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_follow_each_other_in_the_order_of_the_list(folder):
    folder("b.csv", "q,a\n1,x\n\n2,y\n")
    folder("a.csv", "a,q\nz,3\n")
    source = read(["b.csv", "a.csv"])
    assert source.table.to_pylist() == [{"q": 1, "a": "x"}, {"q": 2, "a": "y"}, {"q": 3, "a": "z"}]
    assert [source.locate(row) for row in range(3)] == ["b.csv:2", "b.csv:4", "a.csv:2"]
    assert source.name == "b.csv and 1 more"


def test_a_glob_is_its_files_in_alphabetical_order(folder):
    for name in ("data/c.jsonl", "data/a.jsonl", "data/b.jsonl", "data/other.csv"):
        folder(name, jsonl({"q": name}))
    for given_as in ("data/*.jsonl", ["data/*.jsonl"], ["data/[ab].jsonl", "data/c.jsonl"]):
        assert read(given_as).table["q"].to_pylist() == ["data/a.jsonl", "data/b.jsonl", "data/c.jsonl"]
    assert read("data/[a].jsonl").name == "a.jsonl"


def test_a_file_whose_name_has_a_star_is_a_file(folder):
    folder("what[1].csv", "q\nx\n")
    folder("what1.csv", "q\ny\n")
    assert read("what[1].csv").table["q"].to_pylist() == ["x"]


def test_files_of_one_name_are_told_apart_by_their_folders(folder):
    folder("new/data.csv", "q,a\n1,x\n")
    folder("old/data.csv", "q,a\n1,x\nbroken\n2,y\n")
    source = read(["new/data.csv", "old/data.csv"])
    assert [source.locate(row) for row in range(4)] == [
        "new/data.csv:2",
        "old/data.csv:2",
        "old/data.csv:3",
        "old/data.csv:4",
    ]
    assert list(source.faults) == [2]


def test_a_fault_and_a_dropped_row_name_their_file(folder, make_config, encoder):
    folder("a.csv", "q,a\nx,y\nz,\n")
    folder("b.jsonl", jsonl({"q": "v", "a": "w"}) + "{broken\n" + jsonl({"q": "s", "a": "t"}))
    with pytest.raises(DataError) as caught:
        prepare(read(["a.csv", "b.jsonl"]), make_config(**WHOLE), encoder, context_length=64)
    assert [problem.where for problem in caught.value.problems] == ["b.jsonl:2"]
    config = make_config(**WHOLE, preprocessing__on_bad_row="drop")
    made = prepare(read(["a.csv", "b.jsonl"]), config, encoder, context_length=64)
    assert made.splits["train"].keys.tolist() == [0, 2, 4]
    assert [(entry.key, entry.event) for entry in made.ledger] == [(1, "dropped_missing"), (3, "dropped_bad")]
    assert made.ledger.entries[1].why.startswith("b.jsonl:2: not valid JSON")


def test_formats_may_be_mixed(folder, tmp_path):
    folder("a.csv", "q;a\nGröße;1\n")
    folder("b.jsonl", jsonl({"q": None, "a": 2}))
    pq.write_table(pa.table({"q": ["p"], "a": [3]}), tmp_path / "c.parquet")
    source = read(["a.csv", "b.jsonl", "c.parquet"])
    assert source.table.to_pylist() == [{"q": "Größe", "a": 1}, {"q": None, "a": 2}, {"q": "p", "a": 3}]
    assert [note[:40] for note in source.notes] == ["a.csv is read with semicolons between it"]


def test_a_column_of_several_types_is_text_as_each_file_has_it(folder):
    folder("a.csv", "q,n\nx,3\ny,\n")
    folder("b.csv", "q,n\nx,3.5\n")
    folder("c.csv", "q,n\nx,none\n")
    assert read(["a.csv", "b.csv"]).table["n"].to_pylist() == ["3", None, "3.5"]
    assert read(["a.csv", "b.csv", "c.csv"]).table["n"].to_pylist() == ["3", None, "3.5", "none"]


def test_a_mixed_column_of_one_file_is_told_with_its_place(folder, make_config, encoder):
    folder("a.jsonl", jsonl({"q": "x", "a": "y"}, {"q": "z", "a": "y"}))
    folder("b.jsonl", jsonl({"q": "x", "a": "y"}, {"q": 3, "a": "y"}))
    source = read(["a.jsonl", "b.jsonl"])
    with pytest.raises(DataError, match=r"b\.jsonl:2: column `q` changes its type"):
        prepare(source, make_config(**WHOLE), encoder, context_length=64)
    drop = make_config(**WHOLE, preprocessing__on_bad_row="drop")
    assert prepare(source, drop, encoder, context_length=64).splits["train"].keys.tolist() == [0, 1, 2]


def test_lists_beside_text_are_told_where_they_are_used(folder, make_config, encoder):
    folder("a.jsonl", jsonl({"q": "x", "a": "y", "m": [1]}))
    folder("b.jsonl", jsonl({"q": "x", "a": "y", "m": "text"}))
    folder("c.jsonl", jsonl({"q": "x", "a": "y", "m": None}))
    source = read(["a.jsonl", "b.jsonl", "c.jsonl"])
    said = "column `m` holds lists or objects in one form here and in another in a.jsonl"
    made = prepare(source, make_config(**WHOLE), encoder, context_length=64)
    assert f"b.jsonl: {said}; it is not used, and was read as text" in made.notes
    with pytest.raises(DataError, match=f"^b.jsonl: {said}"):
        prepare(source, make_config(**WHOLE, input__column="m"), encoder, context_length=64)
    assert read(["a.jsonl", "c.jsonl"]).table["m"].to_pylist() == ["[1]", None]


WRONG = {
    "other columns": (
        {"a.csv": "q,a\n1,2\n", "b.csv": "q,A\n1,2\n"},
        ["a.csv", "b.csv"],
        "b.csv: the file has no column `a` and a column `A` of its own, otherwise than a.csv\n"
        "  expected: the columns of a.csv: `q`, `a`\n"
        "  fix: name the columns alike in all files, or take out those that are not in all",
    ),
    "one file lacks a column": (
        {"a.csv": "q,a\n1,2\n", "b.csv": "q\n1\n2\n"},
        ["a.csv", "b.csv"],
        "b.csv: the file has no column `a`, otherwise than a.csv",
    ),
    "twice": (
        {"a.csv": "q,a\n1,2\n"},
        ["a.csv", "./*.csv"],
        "./a.csv: the file is named twice, so that each of its rows would stand twice in the data\n"
        "  fix: name it once; a glob names it, too",
    ),
    "no match": (
        {"data/.a.csv.job": "", "data/a.csv": "q\n1\n", "data/b.csv": "q\n1\n"},
        "data/*.jsonl",
        "no file matches data/*.jsonl\n  expected: a file in data, which has a.csv, b.csv\n"
        "  fix: correct the pattern; put it in quotes, so that the shell hands it on as it is",
    ),
    "no such file": ({"a.csv": "q\n1\n"}, ["a.csv", "b.csv"], "no such file: b.csv\n  fix: did you mean a.csv?"),
    "nothing": (
        {},
        [],
        "an empty list was given as the data set\n  expected: at least one row, a dict each, or at least one file\n"
        "  fix: look at what makes the list: a filter that keeps no row, or a search that finds no file",
    ),
}


@pytest.mark.parametrize(("files", "given_as", "message"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_go_together(folder, files, given_as, message):
    for name, text in files.items():
        folder(name, text)
    with pytest.raises(DataError) as caught:
        read(given_as)
    assert str(caught.value).startswith(message)


def test_a_configuration_names_several(tmp_path):
    config = load_config({"base_model": "m", "dataset": ["a.csv", "b/*.csv"]}).config
    assert config.dataset == ("a.csv", "b/*.csv")
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").config == config
    assert load_config({"base_model": "m"}, ["dataset=[a.csv, b.csv]"]).config.dataset == ("a.csv", "b.csv")


@given(
    parts=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.text("xyü,;\n", max_size=4)), max_size=6), min_size=1, max_size=4
    ),
    formats=st.lists(st.sampled_from(["csv", "jsonl", "parquet"]), min_size=4, max_size=4),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_any_files_are_what_they_are_alone(tmp_path, parts, formats):
    names = []
    for number, (part, ending) in enumerate(zip(parts, formats, strict=False)):
        rows = [{"n": n, "text": f"t{text}"} for n, text in part] or [{"n": 0, "text": "t"}]
        path = tmp_path / f"{number}.{ending}"
        frame = pd.DataFrame(rows)
        {"csv": frame.to_csv, "parquet": frame.to_parquet}.get(ending, lambda *_, **__: None)(path, index=False)
        if ending == "jsonl":
            path.write_text(jsonl(*rows))
        names.append(path)
    alone = [read(name) for name in names]
    whole = read(names)
    for column in ("n", "text"):
        texts = [text for each in alone for text in cell_texts(each.table[column])]
        assert cell_texts(whole.table[column]) == texts
    located = [each.locate(row) for each in alone for row in range(each.table.num_rows)]
    assert [whole.locate(row) for row in range(len(located))] == located
