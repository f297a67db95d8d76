"""Ramps: schedules that lead from a first effective batch to the final one, upwards or downwards."""

from __future__ import annotations

from collections.abc import Sequence

from brim.batching.schedule import BatchSchedule, schedule_of


def doubling(*, initial: int, final: int, length_samples: int) -> BatchSchedule:
    """Twice the batch at each stage, or half of it; the stages share the samples of the ramp equally.

    The final batch follows the last stage that falls short of it, exactly, whatever the ratio is: from 6 to 20 the
    stages are 6 and 12. So counts bert24's pull request 76, whose ratios are powers of two.
    """
    stages = _doubled(initial, final)
    return _staged(stages, [1] * len(stages), final, length_samples)


def equal_steps(*, initial: int, final: int, length_samples: int) -> BatchSchedule:
    """The stages of `doubling`, each with the same number of steps, so that small batches take few samples."""
    stages = _doubled(initial, final)
    return _staged(stages, stages, final, length_samples)


def linear(*, initial: int, final: int, length_samples: int, increment: int = 1) -> BatchSchedule:
    """So many rows more, or fewer, at each of equal parts, as Megatron's `--rampup-batch-size` has it.

    Where the increment does not divide the way, the last one is smaller, so that the final batch is exact.
    """
    stages = list(range(initial, final, increment if final > initial else -increment))
    return _staged(stages, [1] * len(stages), final, length_samples)


def _doubled(initial: int, final: int) -> list[int]:
    """The sizes before the final one."""
    stages = []
    size = initial
    while (size < final) if initial < final else (size > final):
        stages.append(size)
        size = 2 * size if initial < final else -(-size // 2)
    return stages


def _staged(stages: Sequence[int], shares: Sequence[int], final: int, length_samples: int) -> BatchSchedule:
    """The stages take their shares of the length; a stage begins with the first whole sample of its share."""
    whole, before = sum(shares), 0
    steps = []
    for size, share in zip(stages, shares, strict=True):
        steps.append((-(-before * length_samples // whole), size))
        before += share
    return schedule_of([*steps, (length_samples if stages else 0, final)])
