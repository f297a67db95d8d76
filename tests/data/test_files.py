"""Several files as one data set, data sets of `datasets`, and large data on disk, equal to what small data would be."""

import gc
import json
import os
import resource

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.data.conftest import jsonl
from tests.messages import refused, says

from brim.config import load_config
from brim.config.text import dump
from brim.data.read import cell_texts, json as read_jsonl, read, spill
from brim.data.read.columns import BATCH_ROWS
from brim.errors import DataError, OutputError, Problem


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which files are written: folder(name, text)."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_a_glob_is_its_files_in_order_and_files_of_one_name_are_told_apart(folder):
    for name in ("data/c.jsonl", "data/a.jsonl", "data/b.jsonl", "data/other.csv"):
        folder(name, jsonl({"q": name}))
    for given_as in ("data/*.jsonl", ["data/[ab].jsonl", "data/c.jsonl"]):
        assert read(given_as).table["q"].to_pylist() == ["data/a.jsonl", "data/b.jsonl", "data/c.jsonl"]
    assert read("data/[a].jsonl").name == "a.jsonl"
    folder("what[1].csv", "q\nx\n")
    folder("what1.csv", "q\ny\n")
    assert read("what[1].csv").table["q"].to_pylist() == ["x"]
    folder("new/data.csv", "q,a\n1,x\n")
    folder("old/data.csv", "q,a\n1,x\nbroken\n2,y\n")
    source = read(["new/data.csv", "old/data.csv"])
    places = ["new/data.csv:2", "old/data.csv:2", "old/data.csv:3", "old/data.csv:4"]
    assert [source.locate(row) for row in range(4)] == places
    assert list(source.faults) == [2]


def test_a_fault_a_dropped_row_and_a_mixed_column_name_their_file(folder, prepared):
    folder("a.csv", "q,a\nx,y\nz,\n")
    folder("b.jsonl", jsonl({"q": "v", "a": "w"}) + "{broken\n" + jsonl({"q": "s", "a": "t"}))
    with refused("b.jsonl:2: ", by=DataError):
        prepared(["a.csv", "b.jsonl"])
    made = prepared(["a.csv", "b.jsonl"], preprocessing__on_bad_row="drop")
    assert made.splits["train"].keys.tolist() == [0, 2, 4]
    assert [(entry.key, entry.event) for entry in made.ledger] == [(1, "dropped_missing"), (3, "dropped_bad")]
    assert made.ledger.entries[1].why.startswith("b.jsonl:2: not valid JSON")
    folder("a.jsonl", jsonl({"q": "x", "a": "y"}, {"q": "z", "a": "y"}))
    folder("b.jsonl", jsonl({"q": "x", "a": "y"}, {"q": 3, "a": "y"}))
    with refused("b.jsonl:2: column `q` changes its type", by=DataError):
        prepared(["a.jsonl", "b.jsonl"])


def test_formats_may_be_mixed_and_a_column_of_several_types_is_text_as_each_file_has_it(folder, tmp_path):
    folder("a.csv", "q;a\nGröße;1\n")
    folder("b.jsonl", jsonl({"a": 2, "q": None}))
    pq.write_table(pa.table({"q": ["p"], "a": [3]}), tmp_path / "c.parquet")
    source = read(["c.parquet", "a.csv", "b.jsonl"])  # in the order of the list
    assert source.table.to_pylist() == [{"q": "p", "a": 3}, {"q": "Größe", "a": 1}, {"q": None, "a": 2}]
    assert source.name == "c.parquet and 2 more"
    assert says(source.notes[0], "a.csv is read with semicolons between its fields")
    for name, cells in {"d.csv": "x,3\ny,", "e.csv": "x,3.5", "f.csv": "x,none"}.items():
        folder(name, f"q,n\n{cells}\n")
    assert read(["d.csv", "e.csv"]).table["n"].to_pylist() == ["3", None, "3.5"]
    assert read(["d.csv", "e.csv", "f.csv"]).table["n"].to_pylist() == ["3", None, "3.5", "none"]


