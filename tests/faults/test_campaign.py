"""The short form of the campaign, which is the campaign itself with a few trials of each row."""

import pytest
from faults.campaign import Plan, judge
from faults.catalogue import CATALOGUE, row_names

MAY_BE_SKIPPED = {  # where there is no C compiler, or no right to mount
    "kill-after", "kill-amid", "kill-again", "kill-anew", "kill-predict", "order", "disk-full", "damage-newest", "damage-both",
    "damage-manifest", "damage-run", "damage-model",
}  # fmt: skip


def test_brim_keeps_its_promises_in_every_row_of_the_table():
    names = [fault.name for fault in CATALOGUE]
    trials = [trial for _, trial in judge(Plan(names=names, short=True, seed=0))]
    assert [trial for trial in trials if trial.outcome == "failed"] == []
    assert {trial.row for trial in trials} == row_names()
    assert {trial.row for trial in trials if trial.outcome == "skipped"} <= MAY_BE_SKIPPED


def test_row_names_are_told_apart():
    names = [row.name for fault in CATALOGUE for row in fault.rows]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_every_row_says_what_is_promised(fault):
    for row in fault.rows:
        assert all("|" not in text for text in (row.fault, row.where, row.promise))
        assert all([row.fault, row.where, row.promise])
