"""How long rows are: percentiles of rows that there are, and bins that double."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from brim.planning import LengthSummary
from brim.planning.plan import summarize_lengths


def test_the_summary_of_a_hundred_rows():
    assert summarize_lengths(list(range(1, 101))) == LengthSummary(
        num_rows=100,
        num_tokens=5050,
        shortest=1,
        median=50,
        p90=90,
        p99=99,
        longest=100,
        histogram=((1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16), (64, 32), (128, 36)),
    )


def test_a_single_row_and_a_row_of_a_power_of_two():
    one = summarize_lengths([64])
    assert (one.median, one.p90, one.p99) == (64, 64, 64)
    assert one.histogram == ((64, 1),)


def test_bins_between_that_hold_no_row_are_there():
    assert summarize_lengths([3, 40]).histogram == ((4, 1), (8, 0), (16, 0), (32, 0), (64, 1))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_every_row_is_in_one_bin_and_percentiles_are_rows(lengths):
    summary = summarize_lengths(lengths)
    below = 0
    for bound, count in summary.histogram:
        assert count == sum(bound // 2 < length <= bound for length in lengths)
        below += count
    assert below == len(lengths)
    for share, value in ((50, summary.median), (90, summary.p90), (99, summary.p99)):
        assert value in lengths
        assert sum(length <= value for length in lengths) >= share / 100 * len(lengths)
        assert sum(length < value for length in lengths) < share / 100 * len(lengths)