def test_lists_beside_text_are_told_where_they_are_used(folder, prepared):
    folder("a.jsonl", jsonl({"q": "x", "a": "y", "m": [1]}))
    folder("b.jsonl", jsonl({"q": "x", "a": "y", "m": "text"}))
    folder("c.jsonl", jsonl({"q": "x", "a": "y", "m": None}))
    source = read(["a.jsonl", "b.jsonl", "c.jsonl"])
    said = "column `m` holds lists or objects in one form here and in another in a.jsonl"
    assert f"b.jsonl: {said}; it is not used, and was read as text" in prepared(source).notes
    with refused(f"b.jsonl: {said}", by=DataError):
        prepared(source, input__column="m")
    assert read(["a.jsonl", "c.jsonl"]).table["m"].to_pylist() == ["[1]", None]


WRONG = [  # files, what is given as the data set, and the decisive words
    ({"a.csv": "q,a\n1,2\n", "b.csv": "q,A\n1,2\n"}, ["a.csv", "b.csv"],
     "b.csv: the file has no column `a` and a column `A` of its own, otherwise than a.csv … `q`, `a` … alike in all files"),
    ({"a.csv": "q,a\n1,2\n"}, ["a.csv", "./*.csv"], "./a.csv: the file is named twice … a glob names it, too"),
    ({"data/.a.csv.job": "", "data/a.csv": "q\n1\n", "data/b.csv": "q\n1\n"}, "data/*.jsonl",
     "no file matches data/*.jsonl … a file in data, which has a.csv, b.csv … put it in quotes"),
    ({"a.csv": "q\n1\n"}, ["a.csv", "missing.csv"], "no such file: missing.csv"),
    ({}, [], "an empty list was given as the data set … at least one row, a dict each, or at least one file … look at what makes"),
]  # fmt: skip


def test_files_that_do_not_go_together_and_their_names_in_a_configuration(folder, tmp_path):
    for files, given_as, words in WRONG:
        for name, text in files.items():
            folder(name, text)
        with refused(words, by=DataError):
            read(given_as)
    config = load_config({"base_model": "m"}, ["dataset=[a.csv, b/*.csv]"]).config
    assert config.dataset == ("a.csv", "b/*.csv")
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").config == config


@given(
    parts=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.text("xyü,;\n", max_size=4)), max_size=6), min_size=1, max_size=4
    ),
    formats=st.lists(st.sampled_from(["csv", "jsonl", "parquet"]), min_size=4, max_size=4),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_any_files_are_what_they_are_alone(tmp_path, parts, formats):
    names = [tmp_path / f"{number}.{ending}" for number, ending in enumerate(formats[: len(parts)])]
    for part, path in zip(parts, names, strict=True):
        rows = [{"n": n, "text": f"t{text}"} for n, text in part] or [{"n": 0, "text": "t"}]
        if path.suffix == ".jsonl":
            path.write_text(jsonl(*rows))
        else:
            getattr(pd.DataFrame(rows), f"to_{path.suffix[1:]}")(path, index=False)
    alone = [read(name) for name in names]
    whole = read(names)
    for column in ("n", "text"):
        assert cell_texts(whole.table[column]) == [text for each in alone for text in cell_texts(each.table[column])]
    located = [each.locate(row) for each in alone for row in range(each.table.num_rows)]
    assert [whole.locate(row) for row in range(len(located))] == located


