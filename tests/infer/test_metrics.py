"""Figures against closed forms, and the bootstrap against known distributions."""

import math

import numpy as np
import pytest

from brim.infer.evaluate import Scores
from brim.infer.metrics import Interval, loss_interval, ratio_interval, summarize


def scores(loss, num_correct, num_supervised):
    return Scores(
        keys=np.arange(len(loss)),
        loss=np.asarray(loss, dtype=np.float64),
        num_correct=np.asarray(num_correct),
        num_supervised=np.asarray(num_supervised),
    )


def test_means_are_over_tokens_and_sequence_accuracy_over_rows():
    assert summarize(scores([2.0, 1.0, 6.0], [1, 2, 0], [1, 2, 6])) == {
        "loss": 1.0,  # 9 / 9, not the mean of 2, 0.5 and 1
        "perplexity": math.e,
        "token_accuracy": 3 / 9,
        "sequence_accuracy": 2 / 3,
        "num_rows": 3,
        "num_supervised_tokens": 9,
    }


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity():
    assert summarize(scores([5 * math.log(300)], [0], [5]))["perplexity"] == pytest.approx(300)


def test_a_perplexity_beyond_all_numbers_is_infinite():
    assert summarize(scores([4000.0], [0], [5]))["perplexity"] == math.inf


def test_a_loss_that_is_no_number_stays_none():
    figures = summarize(scores([math.nan, 1.0], [0, 0], [1, 1]))
    assert math.isnan(figures["loss"])
    assert math.isnan(figures["perplexity"])


def test_equal_rows_leave_no_doubt():
    assert loss_interval(scores([3.0] * 7, [0] * 7, [2] * 7)) == Interval(low=1.5, high=1.5)


def test_one_row_leaves_no_room_to_resample():
    assert loss_interval(scores([3.0], [0], [2])) == Interval(low=1.5, high=1.5)


def test_two_rows_give_their_three_means():
    # Draws with replacement are (a, a), (a, b), (b, a), (b, b), a quarter each: the 95% interval spans both ends.
    assert ratio_interval(np.array([1.0, 3.0]), np.array([1, 1])) == Interval(low=1.0, high=3.0)


def test_the_interval_of_a_mean_is_the_normal_one():
    """For many rows of one token, the bootstrap's interval tends to mean ± 1.96 σ / √n (percentile bootstrap)."""
    values = np.random.default_rng(1).normal(5.0, 2.0, size=2000)
    interval = ratio_interval(values, np.ones(2000, dtype=np.int64))
    half = 1.96 * values.std() / math.sqrt(2000)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(2)
    tokens = np.full(40, 3)
    intervals = [ratio_interval(generator.exponential(2.0, size=40) * 3, tokens, seed=i) for i in range(200)]
    covered = sum(interval.low <= 2.0 <= interval.high for interval in intervals)
    assert 176 <= covered <= 198  # of 200; a percentile bootstrap of 40 skewed rows covers a little less than 95%


def test_rows_are_drawn_whole():
    """One long row against many short ones: with tokens drawn alone, the interval would be far narrower."""
    loss, tokens = np.array([1000.0] + [1.0] * 10), np.array([100] + [1] * 10)
    interval = ratio_interval(loss, tokens)
    assert interval.low == pytest.approx(1.0)  # no long row drawn
    assert interval.high > 9.5


@pytest.mark.parametrize("draws", [1, 90, 20_000])
def test_memory_is_bounded_and_changes_no_figure(monkeypatch, draws):
    loss, tokens = np.arange(30.0), np.arange(1, 31)
    expected = ratio_interval(loss, tokens)
    monkeypatch.setattr("brim.infer.metrics._DRAWS_AT_ONCE", draws)
    assert ratio_interval(loss, tokens) == expected


def test_the_same_seed_gives_the_same_interval():
    loss, tokens = np.arange(30.0), np.arange(1, 31)
    assert ratio_interval(loss, tokens, seed=3) == ratio_interval(loss, tokens, seed=3)
    assert ratio_interval(loss, tokens, seed=3) != ratio_interval(loss, tokens, seed=4)
