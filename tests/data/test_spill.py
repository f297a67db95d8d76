"""Large data lies on disk, memory-mapped, and is equal to what small data would be."""

import gc
import json
import os
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.data import prepare
from brim.data.read import json as read_jsonl, read, spill
from brim.data.read.columns import BATCH_ROWS
from brim.errors import DataError, OutputError, Problem

NUM_ROWS = 3 * BATCH_ROWS


def rows():
    return [{"q": f"question {number} " * 8, "n": number, "a": f"answer {number}"} for number in range(NUM_ROWS)]


def write_csv(path):
    path.write_text("q,n,a\n" + "".join(f'"{row["q"]}",{row["n"]},{row["a"]}\n' for row in rows()))


def write_jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))


def write_json(path):
    path.write_text(json.dumps(rows()))


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(rows()), path, row_group_size=BATCH_ROWS)


WRITERS = {"data.csv": write_csv, "data.jsonl": write_jsonl, "data.json": write_json, "data.parquet": write_parquet}


def make_small(monkeypatch):
    monkeypatch.setattr(spill, "SPILL_BYTES", 1000)
    monkeypatch.setattr("brim.data.read.csv.BLOCK_BYTES", 2**16)


@pytest.mark.parametrize("name", WRITERS)
def test_a_spilled_file_equals_one_in_memory(tmp_path, monkeypatch, cache, name):
    WRITERS[name](tmp_path / name)
    small = read(tmp_path / name).table
    assert not cache.exists()
    make_small(monkeypatch)
    large = read(tmp_path / name).table
    assert large.equals(small)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("name", WRITERS)
def test_the_buffers_of_a_spilled_file_are_mapped_not_allocated(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path / name)
    make_small(monkeypatch)
    gc.collect()
    before = pa.total_allocated_bytes()
    table = read(tmp_path / name).table
    gc.collect()
    assert table.nbytes > 1_500_000
    assert pa.total_allocated_bytes() - before < 0.02 * table.nbytes


def test_a_spilled_file_is_read_once_until_it_changes(tmp_path, monkeypatch, cache):
    path = tmp_path / "data.jsonl"
    write_jsonl(path)
    make_small(monkeypatch)
    read(path)
    (kept,) = cache.iterdir()
    written = kept.stat().st_mtime_ns
    assert kept.stat().st_mode & 0o077 == 0
    assert read(path).table.num_rows == NUM_ROWS
    assert kept.stat().st_mtime_ns == written
    path.write_text(json.dumps({"q": "more", "n": 1, "a": "x"}) + "\n" + path.read_text())
    os.utime(path, ns=(1, 1))
    assert read(path).table.num_rows == NUM_ROWS + 1
    (kept_now,) = cache.iterdir()
    assert kept_now != kept


def test_a_kept_file_that_is_damaged_is_made_anew(tmp_path, monkeypatch, cache):
    write_jsonl(tmp_path / "data.jsonl")
    make_small(monkeypatch)
    whole = read(tmp_path / "data.jsonl").table.to_pylist()
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:5000])
    assert read(tmp_path / "data.jsonl").table.to_pylist() == whole


def test_a_failure_while_spilling_leaves_nothing_behind(tmp_path, monkeypatch, cache):
    write_jsonl(tmp_path / "data.jsonl")
    make_small(monkeypatch)

    def failing(path):
        yield from json.loads(f"[{','.join(path.read_text().splitlines())}]")
        raise DataError(Problem(what="on purpose"))

    monkeypatch.setattr(read_jsonl, "_quick_lines", failing)
    with pytest.raises(DataError, match="on purpose"):
        read(tmp_path / "data.jsonl")
    assert list(cache.iterdir()) == []


def test_a_kept_copy_keeps_what_is_wrong_with_rows(tmp_path, monkeypatch, cache):
    write_jsonl(tmp_path / "data.jsonl")
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{broken\n{"q": 3}\n')
    small = read(tmp_path / "data.jsonl")
    make_small(monkeypatch)
    made, kept = read(tmp_path / "data.jsonl"), read(tmp_path / "data.jsonl")
    assert len(list(cache.iterdir())) == 1
    for source in (small, made, kept):
        assert {row: problem.what for row, problem in source.faults.items()} == {
            12288: "not valid JSON: Expecting property name enclosed in double quotes at character 2"
        }
        assert source.kinds["q"].to_pylist()[-3:] == ["text", None, "a number"]
        assert source.table.equals(small.table)


def test_a_later_batch_may_widen_the_columns(tmp_path, monkeypatch):
    late = [{"q": "x", "n": 0.5, "new": "late", "a": "z"}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"q": None, "n": 1}] * BATCH_ROWS + late))
    small = read(path).table
    assert small.slice(BATCH_ROWS).to_pylist() == [{"q": "x", "n": 0.5, "new": "late", "a": "z"}]
    assert small.slice(0, 1).to_pylist() == [{"q": None, "n": 1.0, "new": None, "a": None}]
    make_small(monkeypatch)
    assert read(path).table.equals(small)


def test_token_rows_are_mapped_and_leave_no_file(monkeypatch, cache, encoder, make_config):
    columns = {name: [row[name] for row in rows()] for name in ("q", "a")}
    source, config = read(columns), make_config()
    small = prepare(source, config, encoder, context_length=None).splits["train"]
    make_small(monkeypatch)
    gc.collect()
    before = pa.total_allocated_bytes()
    large = prepare(source, config, encoder, context_length=None).splits["train"]
    gc.collect()
    assert large.lengths.sum() * 4 > 4_000_000
    assert pa.total_allocated_bytes() - before < 100_000
    assert list(cache.iterdir()) == []
    assert large.keys.tolist() == small.keys.tolist()
    assert large.lengths.tolist() == small.lengths.tolist()
    assert large.num_supervised.tolist() == small.num_supervised.tolist()
    for position in (0, 1, 1023, 1024, len(small) - 1):
        np.testing.assert_array_equal(large[position].input_ids, small[position].input_ids)
        np.testing.assert_array_equal(large[position].supervised, small[position].supervised)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_jsonl(tmp_path / "data.jsonl")
    make_small(monkeypatch)
    assert read(tmp_path / "data.jsonl").table.num_rows == NUM_ROWS


def test_a_full_disk_is_told(tmp_path, monkeypatch, cache):
    write_jsonl(tmp_path / "data.jsonl")
    make_small(monkeypatch)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OutputError, match="the memory-mapped copy of the data cannot be written: File too large"):
            read(tmp_path / "data.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.iterdir()) == []
