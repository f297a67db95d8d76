"""The ledger as a file and as lines for people."""

import pyarrow.parquet as pq
import pytest

from brim.data.read import Entry, Ledger
from brim.errors import WriteError
from brim.notes import short_of

WHY = "preprocessing.global_max_sequence_length is 512"


def cut(key, before):
    return Entry(key=key, split="train", event="cut_joined", why=WHY, tokens_before=before, tokens_after=512)


def test_the_file_holds_every_entry(tmp_path):
    dropped = Entry(key=9, split="test", event="dropped_missing", why="no value in `a`")
    Ledger(num_rows=4000, entries=[cut(3, 3211), dropped]).write(tmp_path / "ledger.parquet")
    assert pq.read_table(tmp_path / "ledger.parquet").to_pylist() == [
        {"key": 3, "split": "train", "event": "cut_joined", "why": WHY, "tokens_before": 3211, "tokens_after": 512},
        {
            "key": 9,
            "split": "test",
            "event": "dropped_missing",
            "why": "no value in `a`",
            "tokens_before": None,
            "tokens_after": None,
        },
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.parquet"]


def test_an_empty_ledger_is_a_file_with_all_columns(tmp_path):
    Ledger(num_rows=1).write(tmp_path / "ledger.parquet")
    table = pq.read_table(tmp_path / "ledger.parquet")
    assert table.num_rows == 0
    assert table.column_names == ["key", "split", "event", "why", "tokens_before", "tokens_after"]


def test_the_summary_counts_and_names_the_longest():
    dropped = Entry(key=9, split="test", event="dropped_missing", why="no value in `a`")
    assert Ledger(num_rows=4000, entries=[cut(3, 700), dropped, cut(5, 3211)]).summary() == [
        "1 of 4,000 rows were dropped: a cell that the prompt or the answer needs is missing (no value in `a`)",
        f"2 of 4,000 rows were cut as a whole (prompt and answer together): the longest from 3,211 to 512 tokens ({WHY})",
    ]
    assert Ledger(num_rows=3).summary() == []


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(WriteError, match="the ledger could not be written: No such file or directory"):
        Ledger(num_rows=1).write(tmp_path / "nowhere" / "ledger.parquet")


def test_beside_others_a_line_gives_the_count_and_the_reason_that_all_rows_share():
    def short(*events):
        entries = [
            Entry(key=key, split="train", event=event, why=why, tokens_before=100, tokens_after=40)
            for key, (event, why) in enumerate(events)
        ]
        return [short_of(line) for line in Ledger(num_rows=9, entries=entries).summary()]

    cut = ("cut_joined", "max_sequence_length is 40")
    assert short(cut, cut) == ["2 of 9 rows cut: max_sequence_length is 40"]
    assert short(("dropped_missing", "no value in `a`"), ("dropped_missing", "no value in `b`")) == [
        "2 of 9 rows dropped"
    ]
    assert short(("dropped_bad", "a long story")) == ["1 of 9 rows dropped"]
