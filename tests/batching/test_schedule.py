"""The effective batch as a function of consumed samples: its phases, the ramps, and how many steps it takes."""

from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from brim.batching import BatchSchedule, Phase
from brim.train.schedule import total_of_steps

doubling, equal_steps, linear = BatchSchedule.doubling, BatchSchedule.equal_steps, BatchSchedule.linear
schedule_of = BatchSchedule.of


def phases(schedule):
    return [(phase.first_sample, phase.size) for phase in schedule.phases]


def test_a_phase_holds_from_its_first_sample_on():
    schedule = schedule_of([(0, 1024), (250_000, 2048), (1_000_000, 512)])
    assert [schedule.size_at(consumed) for consumed in (249_999, 250_000, 10**13)] == [1024, 2048, 512]
    assert [schedule.index_at(consumed) for consumed in (0, 249_999, 250_000, 10**13)] == [0, 0, 1, 2]
    assert (schedule.final_size, schedule.is_constant) == (512, False)
    constant = BatchSchedule.constant(8)
    assert constant == BatchSchedule(phases=(Phase(first_sample=0, size=8),)) == schedule_of([(0, 8), (40, 8)])
    assert (constant.final_size, constant.is_constant) == (8, True)


@given(steps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=8), first=st.integers(1, 4))
def test_every_sample_has_the_size_of_the_last_step_at_or_before_it(steps, first):
    steps = [(0, first), *sorted(steps, key=lambda step: step[0])]
    schedule = schedule_of(steps)
    for consumed in range(35):
        assert schedule.size_at(consumed) == [size for begin, size in steps if begin <= consumed][-1]
    assert all(a.first_sample < b.first_sample and a.size != b.size for a, b in pairwise(schedule.phases))


# Ramps


def by(increment):
    return partial(linear, increment=increment)


@pytest.mark.parametrize(
    ("ramp", "initial", "final", "length", "expected"),
    [
        (doubling, 1024, 4096, 40_960, [(0, 1024), (20_480, 2048), (40_960, 4096)]),  # BERT-24's example
        (doubling, 1, 8, 100, [(0, 1), (34, 2), (67, 4), (100, 8)]),
        (doubling, 3, 24, 7, [(0, 3), (3, 6), (5, 12), (7, 24)]),
        (doubling, 7, 1, 90, [(0, 7), (30, 4), (60, 2), (90, 1)]),
        (doubling, 4, 16, 1, [(0, 4), (1, 16)]),
        (equal_steps, 64, 16, 96, [(0, 64), (64, 32), (96, 16)]),
        (equal_steps, 1, 8, 100, [(0, 1), (15, 2), (43, 4), (100, 8)]),
        (by(3), 8, 16, 90, [(0, 8), (30, 11), (60, 14), (90, 16)]),
        (by(4), 16, 9, 100, [(0, 16), (50, 12), (100, 9)]),
    ],
)
def test_ramps_by_hand(ramp, initial, final, length, expected):
    assert phases(ramp(initial=initial, final=final, length_samples=length)) == expected


@given(
    initial=st.integers(1, 40),
    increment=st.integers(1, 9),
    num_increments=st.integers(1, 12),
    length=st.integers(1, 400),
)
@example(initial=1, increment=1, num_increments=25, length=7)  # by floats, the final batch comes one sample late
def test_linear_is_megatrons_ramp_at_every_sample(initial, increment, num_increments, length):
    """Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator, with exact division; it divides in floating point."""
    final = initial + num_increments * increment

    def megatron(consumed):
        if consumed > length:
            return final
        return initial + int(consumed / Fraction(length, num_increments)) * increment

    schedule = linear(initial=initial, final=final, length_samples=length, increment=increment)
    assert [schedule.size_at(consumed) for consumed in range(length + 3)] == list(map(megatron, range(length + 3)))


@pytest.mark.parametrize("ramp", [doubling, equal_steps, linear])
@given(initial=st.integers(1, 300), final=st.integers(1, 300), length=st.integers(0, 3000))
def test_a_ramp_goes_one_way_and_the_final_batch_holds_exactly_from_its_end_on(ramp, initial, final, length):
    schedule = ramp(initial=initial, final=final, length_samples=length)
    if initial == final or length == 0:
        assert schedule == BatchSchedule.constant(final)
        return
    sizes = [phase.size for phase in schedule.phases]
    assert phases(schedule)[-1] == (length, final)
    assert all((a < b) is (final > initial) for a, b in pairwise(sizes))
    if length > abs(final - initial):  # otherwise stages begin together
        assert sizes[0] == initial