def test_a_data_set_is_read_with_its_selection_and_its_splits_become_a_column(tmp_path):
    whole = Dataset.from_dict({"q": ["x", "y", "z"], "n": [1, 2, 3]})
    some = whole.select([2, 0])
    some.save_to_disk(tmp_path / "saved")
    for data, name in [(tmp_path / "saved", "saved"), (some.with_format("numpy", columns=["n"]), "the data set")]:
        source = read(data)
        assert source.table.to_pylist() == [{"q": "z", "n": 3}, {"q": "x", "n": 1}]
        assert source.locate(1) == f"{name}, row 1"
    rest = {"validation": whole.select([1]), "test": whole.filter(lambda row: row["n"] == 2)}
    parts = DatasetDict({"train": whole.shuffle(seed=1), **rest})
    parts.save_to_disk(tmp_path / "splits")
    for data in (parts, tmp_path / "splits"):
        table = read(data).table.to_pydict()
        assert (table["q"], table["split"]) == ([*parts["train"]["q"], "y", "y"], [0, 0, 0, 1, 2])
    with pytest.raises(DataError, match=r"cannot be of the type IterableDataset(.|\n)*make a list of it"):
        read(whole.to_iterable_dataset())


def test_splits_that_cannot_be_joined_are_told(tmp_path):
    for number, (parts, words) in enumerate([
        ({"train": {"q": ["a"]}, "unsupervised": {"q": ["b"]}}, "splits of the data set have unknown names: unsupervised"),
        ({"train": {"q": ["a"], "split": [0]}}, "the data set has splits and also a column `split` … rename the column"),
        ({"val": {"q": ["a"]}, "validation": {"q": ["b"]}}, "the data set has the validation split twice: val, validation"),
        ({"train": {"q": ["a"]}, "test": {"q": [1]}}, "the splits of the data set differ in their columns"),
    ]):  # fmt: skip
        saved = tmp_path / f"saved {number}"
        DatasetDict({name: Dataset.from_dict(columns) for name, columns in parts.items()}).save_to_disk(saved)
        with refused(f"saved {number}: {words}", by=DataError):
            read(saved)


def test_other_folders_links_and_what_the_small_files_may_not_say_are_told(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with refused("… the saved data set cannot be read: ", by=DataError):
        read(tmp_path)
    folder = tmp_path / "saved"
    Dataset.from_dict({"q": ["a"], "a": ["b"]}).save_to_disk(folder)
    (file,) = folder.glob("*.arrow")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with refused("… .arrow is missing, or is not a regular file"):
        read(folder)
    (tmp_path / "elsewhere").replace(file)
    no_files = "state.json does not name Arrow files of this folder"
    for name, content, words in [
        ("state.json", {"_data_files": [{"filename": "../outside.arrow"}]}, no_files),
        ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}, no_files),
        ("state.json", {"_data_files": 3}, no_files),
        ("state.json", {"_data_files": [{"filename": "no.arrow"}]}, "no.arrow is missing, or is not a regular file"),
        ("state.json", [], "state.json does not hold a mapping"),
        ("dataset_info.json", {"features": {"a": {"_type": "os.system"}}}, ""),
        ("dataset_dict.json", {"splits": ["../train"]}, "dataset_dict.json does not name the folders of its splits"),
    ]:
        before = (folder / name).read_text() if (folder / name).exists() else None
        (folder / name).write_text(json.dumps(content))
        with refused(f"… the saved data set cannot be read: {words} … save it again with save_to_disk", by=DataError):
            read(folder)
        (folder / name).unlink() if before is None else (folder / name).write_text(before)
    assert read(folder).table.num_rows == 1


NUM_ROWS = 3 * BATCH_ROWS


def rows():
    return [{"q": f"question {number} " * 8, "n": number, "a": f"answer {number}"} for number in range(NUM_ROWS)]


WRITERS = {
    "data.csv": lambda path: pd.DataFrame(rows()).to_csv(path, index=False),
    "data.jsonl": lambda path: path.write_text(jsonl(*rows())),
    "data.json": lambda path: path.write_text(json.dumps(rows())),
    "data.parquet": lambda path: pq.write_table(pa.Table.from_pylist(rows()), path, row_group_size=BATCH_ROWS),
}


def make_small(monkeypatch):
    monkeypatch.setattr(spill, "SPILL_BYTES", 1000)
    monkeypatch.setattr("brim.data.read.csv.BLOCK_BYTES", 2**16)


