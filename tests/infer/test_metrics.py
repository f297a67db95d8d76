"""Figures against closed forms."""

import math

import numpy as np
import pytest

from brim.infer import Interval, Scores, intervals, score_measures, summarize
from brim.infer.evaluate import loss_interval


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


def test_measures_are_the_figures_and_their_intervals_hold_them():
    some = scores([2.0, 1.0, 6.0, 3.5], [1, 2, 0, 2], [1, 2, 6, 3])
    measures, figures = score_measures(some), summarize(some)
    assert {name: measure.value for name, measure in measures.items()} == {name: figures[name] for name in measures}
    once = np.ones((1, 4))
    assert {name: measure.of(once)[0] for name, measure in measures.items()} == pytest.approx(
        {name: figures[name] for name in measures}
    )
    found = intervals(measures, 4)
    assert found["loss"] == loss_interval(some)
    assert found["perplexity"].high == pytest.approx(math.exp(found["loss"].high), rel=1e-3)
    assert all(found[name].low <= figures[name] <= found[name].high for name in measures)


def test_a_perplexity_beyond_all_numbers_has_an_interval_that_ends_there():
    found = intervals(score_measures(scores([4000.0, 1.0], [0, 0], [5, 5])), 2)
    assert found["perplexity"].high == math.inf
