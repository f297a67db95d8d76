"""Ramps from a first effective batch to the final one."""

from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.batching import constant, doubling, equal_steps, linear


def phases(schedule):
    return [(phase.first_sample, phase.size) for phase in schedule.phases]


def test_bert24s_example_has_two_stages_of_equal_shares_before_the_final_batch():
    schedule = doubling(initial=1024, final=4096, length_samples=10 * 4096)
    assert phases(schedule) == [(0, 1024), (20_480, 2048), (40_960, 4096)]


@pytest.mark.parametrize(
    ("initial", "final", "length", "expected"),
    [
        (6, 20, 100, [(0, 6), (50, 12), (100, 20)]),
        (5, 7, 100, [(0, 5), (100, 7)]),
        (1, 8, 100, [(0, 1), (34, 2), (67, 4), (100, 8)]),
        (3, 24, 7, [(0, 3), (3, 6), (5, 12), (7, 24)]),
        (20, 6, 100, [(0, 20), (50, 10), (100, 6)]),
        (64, 16, 100, [(0, 64), (50, 32), (100, 16)]),
        (7, 1, 90, [(0, 7), (30, 4), (60, 2), (90, 1)]),
        (4, 16, 0, [(0, 16)]),
        (4, 16, 1, [(0, 4), (1, 16)]),
        (16, 16, 50, [(0, 16)]),
    ],
)
def test_doubling(initial, final, length, expected):
    assert phases(doubling(initial=initial, final=final, length_samples=length)) == expected


@pytest.mark.parametrize(
    ("initial", "final", "length", "expected"),
    [
        (1024, 4096, 30_720, [(0, 1024), (10_240, 2048), (30_720, 4096)]),
        (6, 20, 90, [(0, 6), (30, 12), (90, 20)]),
        (64, 16, 96, [(0, 64), (64, 32), (96, 16)]),
        (1, 8, 100, [(0, 1), (15, 2), (43, 4), (100, 8)]),
        (4, 16, 0, [(0, 16)]),
    ],
)
def test_equal_steps(initial, final, length, expected):
    assert phases(equal_steps(initial=initial, final=final, length_samples=length)) == expected


@pytest.mark.parametrize(
    ("initial", "final", "increment", "length", "expected"),
    [
        (8, 16, 4, 100, [(0, 8), (50, 12), (100, 16)]),
        (8, 16, 3, 90, [(0, 8), (30, 11), (60, 14), (90, 16)]),
        (8, 16, 100, 90, [(0, 8), (90, 16)]),
        (16, 8, 4, 100, [(0, 16), (50, 12), (100, 8)]),
        (16, 9, 4, 100, [(0, 16), (50, 12), (100, 9)]),
        (1, 4, 1, 2, [(0, 1), (1, 2), (2, 4)]),
        (4, 16, 4, 0, [(0, 16)]),
        (16, 16, 4, 50, [(0, 16)]),
    ],
)
def test_linear(initial, final, increment, length, expected):
    assert phases(linear(initial=initial, final=final, length_samples=length, increment=increment)) == expected


@given(
    initial=st.integers(1, 40),
    increment=st.integers(1, 9),
    num_increments=st.integers(1, 12),
    length=st.integers(1, 400),
)
def test_linear_is_megatrons_ramp_at_every_sample(initial, increment, num_increments, length):
    """Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator, with exact division.

    It divides in floating point, see below.
    """
    final = initial + num_increments * increment

    def megatron(consumed):
        if consumed > length:
            return final
        return initial + int(consumed / Fraction(length, num_increments)) * increment

    schedule = linear(initial=initial, final=final, length_samples=length, increment=increment)
    assert [schedule.size_at(consumed) for consumed in range(length + 3)] == list(map(megatron, range(length + 3)))


def test_at_the_ramps_very_end_the_batch_is_final_where_megatrons_division_may_fall_short():
    schedule = linear(initial=1, final=26, length_samples=7)
    assert int(7 / (7 / 25)) == 24  # of 25 increments: by floats, the final batch comes one sample late
    assert [schedule.size_at(consumed) for consumed in (6, 7, 8)] == [22, 26, 26]


RAMPS = [doubling, equal_steps, linear]


@pytest.mark.parametrize("ramp", RAMPS)
@given(initial=st.integers(1, 300), final=st.integers(1, 300), length=st.integers(0, 3000))
def test_a_ramp_goes_one_way_and_the_final_batch_holds_exactly_from_its_end_on(ramp, initial, final, length):
    schedule = ramp(initial=initial, final=final, length_samples=length)
    sizes = [phase.size for phase in schedule.phases]
    assert schedule.final_size == final
    if initial == final or length == 0:
        assert schedule == constant(final)
        return
    assert schedule.phases[-1].first_sample == length
    upwards = final > initial
    assert all((a < b) is upwards for a, b in pairwise(sizes))
    if length > len(range(min(initial, final), max(initial, final))):  # otherwise stages begin together
        assert sizes[0] == initial


@given(initial=st.integers(1, 200), ratio=st.integers(2, 64), length=st.integers(1000, 100_000))
def test_doublings_shares_are_equal_but_for_a_sample(initial, ratio, length):
    starts = [
        phase.first_sample for phase in doubling(initial=initial, final=initial * ratio, length_samples=length).phases
    ]
    shares = [b - a for a, b in pairwise(starts)]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == length


@given(initial=st.integers(1, 50), doublings=st.integers(1, 6), steps=st.integers(1, 20), upwards=st.booleans())
def test_equal_steps_has_as_many_steps_in_each_stage_where_they_fit(initial, doublings, steps, upwards):
    sizes = [initial * 2**power for power in range(doublings + 1)]
    sizes = sizes if upwards else sizes[::-1]
    length = steps * sum(sizes[:-1])
    schedule = equal_steps(initial=sizes[0], final=sizes[-1], length_samples=length)
    assert [phase.size for phase in schedule.phases] == sizes
    samples = [b.first_sample - a.first_sample for a, b in pairwise(schedule.phases)]
    assert samples == [steps * size for size in sizes[:-1]]
