"""What data takes does not grow with it: readers, advice, prompts and the cache stay within bounds."""

import fcntl
import gc
import json
import subprocess
import sys
import tempfile
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from benchmarks.data_memory import growth_of, write_data
from tests.data.conftest import jsonl

from brim.config.schema import PreprocessingConfig
from brim.data import check_data, prompter
from brim.data.read import blocks, columns, csv, encoding, json as read_json, read, spill
from brim.data.table import Feature, prepare_table

FILE_BYTES = 12_000_000


@pytest.fixture
def file(tmp_path, monkeypatch):
    """file(ending): a data set of 12 MB, of which no more than a few hundred kilobytes need be held."""
    monkeypatch.setattr(spill, "SPILL_BYTES", 100_000)
    monkeypatch.setattr(columns, "BATCH_ROWS", 64)
    sizes = [(csv, "BLOCK_BYTES"), (read_json, "_WINDOW"), (encoding, "HEAD_BYTES"), (encoding, "_BLOCK_BYTES")]
    for module, name in sizes:
        monkeypatch.setattr(module, name, 2**14)

    def write(ending):
        write_data(tmp_path / f"few.{ending}", 1000)
        read(tmp_path / f"few.{ending}")  # so that what is imported for it does not count
        path = tmp_path / f"data.{ending}"
        write_data(path, FILE_BYTES)
        return path

    return write


def peak_bytes(work):
    """The most that Python and Arrow held at a time, over what they held before."""
    gc.collect()
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0)
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_a_file_is_never_in_memory_whole(file, ending):
    path = file(ending)
    assert peak_bytes(lambda: read(path)) < 0.3 * FILE_BYTES


@pytest.mark.process
def test_a_large_object_of_columns_says_how_to_write_lines_which_hold_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(read_json, "SPILL_BYTES", 10)
    path = tmp_path / "the data.json"
    path.write_text(json.dumps({"q": ["é", None], "n": [1, 2.5]}, ensure_ascii=False), encoding="utf-8")
    source = read(path)
    (note,) = source.notes
    command = note.partition("write them with: python")[2]
    subprocess.run(["sh", "-c", f"{sys.executable}{command}"], check=True)
    assert read(path.with_suffix(".jsonl")).table.equals(source.table)
    monkeypatch.undo()
    assert read(path).notes == ()


@pytest.mark.process
def test_nor_is_a_parquet_file_of_one_row_group(tmp_path):
    """Arrow reads it from outside its pools; what it takes at any size is about this file's."""
    write_data(tmp_path / "data.parquet", 60_000_000)
    measured = growth_of("check", tmp_path / "data.parquet", num_rows=10, spill_bytes=10**6)
    assert measured.file_bytes > 50_000_000
    assert measured.anonymous_bytes < 1.35 * measured.file_bytes


def test_rows_that_leak_are_told_without_holding_the_data(file, encoder, make_config):
    path = file("jsonl")
    path.write_text(path.read_text().partition("\n")[0] + "\n" + path.read_text())
    source = read(path)
    config = make_config(preprocessing__sample_size=200, prompt__template="{q}\n", random_seed=1)
    assert peak_bytes(lambda: check_data(config, source, encoder, context_length=None)) < 0.3 * FILE_BYTES


def test_a_tables_columns_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "SPILL_BYTES", 100_000)
    monkeypatch.setattr(spill, "BLOCK_BYTES", 2**14)
    monkeypatch.setattr(columns, "BATCH_ROWS", 64)
    rows = ({"n": number, "c": f"{number % 7} {'x' * 2000}", "y": number % 2} for number in range(3000))
    path = tmp_path / "data.jsonl"
    path.write_text(jsonl(*rows))
    source = read(path)
    found = [
        Feature(name=name, column=name, place=f"{group}[0]", type=kind)
        for name, kind, group in [
            ("n", "number", "input_features"),
            ("c", "category", "input_features"),
            ("y", "binary", "output_features"),
        ]
    ]
    labels = []

    def prepare_columns():
        done = prepare_table(source, found, None, policy=PreprocessingConfig(), seed=1)
        labels.extend(done.columns.inputs[1].labels)

    assert peak_bytes(prepare_columns) < 0.25 * path.stat().st_size
    assert sorted(label[0] for label in labels) == list("0123456")


