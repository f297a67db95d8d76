"""The peaks of a ramp's phases, from its steps."""

from __future__ import annotations

import pytest
from benchmarks.ramp_memory import PhasePeak, by_phase, settings, spread

from brim.config import load_config


def test_the_first_step_of_a_phase_is_left_out():
    steps = [(8, 2, 900), (8, 3, 500), (8, 2, 520), (16, 4, 700), (512, 60, 100), (512, 61, 510)]
    assert by_phase(steps, beside_bytes=400) == [
        PhasePeak(effective_batch_size=8, num_steps=2, most_micro_batches=3, peak_bytes=520, tensor_bytes=120),
        PhasePeak(effective_batch_size=512, num_steps=1, most_micro_batches=61, peak_bytes=510, tensor_bytes=110),
    ]


def test_the_spread_is_over_the_smallest():
    assert spread([100, 104, 103]) == pytest.approx(0.04)


def test_the_settings_are_a_ramp_from_8_to_512(tmp_path):
    trainer = load_config(settings(tmp_path, stage_samples=512)).config.trainer
    assert (trainer.batch_rampup.length, trainer.batch_rampup.initial) == ("3072sp", 8)
    assert trainer.effective_batch_size == 512
    assert trainer.train_samples == 4096
