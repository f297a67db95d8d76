"""What fits under a cap."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import costs, jagged_surfaces, linear_costs, surface

from brim.batching import Costs, longest_row_that_fits, rows_that_fit

MOST = 300


@given(
    costs=costs(peak=jagged_surfaces()),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    most=st.integers(1, MOST),
    cap_bytes=st.integers(0, 4000),
)
def test_the_rows_below_the_first_number_that_is_over_the_cap(costs, lengths, most, cap_bytes):
    over = costs.peak_bytes(np.arange(1, most + 1), np.array(lengths)[:, None]) > cap_bytes
    expected = [line.tolist().index(True) if line.any() else most for line in over]
    assert rows_that_fit(costs, lengths, cap_bytes=cap_bytes, most=most).tolist() == expected


def test_rows_of_a_length():
    fit = rows_that_fit(linear_costs(scale=2.0), [1, 50, 70, 150, 151], cap_bytes=1000 + 20 * 150, most=1000)
    assert fit.tolist() == [150, 3, 2, 1, 0]


@pytest.mark.parametrize(("cap_bytes", "tokens"), [(999, 0), (1009, 0), (1010, 1), (51_009, 5000), (10**9, 1 << 20)])
def test_the_longest_row_that_fits(cap_bytes, tokens):
    assert longest_row_that_fits(linear_costs(), cap_bytes) == tokens


def test_rows_that_go_together_are_shorter():
    assert longest_row_that_fits(linear_costs(), 1000 + 10 * 3 * 50 + 29, rows=3) == 50


def test_no_row_is_longer_than_asked_for():
    assert longest_row_that_fits(linear_costs(), 10**9, up_to=4097) == 4097
    assert longest_row_that_fits(linear_costs(), 1000 + 10 * 4097 - 1, up_to=4097) == 4096


def test_a_row_is_too_long_where_a_shorter_one_is():
    rise_and_fall = surface(0.0, [[10, -9, 0, 1]] * 3)
    costs = Costs(peak=rise_and_fall, static_bytes=0, time=rise_and_fall)
    assert costs.peak_bytes(1, 100) == 320 - 9 * 68 < 200
    assert longest_row_that_fits(costs, 200) == 20
