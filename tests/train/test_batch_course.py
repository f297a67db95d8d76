"""The effective batch from step to step."""

import json

import pytest

from brim.batching import Adaptation, NoiseMeasurement, constant, schedule_of
from brim.train import RunLength
from brim.train.schedule import BatchCourse, StepTaken

RAMP = schedule_of([(0, 2), (6, 4), (10, 8)])


def course(schedule=RAMP, *, saved=None, every=None, total=40, **changes):
    length = RunLength(num_rows=40, schedule=schedule, total_samples=total, **changes)
    return BatchCourse(length, measure_every=every, saved=saved or {})


def walked(found, total=40, losses=None):
    """(size, rows, event, point) of each step, each with the loss 1, 2, 3, …"""
    consumed, steps = 0, []
    while consumed < total:
        size = found.size(consumed)
        event = found.switch(size)
        found.stepped(size)
        rows = min(size, total - consumed)
        consumed += rows
        point = found.take_loss(
            StepTaken(loss=float(len(steps) + 1), num_supervised_tokens=10 * rows, consumed_samples=consumed)
        )
        steps.append((size, rows, event, point))
    return steps


def test_sizes_and_switches_are_those_of_the_schedule():
    steps = walked(course())
    assert [size for size, *_ in steps] == [2, 2, 2, 4, 8, 8, 8, 8]
    assert [rows for _, rows, *_ in steps][-1] == 6
    events = [event for _, _, event, _ in steps if event]
    assert [(each["before"], each["effective_batch_size"]) for each in events] == [(2, 4), (4, 8)]
    assert {each["reason"] for each in events} == {"schedule"}


def test_a_point_comes_once_the_rows_of_a_final_batch_are_consumed():
    points = [point for *_, point in walked(course())]
    assert [point and point["num_steps"] for point in points] == [None, None, None, 4, 1, 1, 1, 1]
    # 2, 2, 2 and 4 rows of ten tokens each, with the losses 1 to 4
    assert points[3]["loss"] == pytest.approx((20 * 1 + 20 * 2 + 20 * 3 + 40 * 4) / 100)
    assert points[4]["loss"] == 5


def test_where_the_batch_stands_still_each_step_is_a_point_already():
    assert [point for *_, point in walked(course(constant(8)))] == [None] * 5


def test_a_step_that_was_left_out_does_not_lose_the_point():
    found = course()
    for consumed in (2, 4, 6):
        assert found.take_loss(StepTaken(loss=1.0, num_supervised_tokens=10, consumed_samples=consumed)) is None
    # the step to 10 was left out
    point = found.take_loss(StepTaken(loss=3.0, num_supervised_tokens=10, consumed_samples=18))
    assert point == {"event": "point", "loss": 1.5, "num_steps": 4}


def test_a_last_step_that_was_left_out_ends_the_curve():
    found = course(total=14)
    for consumed in (2, 4, 6):
        assert found.take_loss(StepTaken(loss=1.0, num_supervised_tokens=10, consumed_samples=consumed)) is None
    assert found.left_out(10) is None
    assert found.left_out(14) == {"event": "point", "loss": 1.0, "num_steps": 3}
    assert found.left_out(14) is None
    assert course(total=2).left_out(2) is None


@pytest.mark.parametrize("stopped_after", range(1, 8))
def test_a_course_goes_on_from_its_state(stopped_after):
    whole, consumed, found, told = walked(course()), 0, course(), []
    for number in range(8):
        if number == stopped_after:
            found = course(saved=json.loads(json.dumps(found.state())))
        size = found.size(consumed)
        event = found.switch(size)
        found.stepped(size)
        rows = min(size, 40 - consumed)
        consumed += rows
        step = StepTaken(loss=float(number + 1), num_supervised_tokens=10 * rows, consumed_samples=consumed)
        told.append((size, rows, event, found.take_loss(step)))
    assert told == whole


def test_a_switch_is_told_again_where_its_step_was_not_finished():
    found = course()
    found.stepped(2)
    assert found.switch(4) == found.switch(4)


def loud(found):
    return found.take_noise(NoiseMeasurement(squared_gradient=1.0, gradient_variance=1000.0))


def test_the_batch_follows_the_noise_and_says_so():
    start = Adaptation(size=2, smallest=2, largest=16)
    found = course(constant(2), every=3, adaptation=start)
    assert [step for step in range(10) if found.measures(step)] == [0, 3, 6, 9]
    sizes = []
    for _ in range(12):
        size = found.size(0)
        sizes.append(size)
        event = found.switch(size)
        found.stepped(size)
        if event:
            assert event["reason"] == "noise scale 1000.0 rows"
        loud(found)
        found = course(
            constant(2), every=3, adaptation=start, saved=json.loads(json.dumps(found.state()))
        )  # at every step
    assert sizes == sorted(sizes)
    assert set(sizes) == {2, 4, 8}


def test_measuring_alone_moves_nothing():
    found = course(constant(4), every=1)
    for _ in range(9):
        fields = loud(found)
    assert fields == {"noise_scale": pytest.approx(1000.0), "gradient_variance": 1000.0, "squared_gradient": 1.0}
    assert found.size(0) == 4


def test_a_step_without_a_measurement_has_no_fields():
    assert course().take_noise(None) == {}
