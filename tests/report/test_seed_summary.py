"""Means and paired differences, against sums by hand."""

import math

import pytest
from tests.report.hand_made_runs import figures, two_by_three

from brim.report import Estimate, Spread, final_split, summaries, verdict


def test_means_and_what_the_runs_took():
    first, second = summaries(two_by_three())
    assert (first.name, first.seeds) == ("a", (0, 1, 2))
    assert first.losses["validation"].mean == pytest.approx(2.1)
    assert first.losses["validation"].interval.high == pytest.approx(2.1 + 4.302653 * 0.1 / math.sqrt(3))
    assert first.num_tokens == Spread(least=1000, mean=1001, most=1002)
    assert (second.num_steps, second.seconds) == (Spread(least=20, mean=20, most=20), Spread(least=2, mean=2, most=2))
    assert first.differences == {}


def test_differences_are_paired_by_seed():
    """The seeds scatter a hundred times as much as the differences."""
    _, second = summaries(two_by_three())
    difference = second.differences["validation"]
    assert difference.mean == pytest.approx(-0.199)
    half = 4.302653 * 0.001 / math.sqrt(3)
    assert difference.interval.low == pytest.approx(-0.199 - half)
    assert difference.interval.high == pytest.approx(-0.199 + half)
    assert verdict(difference) == "lower"


def test_an_interval_that_holds_zero_shows_no_difference():
    _, second = summaries(two_by_three())
    difference = second.differences["test"]
    assert difference.mean == pytest.approx(0.0)
    assert verdict(difference) == "no difference that these seeds show"


def test_only_seeds_that_both_have_are_paired():
    runs = two_by_three()
    del runs["a"][1]
    first, second = summaries(runs)
    assert (first.seeds, second.seeds) == ((0, 2), (0, 1, 2))
    assert second.differences["validation"].num_seeds == 2
    assert second.differences["validation"].mean == pytest.approx(-0.199)


def test_words_of_a_difference():
    assert verdict(Estimate(mean=-1.0, interval=None, num_seeds=1)) == "one seed shows nothing"
    assert verdict(Estimate(mean=math.nan, interval=None, num_seeds=3)) == "not a number"
    runs = {"a": {s: figures(1.0) for s in (0, 1)}, "b": {s: figures(1.5) for s in (0, 1)}}
    assert verdict(summaries(runs)[1].differences["validation"]) == "higher"


def test_the_validation_loss_counts_where_every_run_has_one():
    runs = two_by_three()
    assert final_split(runs) == "validation"
    runs["b"][2] = figures(1.0, losses={"train": 1.0})
    assert final_split(runs) == "train"
    assert list(summaries(runs)[1].losses) == ["train"]


def test_a_configuration_without_a_run_is_left_out():
    runs = {"a": {0: figures(1.0)}, "b": {}}
    assert [each.name for each in summaries(runs)] == ["a"]
    assert summaries({"a": {}, "b": {}}) == []
    (alone,) = summaries({"a": {}, "b": {0: figures(1.0)}})
    assert alone.differences == {}
