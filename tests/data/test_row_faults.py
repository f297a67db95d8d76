"""Rows that cannot be used: an error with their places, or entries of the ledger."""

import pytest

from brim.data.read import Entry, Ledger, RowFaults
from brim.errors import DataError, Problem


def faults_in(*keys):
    faults = RowFaults(locate=lambda key: f"data.jsonl:{key + 1}")
    for key in keys:
        faults.add(key, Problem(what=f"fault {key}", expected="none"))
    return faults


def settle(faults, policy, num_rows=20):
    return faults.settle(policy, num_rows=num_rows, name="data.jsonl", split_of=lambda key: "train")


def test_error_tells_the_first_places_counts_the_others_and_names_the_policy():
    with pytest.raises(DataError) as caught:
        settle(faults_in(9, 1, 2, 3, 4, 5, 6), "error")
    assert str(caught.value) == (
        "".join(f"data.jsonl:{key + 1}: fault {key}\n  expected: none\n" for key in range(1, 6))
        + "data.jsonl: 2 more rows are bad\n"
        "  fix: set preprocessing.on_bad_row: drop to go on without such rows"
    )


@pytest.mark.parametrize(("num_bad", "is_told"), [(10, True), (11, False)])
def test_error_names_the_policy_only_where_it_would_help(num_bad, is_told):
    with pytest.raises(DataError) as caught:
        settle(faults_in(*range(num_bad)), "error")
    assert ("on_bad_row" in str(caught.value)) == is_told


def test_error_keeps_a_fix_of_its_own():
    faults = RowFaults(locate=lambda key: "here")
    faults.add(0, Problem(what="half a character", fix="remove it"))
    with pytest.raises(DataError, match=r"fix: remove it; or set preprocessing\.on_bad_row: drop to go on"):
        settle(faults, "error")


def test_drop_gives_entries_in_the_order_of_the_rows():
    entries = settle(faults_in(9, 1), "drop")
    assert entries == [
        Entry(key=1, split="train", event="dropped_bad", why="data.jsonl:2: fault 1"),
        Entry(key=9, split="train", event="dropped_bad", why="data.jsonl:10: fault 9"),
    ]
    assert Ledger(num_rows=20, entries=entries).summary() == [
        "2 of 20 rows were dropped, since they cannot be read or used (data.jsonl:2: fault 1; data.jsonl:10: fault 9)"
    ]


def test_the_summary_names_three_and_counts_the_others():
    entries = settle(faults_in(*range(5)), "drop")
    assert Ledger(num_rows=20, entries=entries).summary()[0].endswith("; data.jsonl:3: fault 2; and 2 more)")


def test_half_of_the_rows_may_be_bad_and_no_more():
    assert len(settle(faults_in(*range(10)), "drop")) == 10
    with pytest.raises(DataError) as caught:
        settle(faults_in(*range(11)), "drop")
    assert str(caught.value.problems[-1]) == (
        "data.jsonl: 11 of 20 rows are bad, more than preprocessing.on_bad_row: drop leaves out\n"
        "  expected: a file of another kind, or other columns: at most half of the rows may be bad\n"
        "  fix: look at the first of them"
    )
    assert caught.value.problems[0].where == "data.jsonl:1"


def test_the_first_problem_of_a_row_counts():
    faults = faults_in(1)
    faults.add(1, Problem(what="another"))
    assert [entry.why for entry in settle(faults, "drop")] == ["data.jsonl:2: fault 1"]


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_without_faults_nothing_happens(policy):
    assert settle(faults_in(), policy) == []