def test_rows_are_read_and_a_long_template_filled_in_blocks_of_so_many_bytes(make_config):
    texts = [*map("{:010}".format, range(2000)), "y" * spill.BLOCK_BYTES, *["z" * (spill.BLOCK_BYTES // 4)] * 9]
    table, keys = pa.table({"q": texts}), np.array([0, 5, 1999, 2000, 2001, 2004, 2009])
    found = list(blocks(table, keys))
    assert [key for block_keys, _ in found for key in block_keys.tolist()] == keys.tolist()
    assert [text for _, block in found for text in block["q"].to_pylist()] == [texts[key] for key in keys]
    assert all(block.nbytes <= 1.1 * spill.BLOCK_BYTES or len(block) == 1 for _, block in found)
    source = read({"q": [f"question {number}" for number in range(1024)], "a": ["x"] * 1024})
    asked = prompter(make_config(prompt__template="x" * 100_000 + "{q}"), source, with_answers=True)
    keys, seen = source.usable_rows(), []
    most = peak_bytes(lambda: seen.extend(key for texts in asked.texts(keys) for key in texts.keys.tolist()))
    assert most < 8_000_000
    assert seen == keys.tolist()


def rows_of(path, number):
    path.write_text(jsonl(*({"q": f"{number} {row}", "a": "x" * 100} for row in range(5000))))
    return path


def test_kept_copies_stay_within_their_budget_and_what_was_used_last_stays(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(spill, "SPILL_BYTES", 1000)
    paths = [rows_of(tmp_path / f"{number}.jsonl", number) for number in range(4)]
    read(paths[0])
    (kept,) = cache.iterdir()
    budget = int(3.5 * kept.stat().st_size)
    monkeypatch.setattr(spill, "MOST_KEPT_BYTES", budget)
    for path in (paths[1], paths[2], paths[0], paths[3]):
        read(path)
    assert sum(each.stat().st_size for each in cache.iterdir()) <= budget
    names = {each.name for each in cache.iterdir()}
    assert names == {spill._kept_path(path).name for path in (paths[0], paths[2], paths[3])}
    monkeypatch.setattr(spill, "MOST_KEPT_BYTES", 1000)  # what alone is larger is not kept, and read all the same
    others = cache / "someone-elses.arrow"
    others.write_bytes(b"x" * 2000)
    assert read(rows_of(tmp_path / "4.jsonl", 4)).table.num_rows == 5000
    assert list(cache.iterdir()) == [others]


def test_what_a_killed_process_left_goes_and_what_another_writes_stays(tmp_path, monkeypatch, cache):
    """A copy may be taken away, too."""
    monkeypatch.setattr(spill, "SPILL_BYTES", 1000)
    cache.mkdir(parents=True)
    left, written = cache / "spill-left.part", cache / "spill-written.part"
    left.write_bytes(b"x")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        read(rows_of(tmp_path / "data.jsonl", 1))
        assert not left.exists()
        assert written.exists()
    written.unlink()
    forget = spill.forget_oldest
    monkeypatch.setattr(spill, "forget_oldest", lambda folder, pattern, **_: forget(folder, pattern, most_bytes=0))
    assert read(rows_of(tmp_path / "data.jsonl", 21)).table["q"].to_pylist()[-1] == "21 4999"
    assert list(cache.iterdir()) == []


def test_a_copy_that_is_taken_for_abandoned_before_it_is_locked_is_begun_again(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(spill, "SPILL_BYTES", 1000)
    mkstemp, made = tempfile.mkstemp, []

    def cleaned_up(**keys):
        made.append(mkstemp(**keys))
        if len(made) == 1:
            spill.remove_abandoned(keys["dir"], "spill-*.part")
        return made[-1]

    monkeypatch.setattr(spill.tempfile, "mkstemp", cleaned_up)
    assert read(rows_of(tmp_path / "data.jsonl", 1)).table.num_rows == 5000
    assert [each.name for each in cache.iterdir()] == [spill._kept_path(tmp_path / "data.jsonl").name]
    assert len(made) == 2
