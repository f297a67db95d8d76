"""Which way is taken: the fastest that fits, and of ways as fast as each other the one that is preferred."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.hand_made import does_not_fit, hand_made_candidate

from brim.planning.candidates import WAYS, choose, describe, ways
from brim.planning.plan import Way


def _of(seconds):
    """One candidate a way, in the order of preference; None: it does not fit."""
    made = [
        replace(hand_made_candidate(seconds=each or 1.0), way=way) for way, each in zip(WAYS, seconds, strict=False)
    ]
    return [each if took else does_not_fit(each) for each, took in zip(made, seconds, strict=True)]


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ((100.0, 100.0, 140.0, 140.0), 0),
        ((100.0, 98.0, 140.0, 140.0), 0),  # faster by 2%, which is not known so well
        ((100.0, 97.9, 140.0, 140.0), 1),
        ((100.0, 97.9, 96.0, 140.0), 1),  # and the next by less than that
        ((100.0, 97.9, 95.9, 140.0), 2),
        ((None, None, 140.0, 140.0), 2),
        ((None, 150.0, 140.0, 140.0), 2),
        ((None, None, None, 140.0), 3),
    ],
)
def test_the_fastest_that_fits_is_taken_unless_it_is_hardly_faster(seconds, taken):
    candidates = _of(seconds)
    assert choose(candidates)[0] is candidates[taken]


def test_the_reason_compares_with_the_second_best():
    assert (
        choose(_of((100.0, 130.0, 120.0, 140.0)))[1]
        == "an epoch takes 1 min 40 s, checkpointing, loss in chunks 2 min 0 s"
    )


def test_the_reason_of_the_only_one_that_fits_is_why_the_first_does_not():
    (_, reason) = choose(_of((None, None, 140.0)))
    assert reason == (
        "the only way that fits: the longest row, 1,417 tokens, takes 15.0 GiB alone, and 13.0 GiB are there"
    )


def test_where_there_is_no_other_way_it_is_said_whether_others_were_looked_at():
    assert choose(_of((100.0,)))[1] == "the only way that is left open"
    assert (
        choose(_of((100.0,)), has_more=True)[1] == "it fits, and more memory would not make updates of this size faster"
    )


def test_where_none_fits_each_says_why():
    chosen, reason = choose(_of((None, None)))
    assert chosen is None
    why = "the longest row, 1,417 tokens, takes 15.0 GiB alone, and 13.0 GiB are there"
    assert reason == f"no checkpointing, loss in chunks: {why}; no checkpointing, whole logits: {why}"


@pytest.mark.parametrize(
    ("checkpointing", "chunked", "expected"),
    [
        (None, None, WAYS),
        (True, None, WAYS[2:]),
        (None, False, (WAYS[1], WAYS[3])),
        (False, True, WAYS[:1]),
    ],
)
def test_what_the_configuration_says_is_not_left_open(checkpointing, chunked, expected):
    assert ways(checkpointing=checkpointing, chunked=chunked) == list(expected)


def test_every_way_has_a_name_of_its_own():
    assert len({describe(way) for way in WAYS}) == 4
    assert describe(Way(gradient_checkpointing=True, chunked_loss=False)) == "checkpointing, whole logits"
