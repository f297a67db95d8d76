"""Try a batch size on a device, with any training loop's step, and leave no trace of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.batching.caches import free_caches
from brim.batching.no_trace import Stateful, no_trace
from brim.batching.oom import is_out_of_memory
from brim.batching.peak_meter import Counts, PeakMeter, peak_meter
from brim.batching.probe import Probe


class Prober:
    """`fits` of `find_batch_size`, made of a training step.

    step: runs so many rows, forward and backward, and the optimizer's update if training has one; give it the longest
    rows that there are. It may return how many steps it ran (a loader that is empty runs none); what else it returns
    counts as one.
    model, optimizer: what the step changes; without an optimizer it may not change weights.
    others: what else it moves, such as a learning-rate schedule or a gradient scaler.
    num_steps: how often the step is run. None: twice where the optimizer has no state yet, since it is born at the end
    of the first step and takes its room in the second; else once.
    counts: of a CUDA device, the bytes that PyTorch's allocator reserved, or those that tensors took.

    After each probe weights, optimizer, gradients, buffers, random states and training modes are bit for bit what they
    were, caches are empty, and the device's peak counters begin anew.
    """

    def __init__(
        self,
        step: Callable[[int], Any],
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        others: Sequence[Stateful] = (),
        device: torch.device | str | None = None,
        num_steps: int | None = None,
        counts: Counts = "reserved",
    ) -> None:
        self._step, self._model, self._optimizer, self._others = step, model, optimizer, others
        self._num_steps = num_steps
        self._meter = peak_meter(_device_of(model) if device is None else torch.device(device), counts=counts)

    @property
    def limit_bytes(self) -> int | None:
        """What a peak may reach as things stand; None: not known."""
        free_caches()
        return self._meter.limit_bytes()

    def __call__(self, size: int) -> Probe:
        """Run `size` rows. Exceptions other than running out of memory pass through, when all is as it was."""
        try:
            with no_trace(self._model, self._optimizer, others=self._others):
                return probed(size, lambda: self._run(size), self._meter)
        finally:
            self._meter.begin()

    def _run(self, size: int) -> int:
        total = 0
        for _ in range(self._times()):
            returned = self._step(size)
            is_count = isinstance(returned, int) and not isinstance(returned, bool)
            total += returned if is_count else 1
            del returned  # a loss may hold the whole graph
        _synchronize(self._model)
        return total

    def _times(self) -> int:
        if self._num_steps is not None:
            return self._num_steps
        return 2 if self._optimizer is not None and not self._optimizer.state else 1


def probed(size: int, run: Callable[[], int], meter: PeakMeter) -> Probe:
    """Run once, which returns the number of steps that it ran; what it changes stays changed.

    Exceptions other than running out of memory pass through.
    """
    meter.begin()
    started = time.perf_counter()
    steps = _steps_or_none(run)
    seconds = time.perf_counter() - started
    if steps is None:  # after the `except` block, whose traceback kept the step's tensors alive
        return Probe(size=size, steps=0, outcome="out_of_memory", peak_bytes=None, seconds=seconds)
    return Probe(size=size, steps=steps, outcome="fits", peak_bytes=meter.peak_bytes(), seconds=seconds)


def _steps_or_none(run: Callable[[], int]) -> int | None:
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # someone may hold the error
        return None


def _synchronize(model: nn.Module) -> None:
    device = _device_of(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_of(model: nn.Module) -> torch.device:
    weight = next(model.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device
