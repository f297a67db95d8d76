"""Random groups of rows: neighbours in the batch's own order, under the same caps as any micro-batch."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import costs, jagged_surfaces, linear_costs, rising_surfaces
from tests.properties import examples

from brim.batching import ByLength, ByRows
from brim.batching.microbatch import groups_in_order


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [
        (0, []),
        (1, [1]),
        (5, [1] * 5),
        (8, [1] * 8),
        (9, [2] + [1] * 7),
        (20, [3, 3, 3, 3, 2, 2, 2, 2]),
        (64, [8] * 8),
    ],
)
def test_groups_are_of_equal_size(num_rows, sizes):
    groups = groups_in_order(num_rows, num_groups=8, longest=lambda start, most: most)
    assert [stop - start for start, stop in groups] == sizes


def test_where_a_group_does_not_fit_there_are_more():
    groups = groups_in_order(30, num_groups=4, longest=lambda start, most: min(most, 3 if start < 10 else 6))
    assert [stop - start for start, stop in groups] == [3, 3, 3, 3, 6, 6, 6]


@given(
    lengths=st.lists(st.integers(1, 120), max_size=40),
    max_rows=st.integers(1, 20),
    num_groups=st.integers(1, 12),
)
def test_by_rows_every_row_once_in_order_and_no_group_over_the_limit(lengths, max_rows, num_groups):
    cuts = ByRows(max_rows=max_rows).cut_in_order(lengths, num_groups=num_groups)
    assert [row for part in cuts for row in part.rows] == list(range(len(lengths)))
    assert all(1 <= part.num_rows <= max_rows for part in cuts)
    assert [part.padded_length for part in cuts] == [max(lengths[row] for row in part.rows) for part in cuts]
    if len(lengths) <= num_groups * max_rows:
        assert len(cuts) == min(num_groups, len(lengths))


@examples(50)
@given(
    costs=costs(peak=st.one_of(rising_surfaces(), jagged_surfaces())),
    cap_bytes=st.integers(0, 4000),
    most_rows=st.one_of(st.none(), st.integers(1, 8)),
    lengths=st.lists(st.integers(1, 120), max_size=40),
    num_groups=st.integers(1, 12),
)
def test_by_length_no_group_is_over_the_cap_and_each_is_as_large_as_wished_or_as_fits(
    costs, cap_bytes, most_rows, lengths, num_groups
):
    cuts = ByLength(costs=costs, cap_bytes=cap_bytes, most_rows=most_rows).cut_in_order(lengths, num_groups=num_groups)
    assert [row for part in cuts for row in part.rows] == list(range(len(lengths)))
    for number, part in enumerate(cuts):
        first, after = part.rows[0], part.rows[-1] + 1
        assert part.padded_length == max(lengths[first:after])
        assert part.peak_bytes == np.ceil(costs.peak_bytes(part.num_rows, part.padded_length))
        assert part.seconds == costs.seconds(part.num_rows, part.padded_length)
        assert part.num_rows == 1 or (part.peak_bytes <= cap_bytes and part.num_rows <= (most_rows or 40))
        wished = int(np.ceil((len(lengths) - first) / max(1, num_groups - number)))
        if part.num_rows < min(wished, most_rows or 40):
            with_one_more = costs.peak_bytes(part.num_rows + 1, max(lengths[first : after + 1]))
            assert max(with_one_more, part.peak_bytes) > cap_bytes  # a row may be over the cap alone


def test_a_lowered_cap_makes_more_groups():
    by_length = ByLength(costs=linear_costs(), cap_bytes=1000 + 10 * 400)
    assert [part.num_rows for part in by_length.cut_in_order([100] * 16, num_groups=4)] == [4, 4, 4, 4]
    by_length.lower(by_length.cut_in_order([100] * 16, num_groups=4)[0])
    assert [part.num_rows for part in by_length.cut_in_order([100] * 16, num_groups=4)] == [2] * 8
