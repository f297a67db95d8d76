"""Curves without what a seed makes harder for all."""

import math

import pytest

from brim.report.curves import levelled
from brim.train import Curve


def curve(*loss):
    return Curve(tokens=tuple(range(1, len(loss) + 1)), loss=loss, weights=(1,) * len(loss))


def test_what_a_seed_adds_to_all_is_taken_away_and_differences_stay():
    curves = {"a": {1: curve(4.0, 3.0), 2: curve(6.0, 5.0)}, "b": {1: curve(3.0, 2.0), 2: curve(5.0, 4.0)}}
    found = levelled(curves)
    assert [each.loss for each in found["a"]] == [(5.0, 4.0), (5.0, 4.0)]
    assert [each.loss for each in found["b"]] == [(4.0, 3.0), (4.0, 3.0)]


def test_a_level_counts_tokens():
    found = levelled({"a": {1: Curve(tokens=(1, 2), loss=(4.0, 1.0), weights=(1, 2)), 2: curve(2.0, 2.0)}})
    assert found["a"][0].loss == pytest.approx((4.0, 1.0))  # both levels are 2
    assert found["a"][1].loss == pytest.approx((2.0, 2.0))


def test_seeds_that_one_lacks_stay_where_they_are():
    curves = {"a": {1: curve(4.0), 2: curve(9.0)}, "b": {1: curve(2.0)}}
    assert [each.loss for each in levelled(curves)["a"]] == [(4.0,), (9.0,)]


def test_a_run_that_fell_apart_moves_none():
    curves = {"a": {1: curve(4.0), 2: curve(math.nan)}, "b": {1: curve(2.0), 2: curve(7.0)}}
    assert levelled(curves)["b"][1].loss == (7.0,)


def test_nothing_is_nothing():
    assert levelled({}) == {}
