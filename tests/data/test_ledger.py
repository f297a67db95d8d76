"""Rows that cannot be used: an error with their places, or entries of the ledger, as a file and as lines for people."""

import pyarrow.parquet as pq
import pytest
from tests.messages import refused, says

from brim.data.read import Entry, Ledger, RowFaults
from brim.errors import DataError, Problem, WriteError
from brim.notes import short_of


def faults_in(*keys):
    faults = RowFaults(locate=lambda key: f"data.jsonl:{key + 1}")
    for key in keys:
        faults.add(key, Problem(what=f"fault {key}", expected="none"))
    return faults


def settle(faults, policy, num_rows=20):
    return faults.settle(policy, num_rows=num_rows, name="data.jsonl", split_of=lambda key: "train")


DROP = "set preprocessing.on_bad_row: drop to go on without such rows"


def test_error_tells_the_first_places_counts_the_others_and_names_the_policy_where_it_would_help():
    first = [f"data.jsonl:{key + 1}: fault {key} … none" for key in range(1, 6)]
    with refused(*first, f"data.jsonl: 2 more rows are bad … {DROP}"):
        settle(faults_in(9, 1, 2, 3, 4, 5, 6), "error")
    for num_bad, is_told in [(10, True), (11, False)]:
        with pytest.raises(DataError) as caught:
            settle(faults_in(*range(num_bad)), "error")
        assert ("on_bad_row" in str(caught.value)) == is_told  # to drop more than half of the rows would not help


def test_drop_gives_entries_in_the_order_of_the_rows():
    entries = settle(faults_in(9, 1), "drop")
    assert entries == [
        Entry(key=1, split="train", event="dropped_bad", why="data.jsonl:2: fault 1"),
        Entry(key=9, split="train", event="dropped_bad", why="data.jsonl:10: fault 9"),
    ]
    faults = faults_in(1)
    faults.add(1, Problem(what="another"))
    assert [entry.why for entry in settle(faults, "drop")] == ["data.jsonl:2: fault 1"]
    with pytest.raises(DataError, match=r"11 of 20 rows are bad, .*\n.* at most half .*\n.* look at the first"):
        settle(faults_in(*range(11)), "drop")
    (line,) = Ledger(num_rows=20, entries=settle(faults_in(*range(5)), "drop")).summary()
    assert line.endswith("; data.jsonl:3: fault 2; and 2 more)")


WHY = "preprocessing.global_max_sequence_length is 512"
DROPPED = Entry(key=9, split="test", event="dropped_missing", why="no value in `a`")


def cut(key, before):
    return Entry(key=key, split="train", event="cut_joined", why=WHY, tokens_before=before, tokens_after=512)


def test_the_file_holds_every_entry_and_has_all_columns(tmp_path):
    Ledger(num_rows=4000, entries=[cut(3, 3211), DROPPED]).write(tmp_path / "ledger.parquet")
    assert [tuple(row.values()) for row in pq.read_table(tmp_path / "ledger.parquet").to_pylist()] == [
        (3, "train", "cut_joined", WHY, 3211, 512),
        (9, "test", "dropped_missing", "no value in `a`", None, None),
    ]
    Ledger(num_rows=1).write(tmp_path / "ledger.parquet")
    assert pq.read_table(tmp_path / "ledger.parquet").equals(Ledger.SCHEMA.empty_table())
    with refused("… the ledger could not be written: No such file or directory", by=WriteError):
        Ledger(num_rows=1).write(tmp_path / "nowhere" / "ledger.parquet")


def test_the_summary_counts_and_names_the_longest_also_in_short():
    _, cuts = Ledger(num_rows=4000, entries=[cut(3, 700), DROPPED, cut(5, 3211)]).summary()
    assert says(cuts, f"2 of 4,000 rows were cut as a whole … the longest from 3,211 to 512 tokens ({WHY})")
    assert Ledger(num_rows=3).summary() == []

    def short(event, *whys):
        sizes = {"tokens_before": 100, "tokens_after": 40}
        entries = [Entry(key=key, split="train", event=event, why=why, **sizes) for key, why in enumerate(whys)]
        (line,) = Ledger(num_rows=9, entries=entries).summary()
        return short_of(line)

    for event, whys, line in [
        ("cut_joined", ["max_sequence_length is 40"] * 2, "2 of 9 rows cut to 40 tokens"),
        ("dropped_missing", ["no value in `a`", "no value in `b`"], "2 of 9 rows dropped"),
        ("dropped_bad", ["a.jsonl:4: no JSON"], "1 of 9 rows dropped: a.jsonl:4: no JSON"),
        ("dropped_bad", ["a.jsonl:4: no JSON", "a.jsonl:7: no"], "2 of 9 rows dropped: a.jsonl:4: no JSON and 1 more"),
    ]:
        assert short(event, *whys) == line
