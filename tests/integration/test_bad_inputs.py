"""The judge of bad inputs sees what is wrong, and the generator draws the same, and many, each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faults.bad_configs import bad_configs
from faults.bad_data import bad_data
from faults.bad_input import BadInput, Edit, fault_of
from faults.bad_models import bad_models, bad_runs
from faults.forked import Done
from faults.inputs import NUM_INPUTS, draw

BAD = BadInput(row="bad-configs", name="x", says=("config.yaml",), may_pass=("evaluate",))
GOOD_ANSWER = Done(
    code=2,
    timed_out=False,
    seconds=0.1,
    peak_bytes=1 << 28,
    out="",
    err="brim: config.yaml:3: trainer.epochs is 'two'\n  expected: a whole number of at least 1\n",
)


def judged(verb="check", left=(), **changes):
    return fault_of(BAD, verb, replace(GOOD_ANSWER, **changes), left)


def test_a_good_answer_is_one():
    assert judged() == ""
    assert judged(err="trainer.epochs: 3 (why)\n" + GOOD_ANSWER.err) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"timed_out": True, "code": -9}, "still running after 0 s"),
        ({"code": 1, "err": "Traceback (most recent call last):\nKeyError: 3"}, "a traceback: KeyError: 3"),
        ({"out": "thread 'x' panicked at y"}, "a traceback:   expected: a whole number of at least 1"),
        ({"code": -11}, "ended by signal 11"),
        ({"seconds": 11.0}, "took 11 s"),
        ({"peak_bytes": 1 << 31}, "took 2048 MiB"),
        ({"code": 0}, "was accepted"),
        ({"code": 1}, "exit code 1: "),
        ({"err": "something"}, "no message: something"),
        ({"err": GOOD_ANSWER.err * 20}, "a message of 40 lines"),
        ({"err": GOOD_ANSWER.err + "x" * 1001}, "a line of 1001 characters"),
        ({"err": "brim: it is wrong\n  fix: mend it\n"}, "the place is not named: "),
        ({"err": "brim: config.yaml: it is wrong\n"}, "no way out is named: "),
        ({"err": GOOD_ANSWER.err + "\x1b[31m"}, "control characters in the message: "),
        ({"left": ["new/plan.json", "new"]}, "left behind: new, new/plan.json"),
    ],
)
def test_what_is_wrong_with_an_answer_is_seen(changes, why):
    assert judged(**changes).startswith(why)


def test_verbs_that_need_not_notice_may_pass():
    assert judged(verb="evaluate", code=0) == ""


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(bad_configs, "configurations"), (bad_data, "data"), (bad_models, "models"), (bad_runs, "runs")],
)
def test_enough_are_drawn_and_the_same_for_the_same_seed(strategy, kind):
    number = NUM_INPUTS[kind]
    drawn = draw(strategy(), number, 3)
    assert len({bad.name for bad in drawn}) > 0.9 * number
    assert [bad.name for bad in drawn] == [bad.name for bad in draw(strategy(), number, 3)]


def test_every_edit_makes_what_it_says(tmp_path):
    for number, edit in enumerate(
        [
            Edit(path="a/b", content=b"x"),
            Edit(path="a/c", how="folder"),
            Edit(path="a/c", how="fifo"),
            Edit(path="a/c", how="link", target="b"),
            Edit(path="a/d", how="sparse"),
            Edit(path="a/b", how="remove"),
        ]
    ):
        edit.apply(tmp_path)
        path = tmp_path / edit.path
        assert [path.is_file(), path.is_dir(), path.is_fifo(), path.is_symlink(), path.exists()] == [
            [True, False, False, False, True],
            [False, True, False, False, True],
            [False, False, True, False, True],
            [True, False, False, True, True],
            [True, False, False, False, True],
            [False, False, False, False, False],
        ][number]
