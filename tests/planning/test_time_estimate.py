"""Surfaces of estimated seconds: equal to the roofline, convex, and steeper for longer rows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.memory.expansion import workload_of
from tests.memory.tiny_architectures import write_folder
from tests.planning.hand_counted import hand_counted, speed

from brim.memory import device_speed, find_device
from brim.memory.trace import record
from brim.planning.costs import estimate
from brim.planning.costs.time import roofline
from brim.planning.training_costs import less_when_doubled, time_advice

SHAPES = [(1, 512), (2, 512), (32, 64)]


def estimated(*, checkpointed=False, longest=512, shortest=16, most_rows=32, **given):
    counts = {shape: hand_counted(*shape, checkpointed=checkpointed) for shape in SHAPES}
    return estimate(counts, speed(**given), longest=longest, shortest=shortest, most_rows=most_rows)


@given(rows=st.integers(1, 32), length=st.integers(16, 512), host_s=st.sampled_from([0.0, 0.1, 3.0]))
def test_the_surface_is_the_roofline(rows, length, host_s):
    """Straight lines between samples of a convex function are above it, and not by much.

    Where it bends between samples that are a factor f apart, by (√f − 1)² / (f − 1): 8% for the 1.39 of the tokens, and
    less than as much again between two lengths.
    """
    found = estimated(host_s=host_s)
    exact = float(roofline(found.law, found.speed, rows * length, length).total_s[0])
    assert exact * (1 - 1e-9) <= float(found.surface(rows, length)) <= 1.17 * exact


@given(st.sampled_from([0.0, 0.1, 3.0]), st.booleans())
def test_lines_are_convex_and_longer_rows_steeper(host_s, is_asynchronous):
    surface = estimated(host_s=host_s, is_asynchronous=is_asynchronous).surface
    slopes = [
        np.diff([surface.base, *values]) / np.diff([0, *tokens])
        for tokens, values in zip(surface.tokens, surface.values, strict=True)
    ]
    for line in slopes:
        assert (np.diff(line) >= -1e-9 * line.max()).all()
    for shorter, longer in pairwise(slopes):
        assert (longer >= shorter - 1e-9).all()


def test_rows_of_one_length():
    counts = {shape: hand_counted(*shape) for shape in [(1, 512), (2, 512)]}
    surface = estimate(counts, speed(), longest=512, shortest=512, most_rows=1).surface
    assert surface.lengths == (512,)
    exact = hand_counted(1, 512)
    assert float(surface(1, 512)) == pytest.approx((10**6 + 100 * 512 + 400 * 512) / 1e6 + 8 * 512 * 512 / 0.5e6)
    assert exact.kernels == 9


def test_what_bounds_a_step():
    assert estimated().bound([(1, 16)]).bound_by == "memory traffic"
    assert estimated().bound([(32, 512)]).bound_by == "arithmetic"
    assert estimated(host_s=10.0).bound([(1, 16)]).bound_by == "launches"


def test_what_would_help():
    by_memory, by_arithmetic, by_launches = (
        time_advice(estimated(host_s=host_s), [shape])
        for host_s, shape in ((0, (1, 16)), (0, (32, 512)), (10, (1, 16)))
    )
    assert by_memory == (
        "a step is bound by memory traffic (100% of its time): micro-batches of twice the rows would take 49% less time "
        "a token; 4-bit weights alone save none, since each product writes them out in half precision first",
    )
    assert by_arithmetic[0].startswith("a step is bound by arithmetic (9")
    assert by_arithmetic[0].endswith(
        "micro-batches of twice the rows would not make it faster, and 4-bit weights save memory, not time"
    )
    assert "0%" not in by_arithmetic[0]
    assert by_launches[0].startswith("a step is bound by the host, which starts kernels (9")


def test_what_is_computed_anew_is_said():
    found = estimated(checkpointed=True)
    assert found.recomputed([(32, 512)]) == pytest.approx(16.384 / (2 * 16.384 + 134.217728 + 6.5536), rel=1e-3)
    assert time_advice(found, [(32, 512)])[-1] == (
        "activation checkpointing computes 9% of the time anew: memory that is free goes there first"
    )


def test_doubling_brings_what_is_fixed():
    """A micro-batch of N tokens takes 1 s for the weights' traffic and 0.0006 s a token."""
    assert less_when_doubled(estimated(), [(1, 16)]) == pytest.approx(0.5 / 1.01, rel=0.02)


def test_a_small_model_on_a_large_gpu_waits_for_the_host(tmp_path):
    folder = write_folder(tmp_path / "llama", "llama")
    config = {"base_model": str(folder), "precision": "bf16-true", "trainer": {"type": "finetune", "batch_size": 1}}
    traced = workload_of(config, "train").training()
    counts = {shape: record(traced, rows=shape[0], tokens=shape[1]).work["first"] for shape in [(1, 64), (2, 64)]}
    a100 = device_speed(find_device("a100-80gb"))
    found = estimate(counts, a100, longest=64, shortest=64, most_rows=8)
    assert found.bound([(1, 64)]).bound_by == "launches"
    assert less_when_doubled(found, [(1, 64)]) == pytest.approx(0.5, abs=0.01)  # kernels cost the same for any rows
