"""Intervals of a few repetitions, against the tables of the distribution and against draws."""

import math

import numpy as np
import pytest

from brim.infer import mean_interval
from brim.infer.statistics import t_quantile

# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, column 0.975.
TABLE = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
    15: 2.131,
    20: 2.086,
    29: 2.045,
    30: 2.042,
    50: 2.009,
    99: 1.984,
    100: 1.984,
}


@pytest.mark.parametrize(("degrees", "quantile"), TABLE.items())
def test_quantiles_are_those_of_the_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5.1e-4)


def test_with_many_degrees_it_is_the_normal_distribution():
    assert t_quantile(10_000) == pytest.approx(1.959964, abs=3e-4)


def test_an_interval_by_hand():
    found = mean_interval([1.0, 2.0, 3.0])  # standard deviation 1
    assert (found.low + found.high) / 2 == pytest.approx(2.0)
    assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)


def test_equal_values_have_an_interval_of_no_width():
    found = mean_interval([0.5] * 4)
    assert (found.low, found.high) == (0.5, 0.5)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf]])
def test_there_is_none_for_one_value_or_for_what_is_no_number(values):
    assert mean_interval(values) is None


@pytest.mark.parametrize("number", [2, 3, 5])
def test_it_holds_the_mean_in_95_of_100_cases(number):
    draws = np.random.default_rng(0).normal(3.0, 2.0, size=(4000, number))
    held = [found.low <= 3.0 <= found.high for found in map(mean_interval, draws.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 4000))
