"""Intervals of rows and of repetitions, against known distributions and their tables."""

import math

import numpy as np
import pytest

from brim.infer.metrics import Interval, Measure, answers as module, intervals, paired_intervals
from brim.infer.metrics.answers import t_quantile

# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, column 0.975.
T_QUANTILES = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131,
    20: 2.086, 29: 2.045, 30: 2.042, 50: 2.009, 99: 1.984, 100: 1.984,
}  # fmt: skip


def ratio_interval(numerator, denominator, **settings):
    return intervals({"ratio": Measure.ratio(numerator, denominator)}, len(numerator), **settings)["ratio"]


def test_two_rows_give_their_three_means():
    # Draws with replacement are (a, a), (a, b), (b, a), (b, b), a quarter each: the 95% interval spans both ends.
    assert ratio_interval(np.array([1.0, 3.0]), np.array([1, 1])) == Interval(low=1.0, high=3.0)
    found = ratio_interval(np.array([1.0, math.nan]), np.array([1, 1]))
    assert (math.isnan(found.low), math.isnan(found.high)) == (True, True)


def test_the_interval_of_a_mean_is_the_normal_one():
    """For many rows of one token, the bootstrap's interval tends to mean ± 1.96 σ / √n (percentile bootstrap)."""
    values = np.random.default_rng(1).normal(5.0, 2.0, size=2000)
    interval = ratio_interval(values, np.ones(2000, dtype=np.int64))
    assert intervals({"mean": Measure.ratio(values)}, 2000)["mean"] == interval  # a mean is a ratio to the rows
    assert Measure.ratio(values).value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(2000)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_same_seed_gives_the_same_interval_and_bounded_memory_changes_no_figure(monkeypatch):
    loss, tokens = np.arange(30.0), np.arange(1, 31)
    expected = ratio_interval(loss, tokens)
    assert expected != ratio_interval(loss, tokens, seed=4)
    for draws in (1, 90, 20_000):
        monkeypatch.setattr(module, "_DRAWS_AT_ONCE", draws)
        assert ratio_interval(loss, tokens) == expected


def test_the_interval_of_a_paired_difference_is_that_of_the_differences():
    generator = np.random.default_rng(6)
    a, b = generator.normal(size=300), generator.normal(size=300)
    found = paired_intervals({"x": Measure.ratio(a)}, {"x": Measure.ratio(b), "other": Measure.ratio(b)}, 300)
    direct = ratio_interval(a - b, np.ones(300))
    assert found == {"x": Interval(low=pytest.approx(direct.low), high=pytest.approx(direct.high))}


def test_quantiles_are_those_of_the_tables_and_with_many_degrees_of_the_normal_distribution():
    assert {degrees: t_quantile(degrees) for degrees in T_QUANTILES} == pytest.approx(T_QUANTILES, abs=5.1e-4)
    assert t_quantile(10_000) == pytest.approx(1.959964, abs=3e-4)


def test_intervals_of_a_few_values_by_hand():
    found = Interval.of_mean([1.0, 2.0, 3.0])  # standard deviation 1
    assert (found.low + found.high) / 2 == pytest.approx(2.0)
    assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    assert Interval.of_mean([0.5] * 4) == Interval(low=0.5, high=0.5)
    for values in ([], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf]):
        assert Interval.of_mean(values) is None
