"""How long a run is."""

import json
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.batching import Adaptation, constant, doubling, linear, schedule_of
from brim.train import RunLength, run_length


def checkpoints(length):
    """Each step, what it has consumed in the end, and whether a checkpoint follows."""
    step, consumed = 0, 0
    while consumed < length.total_samples:
        left = length.num_rows - consumed % length.num_rows
        before = consumed
        consumed += min(length.schedule.size_at(before), left, length.total_samples - before)
        step += 1
        yield step, consumed, length.is_checkpoint(step, samples_before=before, samples_after=consumed)


def steps_with_checkpoint(length):
    return [step for step, _, is_checkpoint in checkpoints(length) if is_checkpoint]


def test_an_epoch_ends_with_the_rows_that_are_left():
    length = run_length(num_rows=100, effective_batch_size=32, epochs=2)
    assert (length.total_steps, length.total_samples) == (8, 200)


def test_train_steps_win_over_epochs():
    length = run_length(num_rows=100, effective_batch_size=32, epochs=2, train_steps=5)
    assert (length.total_steps, length.total_samples) == (5, 100 + 32)


def test_a_ramp_has_more_steps_for_the_same_samples():
    schedule = doubling(initial=8, final=32, length_samples=100)
    length = RunLength(num_rows=100, schedule=schedule, total_samples=200)
    # 50 samples in steps of 8, which end at 56; 44 in steps of 16; the second epoch in steps of 32.
    assert length.total_steps == 7 + 3 + 4
    assert length.batch_moves
    assert (length.sizes, length.largest_size) == ((8, 16, 32), 32)


def test_what_follows_measurements_has_no_number_of_steps_beforehand():
    adaptation = Adaptation(size=6, smallest=6, largest=40)
    length = RunLength(num_rows=100, schedule=constant(6), total_samples=200, adaptation=adaptation)
    assert length.total_steps is None
    assert length.batch_moves
    assert length.sizes == (6, 12, 24, 40)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [4, 8]),
        ({"steps_per_checkpoint": 3}, [3, 6, 8]),
        ({"checkpoints_per_epoch": 2}, [2, 4, 6, 8]),
        ({"checkpoints_per_epoch": 3}, [2, 3, 4, 6, 7, 8]),
        ({"checkpoints_per_epoch": 4}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"checkpoints_per_epoch": 9}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_checkpoints_come_where_they_were_asked_for_and_at_the_end(keys, expected):
    assert steps_with_checkpoint(run_length(num_rows=100, effective_batch_size=32, epochs=2, **keys)) == expected


@given(num_rows=st.integers(1, 500), size=st.integers(1, 600), steps=st.integers(1, 50))
def test_total_samples_are_those_that_the_steps_take(num_rows, size, steps):
    length = run_length(num_rows=num_rows, effective_batch_size=size, epochs=1, train_steps=steps)
    consumed = 0
    for _ in range(steps):
        consumed += min(size, num_rows - consumed % num_rows)
    assert (length.total_samples, length.total_steps) == (consumed, steps)


@given(num_rows=st.integers(1, 300), size=st.integers(1, 50), number=st.integers(1, 40))
def test_each_epoch_has_its_number_of_checkpoints_evenly_spread_and_one_at_its_end(num_rows, size, number):
    length = run_length(num_rows=num_rows, effective_batch_size=size, epochs=3, checkpoints_per_epoch=number)
    steps = -(-num_rows // size)
    at = steps_with_checkpoint(length)
    assert len(at) == 3 * min(number, steps)
    assert {steps, 2 * steps, 3 * steps} <= set(at)
    gaps = {after - before for before, after in zip([0, *at], at, strict=False)}
    assert max(gaps) - min(gaps) <= 1


@given(
    num_rows=st.integers(1, 80),
    sizes=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    gap=st.integers(1, 60),
    number=st.integers(1, 10),
    epochs=st.integers(1, 3),
)
def test_where_the_batch_moves_they_come_with_the_first_step_that_reaches_their_share(
    num_rows, sizes, gap, number, epochs
):
    length = RunLength(
        num_rows=num_rows,
        schedule=schedule_of((position * gap, size) for position, size in enumerate(sizes)),
        total_samples=epochs * num_rows,
        checkpoints_per_epoch=number,
    )
    due = [Fraction(mark * num_rows, number) for mark in range(1, number * epochs + 1)]
    found = list(checkpoints(length))
    expected = {next(step for step, consumed, _ in found if consumed >= mark) for mark in due}
    assert {step for step, _, is_checkpoint in found if is_checkpoint} == expected
    assert length.total_steps == len(found)


def test_a_run_that_ends_within_an_epoch_ends_with_a_checkpoint():
    length = run_length(num_rows=100, effective_batch_size=10, epochs=9, train_steps=13, checkpoints_per_epoch=2)
    assert steps_with_checkpoint(length) == [5, 10, 13]


def test_a_checkpoint_keeps_the_course_that_a_run_began_with():
    schedule = linear(initial=2, final=9, length_samples=61, increment=3)
    begun = RunLength(num_rows=28, schedule=schedule, total_samples=84, steps_per_checkpoint=3)
    saved = json.loads(json.dumps(begun.course()))
    other = RunLength(num_rows=28, schedule=constant(5), total_samples=1, steps_per_checkpoint=3)
    assert other.with_course(saved) == begun


@given(
    num_rows=st.integers(1, 40),
    total_samples=st.integers(1, 200),
    first=st.integers(1, 12),
    final=st.integers(1, 12),
    ramp_samples=st.integers(0, 90),
    until=st.integers(0, 220),
)
def test_the_steps_so_far_are_those_that_the_loop_takes(num_rows, total_samples, first, final, ramp_samples, until):
    schedule = linear(initial=first, final=final, length_samples=ramp_samples)
    length = RunLength(num_rows=num_rows, schedule=schedule, total_samples=total_samples)
    ends = [consumed for _, consumed, _ in checkpoints(length)]
    steps = list(length.steps_until(until))
    assert [before + rows for before, rows, _ in steps] == [
        end for begin, end in zip([0, *ends], ends, strict=False) if begin < until
    ]
    assert all(size == schedule.size_at(before) >= rows for before, rows, size in steps)
    assert len(list(length.steps_until(total_samples))) == length.total_steps
