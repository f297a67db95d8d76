"""The learning rate as a function of consumed samples."""

import math

import pytest

from brim.train.learning_rate import LearningRate


def rates(schedule, batch, total):
    return [schedule(consumed_samples=c, batch_samples=batch) for c in range(0, total, batch)]


def test_without_a_decay_the_rate_is_constant():
    assert rates(LearningRate(peak=0.5, total_samples=8), 2, 8) == [0.5] * 4


def test_the_first_step_of_a_warm_up_learns_and_its_last_one_is_at_the_peak():
    schedule = LearningRate(peak=1.0, warmup_samples=8, total_samples=16)
    assert rates(schedule, 2, 16) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_linear_decay_starts_at_the_peak_and_would_reach_the_floor_after_the_last_step():
    schedule = LearningRate(peak=1.0, floor=0.2, decay="linear", total_samples=8)
    assert rates(schedule, 2, 8) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert schedule(consumed_samples=8, batch_samples=2) == 0.2


def test_a_cosine_is_half_way_down_at_half_time():
    schedule = LearningRate(peak=1.0, decay="cosine", warmup_samples=4, total_samples=12)
    assert rates(schedule, 4, 12) == pytest.approx([1.0, 1.0, 0.5])
    assert schedule(consumed_samples=10, batch_samples=1) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.75)))


def test_wsd_stays_up_and_falls_at_the_end():
    schedule = LearningRate(peak=1.0, decay="wsd", warmup_samples=2, decay_samples=4, total_samples=12)
    assert rates(schedule, 1, 12) == pytest.approx([0.5] + [1.0] * 8 + [0.75, 0.5, 0.25])


def test_the_clock_is_samples_so_the_batch_does_not_bend_the_decay():
    schedule = LearningRate(peak=1.0, decay="cosine", warmup_samples=8, total_samples=64)
    assert schedule(consumed_samples=32, batch_samples=8) == schedule(consumed_samples=32, batch_samples=16)
