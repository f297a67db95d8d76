"""How long a run is, in what phases its batch moves, and which batch a step takes: from the trainer's keys to the loop."""

import json
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.train.scarce import rows_of, run_length

from brim.batching import BatchSchedule, NoiseMeasurement
from brim.config import load_config
from brim.data.tokens import rows_of_step
from brim.train import RunLength
from brim.train.schedule import BatchCourse, RunClock
from brim.units import parse_duration

# How long a run is


def checkpoints(length):
    """Each step, what it has consumed in the end, and whether a checkpoint follows."""
    step, consumed = 0, 0
    while consumed < length.total_samples:
        left = length.num_rows - consumed % length.num_rows
        before = consumed
        consumed += min(length.schedule.size_at(before), left, length.total_samples - before)
        step += 1
        yield step, consumed, length.is_checkpoint(step, samples_before=before, samples_after=consumed)


def test_checkpoints_come_where_they_were_asked_for_and_at_the_end():
    for keys, expected in [
        ({}, [4, 8]),
        ({"steps_per_checkpoint": 3}, [3, 6, 8]),
        ({"checkpoints_per_epoch": 2, "total_samples": 130}, [2, 4, 5]),  # within an epoch
    ]:
        length = run_length(num_rows=100, size=32, epochs=2, **keys)
        assert [step for step, _, is_checkpoint in checkpoints(length) if is_checkpoint] == expected


@given(
    num_rows=st.integers(1, 80),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    gap=st.integers(1, 60),
    number=st.integers(1, 40),
    epochs=st.integers(1, 3),
)
def test_they_come_with_the_first_step_that_reaches_their_share_of_an_epoch(num_rows, sizes, gap, number, epochs):
    length = RunLength(
        num_rows=num_rows,
        schedule=BatchSchedule.of((position * gap, size) for position, size in enumerate(sizes)),
        total_samples=epochs * num_rows,
        checkpoints_per_epoch=number,
    )
    due = [Fraction(mark * num_rows, number) for mark in range(1, number * epochs + 1)]
    found = list(checkpoints(length))
    expected = {next(step for step, consumed, _ in found if consumed >= mark) for mark in due}
    assert {step for step, _, is_checkpoint in found if is_checkpoint} == expected
    assert length.total_steps == len(found)


def test_a_checkpoint_keeps_the_course_that_a_run_began_with():
    schedule = BatchSchedule.linear(initial=2, final=9, length_samples=61, increment=3)
    begun = RunLength(num_rows=28, schedule=schedule, total_samples=84, steps_per_checkpoint=3)
    saved = json.loads(json.dumps(begun.course()))
    other = RunLength(num_rows=28, schedule=BatchSchedule.constant(5), total_samples=1, steps_per_checkpoint=3)
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
    schedule = BatchSchedule.linear(initial=first, final=final, length_samples=ramp_samples)
    length = RunLength(num_rows=num_rows, schedule=schedule, total_samples=total_samples)
    ends = [consumed for _, consumed, _ in checkpoints(length)]
    steps = list(length.steps_until(until))
    assert [before + rows for before, rows, _ in steps] == [
        end for begin, end in zip([0, *ends], ends, strict=False) if begin < until
    ]
    assert all(size == schedule.size_at(before) >= rows for before, rows, size in steps)
    assert len(list(length.steps_until(total_samples))) == length.total_steps


# Durations in samples


def clock(lengths=(3, 5, 2, 7), seed=1):
    return RunClock(lengths=np.array(lengths), seed=seed, total_samples=1600, final_size=16)


def test_every_unit_comes_to_samples():
    units = {"5sp": 5, "10ba": 160, "2ep": 8, "0.3ep": 2, "0.1dur": 160, "0.33333dur": 534, "0tok": 0}
    whole_epochs = {"17tok": 4, "17000000tok": 4_000_000}
    for text, samples in {**units, **whole_epochs}.items():
        assert clock().samples(parse_duration(text)) == samples, text


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seed=st.integers(0, 5),
    num_tokens=st.integers(1, 300),
)
def test_tokens_are_counted_in_the_order_in_which_rows_are_taken(lengths, seed, num_tokens):
    samples = tokens = 0
    while tokens < num_tokens:
        _, (row,) = rows_of_step(num_rows=len(lengths), seed=seed, consumed_samples=samples, size=1)
        samples, tokens = samples + 1, tokens + lengths[row]
    assert clock(lengths, seed).samples(parse_duration(f"{num_tokens}tok")) == samples


# From the trainer's keys to the length of a run and the phases of its batch


ROWS = rows_of([4] * 1600)


def length_for(rows=ROWS, *, bound=None, course=None, **trainer):
    source = {
        "base_model": "somewhere",
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune", "epochs": 1, "effective_batch_size": 16, **trainer},
    }
    return RunLength.of(load_config(source).config.trainer, rows, seed=3, bound=bound, course=course)


def phases(found: RunLength):
    return [(phase.first_sample, phase.size) for phase in found.schedule.phases]