@pytest.mark.parametrize("name", WRITERS)
def test_a_spilled_file_equals_one_in_memory_and_its_buffers_are_mapped(tmp_path, monkeypatch, cache, name):
    WRITERS[name](tmp_path / name)
    small = read(tmp_path / name).table
    assert not cache.exists()
    make_small(monkeypatch)
    gc.collect()
    before = pa.total_allocated_bytes()
    large = read(tmp_path / name).table
    gc.collect()
    assert large.nbytes > 1_500_000
    assert pa.total_allocated_bytes() - before < 0.02 * large.nbytes
    assert large.equals(small)
    assert len(list(cache.iterdir())) == 1


def test_a_spilled_file_is_read_once_with_its_faults_until_it_changes_or_is_damaged(tmp_path, monkeypatch, cache):
    path = tmp_path / "data.jsonl"
    path.write_text(jsonl(*rows()))
    make_small(monkeypatch)
    whole = read(path).table.to_pylist()
    (kept,) = cache.iterdir()
    written = kept.stat()
    assert written.st_mode & 0o077 == 0
    assert read(path).table.num_rows == NUM_ROWS
    assert kept.stat().st_ino == written.st_ino
    assert kept.stat().st_mtime_ns > written.st_mtime_ns, "what is used is not the oldest"
    kept.write_bytes(kept.read_bytes()[:5000])
    assert read(path).table.to_pylist() == whole
    path.write_text(jsonl({"q": "more", "n": 1, "a": "x"}, *rows()))
    os.utime(path, ns=(1, 1))
    assert read(path).table.num_rows == NUM_ROWS + 1
    (kept_now,) = cache.iterdir()
    assert kept_now != kept
    path.write_text(jsonl(*rows()) + '{broken\n{"q": 3}\n')
    with monkeypatch.context() as patch:
        patch.setattr(spill, "SPILL_BYTES", 2**30)
        small = read(path)
    sources = small, read(path), read(path)
    assert len(list(cache.iterdir())) == 1
    for source in sources:
        assert {row: problem.what for row, problem in source.faults.items()} == {
            12288: "not valid JSON: Expecting property name enclosed in double quotes at character 2"
        }
        assert source.kinds["q"].to_pylist()[-3:] == ["text", None, "a number"]
        assert source.table.equals(small.table)


def test_a_failure_while_spilling_a_full_disk_or_cache_leaves_nothing_behind(tmp_path, monkeypatch, cache):
    (tmp_path / "data.jsonl").write_text(jsonl(*rows()))
    make_small(monkeypatch)

    def failing(path, unreadable):
        yield from json.loads(f"[{','.join(path.read_text().splitlines())}]")
        raise DataError(Problem(what="on purpose"))

    with monkeypatch.context() as patch, pytest.raises(DataError, match="on purpose"):
        patch.setattr(read_jsonl, "_objects", failing)
        read(tmp_path / "data.jsonl")
    assert list(cache.iterdir()) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with refused("… the memory-mapped copy of the data cannot be written: File too large", by=OutputError):
            read(tmp_path / "data.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read(tmp_path / "data.jsonl").table.num_rows == NUM_ROWS


def test_token_rows_are_mapped_and_leave_no_file(monkeypatch, cache, prepared):
    source = read(rows()[:4000])
    small = prepared(source).splits["train"]
    make_small(monkeypatch)
    gc.collect()
    before = pa.total_allocated_bytes()
    large = prepared(source).splits["train"]
    gc.collect()
    assert large.lengths.sum() * 4 > 1_500_000
    assert pa.total_allocated_bytes() - before < 100_000
    assert list(cache.iterdir()) == []
    assert large.num_supervised.tolist() == small.num_supervised.tolist()
    parts = [[(row.key, row.input_ids.tolist(), row.supervised.tolist()) for row in rows] for rows in (large, small)]
    assert parts[0] == parts[1]
