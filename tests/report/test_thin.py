"""Fewer points, the same peaks."""

import numpy as np
from hypothesis import given, strategies as st

from brim.report.memory_figure import thinned


def test_few_points_are_all_kept():
    assert thinned(np.array([3, 1, 2]), most=3).tolist() == [0, 1, 2]


def test_a_spike_of_one_point_stays():
    values = np.zeros(10_000, dtype=np.int64)
    values[4_321] = 7
    assert 4_321 in thinned(values, most=100)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=400), st.integers(6, 60))
def test_order_ends_and_extremes_are_kept(values, most):
    values = np.array(values)
    kept = thinned(values, most=most)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()
