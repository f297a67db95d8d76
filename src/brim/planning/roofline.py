"""Seconds of counted work on a device, and what they are bound by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.memory.device_speed import DeviceSpeed
from brim.memory.work import WorkCount
from brim.planning.plan import BoundBy
from brim.planning.work_law import WorkLaw, work_law


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundShares:
    """Of the time of a micro-batch: 1 in all."""

    arithmetic: float
    memory_traffic: float
    launches: float  # the host's part: Python, the dispatcher, the start of kernels

    @property
    def bound_by(self) -> BoundBy:
        """The largest."""
        shares: dict[BoundBy, float] = {
            "arithmetic": self.arithmetic,
            "memory traffic": self.memory_traffic,
            "launches": self.launches,
        }
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of S shapes, each [S]."""

    arithmetic_s: NDArray[np.float64]
    memory_s: NDArray[np.float64]
    launches_s: NDArray[np.float64]

    @property
    def total_s(self) -> NDArray[np.float64]:
        return self.arithmetic_s + self.memory_s + self.launches_s


def roofline(law: WorkLaw, speed: DeviceSpeed, num_tokens: ArrayLike, length: ArrayLike) -> Parts:
    """A kernel takes as long as its arithmetic or its memory traffic, whichever is longer.

    A GPU works off a queue that the host fills: a micro-batch takes as long as the slower of the two. On a CPU they are
    one, and the times add up. After Williams, Waterman, Patterson, "Roofline" (2009).
    """
    flops, num_bytes, kernels = law.at(num_tokens, length)
    flops_per_s = np.array([speed.flops_per_s(place.unit, place.dtype) for place in law.places])
    arithmetic = flops / flops_per_s[:, None]
    memory = num_bytes / speed.bytes_per_s
    least = kernels * speed.least_s_per_kernel
    device = np.maximum(np.maximum(arithmetic, memory), least)
    host = kernels.sum(axis=0) * speed.host_s_per_kernel
    waiting = np.maximum(host - device.sum(axis=0), 0.0) if speed.is_asynchronous else host
    is_arithmetic = (arithmetic >= memory) & (arithmetic >= least)
    is_memory = ~is_arithmetic & (memory >= least)
    return Parts(
        arithmetic_s=np.where(is_arithmetic, device, 0.0).sum(axis=0),
        memory_s=np.where(is_memory, device, 0.0).sum(axis=0),
        launches_s=np.where(is_arithmetic | is_memory, 0.0, device).sum(axis=0) + waiting,
    )


def seconds_of(work: WorkCount, speed: DeviceSpeed) -> float:
    """Of work that no shape changes, such as an optimizer's update."""
    return float(roofline(work_law({(1, 1): work}), speed, 1, 1).total_s[0])


def shares(parts: Parts) -> BoundShares:
    """Of all shapes together."""
    arithmetic, memory, launches = (
        float(each.sum()) for each in (parts.arithmetic_s, parts.memory_s, parts.launches_s)
    )
    total = arithmetic + memory + launches
    return BoundShares(arithmetic=arithmetic / total, memory_traffic=memory / total, launches=launches / total)
