"""The effective batch as a function of consumed samples."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.batching import BatchSchedule, Phase, constant, schedule_of


def phases(schedule):
    return [(phase.first_sample, phase.size) for phase in schedule.phases]


def test_a_phase_holds_from_its_first_sample_on():
    schedule = schedule_of([(0, 1024), (250_000, 2048), (1_000_000, 512)])
    assert [schedule.size_at(consumed) for consumed in (0, 249_999, 250_000, 999_999, 1_000_000, 10**13)] == [
        1024, 1024, 2048, 2048, 512, 512,
    ]  # fmt: skip
    assert [schedule.index_at(consumed) for consumed in (0, 249_999, 250_000, 10**13)] == [0, 0, 1, 2]
    assert (schedule.final_size, schedule.largest_size, schedule.is_constant) == (512, 2048, False)


def test_one_size_is_one_phase():
    assert constant(8) == BatchSchedule(phases=(Phase(first_sample=0, size=8),))
    assert schedule_of([(0, 8), (40, 8), (90, 8)]) == constant(8)
    assert constant(8).is_constant
    assert (constant(8).final_size, constant(8).largest_size) == (8, 8)


def test_of_steps_that_begin_together_the_last_counts():
    assert phases(schedule_of([(0, 4), (0, 8), (10, 16), (10, 32), (20, 32), (30, 4)])) == [(0, 8), (10, 32), (30, 4)]
    assert phases(schedule_of([(0, 4), (10, 8), (10, 4)])) == [(0, 4)]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([], "a schedule has a phase"),
        ([(1, 8)], "a schedule begins with the run"),
        ([(0, 8), (20, 4), (10, 2)], "phases in order"),
        ([(0, 8), (20, 0)], "a batch holds at least one row"),
    ],
)
def test_what_is_no_schedule_is_our_own_mistake(steps, why):
    with pytest.raises(AssertionError, match=why):
        schedule_of(steps)


@given(steps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=8), first=st.integers(1, 4))
def test_every_sample_has_the_size_of_the_last_step_at_or_before_it(steps, first):
    steps = [(0, first), *sorted(steps, key=lambda step: step[0])]
    schedule = schedule_of(steps)
    for consumed in range(35):
        assert schedule.size_at(consumed) == [size for begin, size in steps if begin <= consumed][-1]
    assert all(a.first_sample < b.first_sample and a.size != b.size for a, b in pairwise(schedule.phases))
    assert schedule.largest_size == max(phase.size for phase in schedule.phases)
