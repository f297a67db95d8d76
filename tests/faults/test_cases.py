"""Trials are shared out, each is done once, and what goes wrong is told."""

from pathlib import Path

import pytest
from faults.cases import Case, Skip, spread, trials
from faults.forked import Brim

from faults import Settings, Trial


def skip():
    raise Skip("no compiler")


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_trial_is_one_processs(num_workers):
    cases = [Case(row="r", name=str(number), judge=str) for number in range(7)]
    done = []
    for worker in range(num_workers):
        settings = Settings(
            folder=Path(), brim=Brim(), short=False, seed=0, worker=worker, num_workers=num_workers
        )  # fmt: skip
        done += [trial.case for trial in trials(cases, settings)]
    assert sorted(done) == [str(number) for number in range(7)]


def test_what_was_wrong_is_a_failure_and_what_cannot_be_tried_is_skipped():
    cases = [
        Case(row="r", name="a", judge=lambda: ""),
        Case(row="r", name="b", judge=lambda: "lost"),
        Case(row="r", name="c", judge=skip),
    ]
    settings = Settings(folder=Path(), brim=Brim(), short=False, seed=0)
    assert list(trials(cases, settings)) == [
        Trial(row="r", case="a", outcome="passed"),
        Trial(row="r", case="b", outcome="failed", why="lost"),
        Trial(row="r", case="c", outcome="skipped", why="no compiler"),
    ]


@pytest.mark.parametrize(
    ("number", "wanted", "seed", "chosen"),
    [(10, 3, 0, [1, 4, 7]), (10, 3, 1, [2, 5, 8]), (10, 3, 2, [0, 3, 6]), (3, 5, 9, [0, 1, 2]), (0, 2, 0, [])],
)
def test_a_few_are_spread_over_all(number, wanted, seed, chosen):
    assert spread(number, wanted, seed=seed) == chosen
