"""Resident memory on a CPU: the arithmetic, and one shape of a small model."""

from __future__ import annotations

import pytest
from benchmarks.memory_cpu import GOAL, MODEL, PROBE, SHAPES, Bench, Figure, summary
from benchmarks.memory_foretold import train_peaks

from brim.workflows.measure import PhasePeak
from brim.workflows.measure.messages import Report

SMALL = {**MODEL, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def figure(shape, live_bytes, measured_bytes):
    return Figure(shape=shape, baseline_bytes=1000, live_bytes=(live_bytes,), measured_bytes=(measured_bytes,))


def test_the_probe_gives_the_constant_for_the_others():
    found = summary([figure("probe", 1000, 2100), figure("a", 3000, 4100), figure("b", 5000, 6150)], kept=[])
    assert found["constant_bytes"] == 100
    assert found["error"]["largest"] == pytest.approx(100 / 2100)
    assert found["error_calibrated"]["largest"] == pytest.approx(50 / 6150)
    assert found["goal"] == GOAL == 0.10


def test_there_are_twenty_shapes_and_more():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) >= 20
    assert SHAPES[0] is PROBE


def test_what_is_asked_for_is_what_is_predicted(tmp_path, monkeypatch):
    asked = []

    def measured(request, environment):
        asked.append(request)
        peak = PhasePeak(
            phase="train",
            step=1,
            allocated_bytes=None,
            reserved_bytes=None,
            outside_bytes=None,
            total_bytes=5000,
            end_bytes=0,
            baseline_bytes=1000,
        )
        return Report(
            device="cpu",
            kind="cpu",
            baseline_bytes=1000,
            peaks=(peak, peak),
            end_bytes=(),
            stayed=(),
            timeline=None,
            notes=(),
        )

    monkeypatch.setattr("benchmarks.memory_cpu.measured_alone", measured)
    bench = Bench(tmp_path, SMALL)
    shape = next(shape for shape in SHAPES if shape.settings == "two micro-batches")
    found = bench.figure(shape)
    assert asked[0].step_lengths == ((512,) * (2 * shape.rows),)
    expected = train_peaks(bench._settings(shape), [(shape.rows, shape.tokens)] * 2, {"name": "cpu"})
    assert found.live_bytes == tuple(each.allocated_bytes for each in expected)
    assert found.measured_bytes == (5000, 5000)
