"""How many steps a schedule takes: the closed forms against a walk step by step."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.batching import (
    constant,
    doubling,
    equal_steps,
    linear,
    num_steps,
    samples_of_steps,
    schedule_of,
    stretches,
    total_of_steps,
)


def walked(schedule, *, num_rows, total_samples):
    """(phase, consumed before, rows) of each step."""
    steps, consumed = [], 0
    while consumed < total_samples:
        index = schedule.index_at(consumed)
        rows = min(schedule.phases[index].size, num_rows - consumed % num_rows, total_samples - consumed)
        steps.append((index, consumed, rows))
        consumed += rows
    return steps


@st.composite
def schedules(draw, most_samples=120, most_rows=40):
    """Phases up and down, some of which lie within one step of the one before."""
    gaps = draw(st.lists(st.integers(1, most_samples // 4), max_size=5))
    steps, first = [(0, draw(st.integers(1, most_rows)))], 0
    for gap in gaps:
        first += gap
        steps.append((first, draw(st.integers(1, most_rows))))
    return schedule_of(steps)


@given(schedule=schedules(), num_rows=st.integers(1, 50), total=st.integers(0, 200))
def test_stretches_are_what_the_steps_make_of_each_phase(schedule, num_rows, total):
    steps = walked(schedule, num_rows=num_rows, total_samples=total)
    expected = []
    for index in sorted({index for index, _, _ in steps}):
        own = [(consumed, rows) for at, consumed, rows in steps if at == index]
        expected.append((schedule.phases[index].size, own[0][0], sum(own[-1]), len(own), sum(rows for _, rows in own)))
    found = stretches(schedule, num_rows=num_rows, total_samples=total)
    assert [(s.size, s.first_sample, s.end_sample, s.num_steps, s.num_samples) for s in found] == expected
    assert num_steps(schedule, num_rows=num_rows, total_samples=total) == len(steps)


@given(schedule=schedules(), num_rows=st.integers(1, 50), steps=st.integers(0, 60))
def test_samples_of_steps_are_those_that_the_steps_take(schedule, num_rows, steps):
    consumed = 0
    for _ in range(steps):
        consumed += min(schedule.size_at(consumed), num_rows - consumed % num_rows)
    assert samples_of_steps(schedule, num_rows=num_rows, num_steps=steps) == consumed


@given(schedule=schedules(), num_rows=st.integers(1, 50), steps=st.integers(1, 60))
def test_a_run_of_the_samples_of_some_steps_has_these_steps(schedule, num_rows, steps):
    samples = samples_of_steps(schedule, num_rows=num_rows, num_steps=steps)
    assert num_steps(schedule, num_rows=num_rows, total_samples=samples) == steps
    assert num_steps(schedule, num_rows=num_rows, total_samples=samples + 1) == steps + 1


def test_by_hand():
    schedule = schedule_of([(0, 4), (10, 8), (11, 2), (30, 8)])
    # Epochs of 14 rows: 4 4 4 | then 2 (the phase of 8 lies within the third step) | 2 × 7 | 2 left of 30 | 8 4
    found = [
        (s.size, s.first_sample, s.end_sample, s.num_steps) for s in stretches(schedule, num_rows=14, total_samples=40)
    ]
    assert found == [(4, 0, 12, 3), (2, 12, 30, 9), (8, 30, 40, 2)]


def test_the_runs_end_cuts_the_last_step():
    assert [(s.end_sample, s.num_steps) for s in stretches(constant(8), num_rows=100, total_samples=20)] == [(20, 3)]


RAMPS = {
    "doubling": lambda total: doubling(initial=2, final=16, length_samples=total // 2),
    "linear": lambda total: linear(initial=3, final=20, length_samples=total // 3, increment=4),
    "equal_steps": lambda total: equal_steps(initial=1, final=12, length_samples=total),
    "constant": lambda total: constant(7),
}


@pytest.mark.parametrize("kind", RAMPS)
@given(num_rows=st.integers(1, 60), steps=st.integers(1, 40))
def test_the_total_of_some_steps_is_the_least_that_its_own_ramp_does_not_exceed(kind, num_rows, steps):
    def consumed(total):
        return samples_of_steps(RAMPS[kind](total), num_rows=num_rows, num_steps=steps)

    total = total_of_steps(RAMPS[kind], num_rows=num_rows, num_steps=steps)
    assert total == next(candidate for candidate in range(1, steps * num_rows + 1) if consumed(candidate) <= candidate)


@given(
    num_rows=st.integers(1, 60), steps=st.integers(1, 40), sizes=st.lists(st.integers(1, 30), min_size=2, max_size=5)
)
def test_one_sample_fewer_than_the_total_of_some_steps_would_be_exceeded(num_rows, steps, sizes):
    def schedule_for(total):
        return schedule_of((-(-number * total // len(sizes)), size) for number, size in enumerate(sizes))

    def consumed(total):
        return samples_of_steps(schedule_for(total), num_rows=num_rows, num_steps=steps)

    total = total_of_steps(schedule_for, num_rows=num_rows, num_steps=steps)
    assert consumed(total) <= total
    assert total == 1 or consumed(total - 1) >= total


def test_a_phase_of_1e12_samples_is_counted_as_fast_as_one_of_ten():
    schedule = doubling(initial=8, final=4096, length_samples=10**12)
    found = list(stretches(schedule, num_rows=10**9 + 7, total_samples=10**13))
    assert len(found) == 10
    assert found[-1].end_sample == 10**13
    steps = sum(stretch.num_steps for stretch in found)
    assert 0 <= samples_of_steps(schedule, num_rows=10**9 + 7, num_steps=steps) - 10**13 < 4096
    assert samples_of_steps(schedule, num_rows=10**9 + 7, num_steps=steps - 1) < 10**13
