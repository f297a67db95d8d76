"""Packed micro-batches: the fewest under the cap, as even as can be, and what they are predicted to cost."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import costs, jagged_surfaces, linear_costs, rising_surfaces

from brim.batching import MULTIPLE, cut_totals, cutter_of
from brim.batching.bins import fewest_bins
from brim.batching.microbatch import Packed
from brim.batching.partition import RowTooLongError

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=40)


def packed_costs(**settings):
    return replace(linear_costs(**settings), multiple=MULTIPLE)


def room_for(some, lengths, share):
    """A cap between the longest row alone and all rows together."""
    alone, whole = (
        float(some.peak_bytes(tokens / max(lengths), max(lengths))) for tokens in (max(lengths), sum(lengths))
    )
    return int(np.ceil(alone + share * (whole - alone)))


@given(lengths=LENGTHS, some=costs(peak=rising_surfaces()), share=st.floats(0, 1))
def test_every_row_goes_once_in_order_and_no_micro_batch_is_over_the_cap(lengths, some, share):
    some = replace(some, multiple=MULTIPLE)
    cap_bytes = room_for(some, lengths, share)
    cuts = Packed(costs=some, cap_bytes=cap_bytes).cut(lengths)
    assert sorted(row for part in cuts for row in part.rows.tolist()) == list(range(len(lengths)))
    assert max(lengths) == cuts[0].padded_length
    for part in cuts:
        taken = [lengths[row] for row in part.rows]
        assert part.rows.tolist() == sorted(part.rows.tolist())
        tokens = -(-sum(taken) // MULTIPLE) * MULTIPLE
        bare = replace(some, multiple=1)
        assert part.peak_bytes == int(np.ceil(bare.peak_bytes(tokens / max(taken), max(taken)))) <= cap_bytes
        mean = sum(length**2 for length in taken) / sum(taken)
        assert part.seconds == pytest.approx(float(bare.seconds(tokens / mean, mean)))


def test_more_tokens_than_are_worth_it_go_together_only_in_one_row():
    some = replace(packed_costs(), most_tokens=100)
    lengths = [50, 130, 40, 20, 60, 30]
    cuts = Packed(costs=some, cap_bytes=10**9).cut(lengths)
    assert sorted(sum(lengths[row] for row in part.rows) for part in cuts) == [100, 100, 130]
    totals = cut_totals(lengths, len(lengths), costs=some, cap_bytes=10**9)
    assert (totals.num_micro_batches, totals.real_tokens) == (3, 330)


@given(lengths=LENGTHS, some=costs(peak=jagged_surfaces()), cap_bytes=st.integers(0, 2000))
def test_rows_that_are_over_the_cap_alone_need_not_be_the_longest(lengths, some, cap_bytes):
    some = replace(some, multiple=MULTIPLE)
    cuts = Packed(costs=some, cap_bytes=cap_bytes).cut(lengths)
    assert sorted(row for part in cuts for row in part.rows.tolist()) == list(range(len(lengths)))
    assert max(lengths) == cuts[0].padded_length
    assert all(part.num_rows == 1 or part.peak_bytes <= cap_bytes for part in cuts)
    totals = cut_totals(lengths, len(lengths), costs=some, cap_bytes=cap_bytes, lone_rows_may_exceed=True)
    assert totals.num_micro_batches == len(cuts)


@given(lengths=LENGTHS, capacity=st.integers(120, 400), ranks=st.integers(1, 6))
def test_the_fewest_bins_that_fill_the_last_round_of_ranks(lengths, capacity, ranks):
    lengths = sorted(lengths, reverse=True)
    capacities = [capacity] * len(lengths)
    found = fewest_bins(lengths, capacities, ranks=ranks)
    assert sorted(row for each in found for row in each) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in each) <= capacity for each in found)
    fewest = len(fewest_bins(lengths, capacities))
    assert len(found) == min(-(-fewest // ranks) * ranks, len(lengths))


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7), capacity=st.integers(20, 60))
def test_no_fewer_bins_would_do(lengths, capacity):
    lengths = sorted(lengths, reverse=True)
    found = fewest_bins(lengths, [capacity] * len(lengths))
    fewest = next(
        number
        for number in range(1, len(lengths) + 1)
        if any(
            all(
                sum(length for length, bin in zip(lengths, way, strict=True) if bin == at) <= capacity
                for at in range(number)
            )
            for way in product(range(number), repeat=len(lengths))
        )
    )
    assert len(found) == fewest


def test_by_hand():
    # 384 tokens in two of 192 instead of one full one and a small one: the peak is the lowest that two can have.
    cutter = Packed(costs=packed_costs(), cap_bytes=1000 + 10 * 256)
    cuts = cutter.cut([64, 128, 64, 128])
    assert [part.rows.tolist() for part in cuts] == [[0, 1], [2, 3]] or [part.num_rows for part in cuts] == [2, 2]
    assert [part.peak_bytes for part in cuts] == [1000 + 10 * 192] * 2
    # The longest first does not find three bins of 10; a search does.
    assert len(fewest_bins([6, 5, 5, 4, 4, 3, 3], [10] * 7)) == 3
    assert Packed(costs=packed_costs(), cap_bytes=1).cut([]) == []


def test_rows_over_the_cap_go_alone_and_a_failure_lowers_it():
    cutter = Packed(costs=packed_costs(), cap_bytes=1000 + 10 * 128)
    assert [part.rows.tolist() for part in cutter.cut([20, 300, 30])] == [[1], [0, 2]]
    (failed,) = cutter.cut([20, 40, 60])
    change = cutter.lower(failed)
    assert (change.before, change.after) == (2280, 1000 + int(0.7 * 1280))
    assert [part.num_rows for part in cutter.cut([20, 40, 60])] == [1, 2]
    again = cutter_of(cutter.state())
    assert type(again) is Packed
    assert again.state() == cutter.state()


def test_groups_in_order_are_within_the_cap():
    cutter = Packed(costs=packed_costs(), cap_bytes=1000 + 10 * 128)
    groups = cutter.cut_in_order([60, 60, 60, 10, 10, 10, 100], num_groups=2)
    assert [part.rows.tolist() for part in groups] == [[0, 1], [2, 3, 4, 5], [6]]


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), share=st.floats(0, 1))
def test_totals_are_those_of_cutting_batch_by_batch(lengths, batch_size, share):
    some = packed_costs(seconds_per_token=0.5)
    cap_bytes = room_for(some, lengths, share)
    cutter = Packed(costs=some, cap_bytes=cap_bytes)
    steps = [cutter.cut(lengths[start : start + batch_size]) for start in range(0, len(lengths), batch_size)]
    found = cut_totals(lengths, batch_size, costs=some, cap_bytes=cap_bytes)
    parts = [part for step in steps for part in step]
    assert (found.num_steps, found.num_micro_batches) == (len(steps), len(parts))
    assert found.seconds == pytest.approx(sum(part.seconds for part in parts))
    widest = max(parts, key=lambda part: part.peak_bytes)
    assert found.widest.peak_bytes == widest.peak_bytes <= cap_bytes
    assert found.widest.padded_length <= max(lengths)
    assert found.real_tokens == sum(lengths)
    assert found.padded_tokens % MULTIPLE == 0


def test_totals_name_a_row_that_does_not_fit():
    with pytest.raises(RowTooLongError, match="row 1 of 300 tokens"):
        cut_totals([20, 300], 2, costs=packed_costs(), cap_bytes=1000 + 10 * 128)
