"""Seconds by the roofline, by hand: 10**6 FLOP/s and bytes a second."""

import pytest
from tests.planning.hand_counted import hand_counted, speed

from brim.planning.costs import seconds_of
from brim.planning.costs.time import BoundShares, roofline, shares, work_law

LAW = work_law({shape: hand_counted(*shape) for shape in [(1, 512), (2, 512), (32, 64)]})


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory_traffic():
    parts = roofline(LAW, speed(), 4 * 100, 100)
    # Products: 0.4 s of arithmetic, 1.04 s of traffic. Attention: 8 · 400 · 100 FLOPs at half speed. The norm: 0.16 s.
    assert parts.memory_s[0] == pytest.approx(1.04 + 0.16)
    assert parts.arithmetic_s[0] == pytest.approx(0.64)
    assert parts.launches_s[0] == pytest.approx(0.0, abs=1e-9)
    assert parts.total_s[0] == pytest.approx(1.84)


def test_a_gpu_waits_for_the_host_only_where_it_is_faster():
    busy = roofline(LAW, speed(host_s=0.1), 400, 100)  # 9 kernels: 0.9 s, less than 1.84
    assert busy.total_s[0] == pytest.approx(1.84)
    idle = roofline(LAW, speed(host_s=1.0), 400, 100)
    assert idle.total_s[0] == pytest.approx(9.0)
    assert idle.launches_s[0] == pytest.approx(9.0 - 1.84)


def test_on_a_cpu_the_host_is_the_device():
    parts = roofline(LAW, speed(host_s=0.1, is_asynchronous=False), 400, 100)
    assert parts.total_s[0] == pytest.approx(1.84 + 0.9)


def test_the_shortest_kernel():
    parts = roofline(LAW, speed(least_s=0.1), 400, 100)
    assert parts.launches_s[0] == pytest.approx(3 * 0.1)  # of the norm's kernels, which would take 0.16 s
    assert parts.total_s[0] == pytest.approx(1.04 + 0.64 + 0.3)


def test_shares():
    found = shares(roofline(LAW, speed(host_s=1.0), [400, 4000], [100, 100]))
    assert found.arithmetic + found.memory_traffic + found.launches == pytest.approx(1.0)
    assert BoundShares(arithmetic=0.2, memory_traffic=0.5, launches=0.3).bound_by == "memory traffic"
    assert BoundShares(arithmetic=0.6, memory_traffic=0.1, launches=0.3).bound_by == "arithmetic"
    assert BoundShares(arithmetic=0.1, memory_traffic=0.1, launches=0.8).bound_by == "launches"


def test_work_without_a_shape():
    assert seconds_of(hand_counted(4, 100), speed()) == pytest.approx(1.84)
