"""When live bytes count as rising from step to step."""

from __future__ import annotations

from brim.workflows.measure.messages import rise_per_step


def test_a_rise_at_every_step_after_the_first_is_told_by_its_median():
    assert rise_per_step([100, 900, 1000, 1100, 1350], tolerance_bytes=0) == 100


def test_the_first_step_bears_what_stays_for_good():
    assert rise_per_step([100, 900, 900, 900, 900], tolerance_bytes=0) is None


def test_one_step_that_does_not_rise_is_enough_to_say_no():
    assert rise_per_step([0, 10, 20, 30, 30, 40], tolerance_bytes=0) is None


def test_two_rises_are_too_few():
    assert rise_per_step([0, 10, 20, 30], tolerance_bytes=0) is None
    assert rise_per_step([0, 10, 20, 30, 40], tolerance_bytes=0) == 10


def test_a_rise_within_the_rounding_is_none():
    steps = [0, 512, 1024, 1536, 2048]
    assert rise_per_step(steps, tolerance_bytes=512) is None
    assert rise_per_step(steps, tolerance_bytes=511) == 512


def test_nothing_is_said_of_no_steps():
    assert rise_per_step([], tolerance_bytes=0) is None