def test_from_keys_to_phases():
    still = length_for(epochs=3)
    assert (phases(still), still.total_samples, still.total_steps, still.batch_moves) == ([(0, 16)], 4800, 300, False)
    # A table of one size is no schedule, so that it cannot take longer: the loop is given the same.
    assert length_for(batch_schedule="0sp:16", epochs=3) == still
    # A ramp begins with a quarter of the final batch; batches of a ramp are of the final size.
    assert phases(length_for(batch_rampup="0.1dur")) == [(0, 4), (80, 8), (160, 16)]
    ramp = {"length": "10ba", "from": 8, "shape": "linear", "increment": 8}
    found = length_for(batch_rampup=ramp)
    assert (phases(found), found.sizes, found.batch_moves) == ([(0, 8), (160, 16)], (8, 16), True)
    for keys, samples, steps in [
        ({}, 1600, 20 + 90),
        ({"train_steps": 100}, 20 * 8 + 80 * 16, 100),
        ({"train_samples": 1000}, 1000, 20 + 53),
    ]:
        found = length_for(batch_rampup=ramp, **keys)
        assert (found.total_samples, found.total_steps) == (samples, steps)
    found = length_for(batch_rampup={"length": "0.5dur", "from": 2}, train_steps=120)
    assert found.total_steps == 120  # and a share of a run in steps is one of its samples
    assert abs(found.schedule.phases[-1].first_sample - found.total_samples / 2) < 16
    found = length_for(batch_schedule="0sp:8 400sp:32 800sp:16")
    assert phases(found) == [(0, 8), (400, 32), (800, 16)]
    assert (found.schedule.final_size, found.largest_size) == (16, 32)
    found = length_for(effective_batch_size=8, batch_adaptation={"type": "noise_scale", "min": 4, "max": 20})
    assert (found.total_steps, found.sizes, found.batch_moves) == (None, (4, 8, 16, 20), True)


def test_a_table_of_tokens_switches_at_the_row_that_reaches_them():
    rows = rows_of([3, 9, 5, 7, 2, 4])
    (_, _), (start, size) = phases(length_for(rows, batch_schedule="0tok:1 13tok:2", effective_batch_size=2))
    assert size == 2
    order = rows.lengths[rows_of_step(num_rows=6, seed=3, consumed_samples=0, size=6)[1]]
    assert order[:start].sum() >= 13 > order[: start - 1].sum()


def test_a_function_gives_the_phases_and_is_not_asked_where_its_course_was_saved():
    found = length_for(epochs=4, batch_increase_function=lambda epoch, size: 8 if epoch in [0, 2] else 0)
    assert (phases(found), found.notes) == ([(0, 24), (3200, 32)], ())
    assert found.increases == {(0, 16): 8, (1, 24): 0, (2, 24): 8, (3, 32): 0}
    again = length_for(epochs=4, batch_increase_function=lambda epoch, size: 1 / 0, course=found.course())
    assert again == found


def test_what_the_bound_and_the_largest_batch_refuse_is_noted():
    for keys, size, told in [
        ({"bound": 24}, 24, "asked for 32 rows after epoch 1, and 24 of the longest fit at once.* nor were 2 later"),
        ({"bound": 16}, 16, "asked for 24 rows for the first epoch, and 16 of the longest fit at once.* 3 later"),
        ({"max_batch_size": 20}, 16, "for the first epoch, and trainer.max_batch_size is 20: it was not followed"),
    ]:
        found = length_for(epochs=4, batch_increase_function=lambda epoch, size: 8, **keys)
        assert phases(found) == [(0, size)]
        (note,) = found.notes
        assert re.search(told, note)


def test_a_function_that_changes_nothing_is_told():
    for keys, epochs in [
        ({"epochs": 3}, "each epoch from 0 to 2"),
        ({"epochs": 1}, "epoch 0, the only one"),
        ({"train_steps": 101}, "each epoch from 0 to 1"),
    ]:
        found = length_for(**keys, batch_increase_function=lambda epoch, size: 8 if epoch == 9 else 0)
        assert phases(found) == [(0, 16)]
        (note,) = found.notes
        assert f"changes nothing: it returned 0 for {epochs}, so every update is of 16 rows" in note


# The effective batch from step to step; tests/integration/test_batch_schedule.py walks whole runs


def course(schedule, *, every=None, total=40):
    return BatchCourse(RunLength(num_rows=40, schedule=schedule, total_samples=total), measure_every=every, saved={})


def ramped(total=40):
    return course(BatchSchedule.of([(0, 2), (6, 4), (10, 8)]), total=total)


def test_a_switch_is_told_until_its_step_is_over():
    found = ramped()
    assert found.switch(2) is None
    found.stepped(2)
    event = {"event": "schedule", "before": 2, "effective_batch_size": 4, "reason": "schedule"}
    assert found.switch(4) == found.switch(4) == event
    found.stepped(4)
    assert found.switch(4) is None


def test_a_step_that_was_left_out_does_not_lose_the_point():
    found, ended = ramped(), ramped(total=14)
    for each in (found, ended):
        for consumed in (2, 4, 6):
            assert each.take_loss(loss=1.0, num_supervised_tokens=10, consumed_samples=consumed) is None
    # the step to 10 was left out
    point = found.take_loss(loss=3.0, num_supervised_tokens=10, consumed_samples=18)
    assert point == {"event": "point", "loss": 1.5, "num_steps": 4}
    assert ended.left_out(10) is None
    assert ended.left_out(14) == {"event": "point", "loss": 1.0, "num_steps": 3}  # it ends the curve
    assert ended.left_out(14) is None
    assert ramped(total=2).left_out(2) is None


def test_measuring_alone_moves_nothing_and_a_step_without_a_measurement_has_no_fields():
    found = course(BatchSchedule.constant(4), every=3)
    assert [step for step in range(10) if found.measures(step)] == [0, 3, 6, 9]
    for _ in range(9):
        fields = found.take_noise(NoiseMeasurement(squared_gradient=1.0, gradient_variance=1000.0))
    assert fields == {"noise_scale": pytest.approx(1000.0), "gradient_variance": 1000.0, "squared_gradient": 1.0}
    assert found.size(0) == 4
    assert ramped().take_noise(None) == {}