@given(initial=st.integers(1, 200), ratio=st.integers(2, 64), length=st.integers(1000, 100_000))
def test_doublings_shares_are_equal_but_for_a_sample(initial, ratio, length):
    schedule = doubling(initial=initial, final=initial * ratio, length_samples=length)
    shares = [b.first_sample - a.first_sample for a, b in pairwise(schedule.phases)]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == length


@given(initial=st.integers(1, 50), doublings=st.integers(1, 6), steps=st.integers(1, 20), upwards=st.booleans())
def test_equal_steps_has_as_many_steps_in_each_stage_where_they_fit(initial, doublings, steps, upwards):
    sizes = [initial * 2**power for power in range(doublings + 1)]
    sizes = sizes if upwards else sizes[::-1]
    firsts = [steps * sum(sizes[:number]) for number in range(len(sizes))]
    schedule = equal_steps(initial=sizes[0], final=sizes[-1], length_samples=firsts[-1])
    assert phases(schedule) == list(zip(firsts, sizes, strict=True))


# How many steps it takes: the closed forms against a walk step by step


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
    found = schedule.stretches(num_rows=num_rows, total_samples=total)
    assert [(s.size, s.first_sample, s.end_sample, s.num_steps, s.num_samples) for s in found] == expected
    assert schedule.num_steps(num_rows=num_rows, total_samples=total) == len(steps)


@given(schedule=schedules(), num_rows=st.integers(1, 50), steps=st.integers(0, 60))
def test_samples_of_steps_are_those_that_the_steps_take(schedule, num_rows, steps):
    consumed = 0
    for _ in range(steps):
        consumed += min(schedule.size_at(consumed), num_rows - consumed % num_rows)
    assert schedule.samples_of_steps(num_rows=num_rows, num_steps=steps) == consumed
    assert schedule.num_steps(num_rows=num_rows, total_samples=consumed) == steps
    assert schedule.num_steps(num_rows=num_rows, total_samples=consumed + 1) == steps + 1


RAMPS = {
    "doubling": lambda total: doubling(initial=2, final=16, length_samples=total // 2),
    "linear": lambda total: linear(initial=3, final=20, length_samples=total // 3, increment=4),
    "equal_steps": lambda total: equal_steps(initial=1, final=12, length_samples=total),
    "constant": lambda total: BatchSchedule.constant(7),
    "other shares": lambda total: schedule_of((-(-n * total // 5), size) for n, size in enumerate((4, 30, 1, 17, 9))),
}


@pytest.mark.parametrize("kind", RAMPS)
@given(num_rows=st.integers(1, 60), steps=st.integers(1, 40))
def test_the_total_of_some_steps_is_the_least_that_its_own_ramp_does_not_exceed(kind, num_rows, steps):
    def consumed(total):
        return RAMPS[kind](total).samples_of_steps(num_rows=num_rows, num_steps=steps)

    total = total_of_steps(RAMPS[kind], num_rows=num_rows, num_steps=steps)
    assert consumed(total) <= total
    if kind == "other shares":
        assert total == 1 or consumed(total - 1) >= total
    else:
        assert total == next(number for number in range(1, steps * num_rows + 1) if consumed(number) <= number)


def test_a_phase_of_1e12_samples_is_counted_as_fast_as_one_of_ten():
    schedule = doubling(initial=8, final=4096, length_samples=10**12)
    found = list(schedule.stretches(num_rows=10**9 + 7, total_samples=10**13))
    assert len(found) == 10
    assert found[-1].end_sample == 10**13
    steps = sum(stretch.num_steps for stretch in found)
    assert 0 <= schedule.samples_of_steps(num_rows=10**9 + 7, num_steps=steps) - 10**13 < 4096
    assert schedule.samples_of_steps(num_rows=10**9 + 7, num_steps=steps - 1) < 10**13
