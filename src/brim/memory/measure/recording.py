"""Memory over time while steps run: PyTorch's record of its CUDA allocator, or samples of the resident set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from brim.memory.events import EventStream, Place
from brim.memory.measure.operators import OperatorLog, said
from brim.memory.measure.resident import resident_bytes
from brim.memory.measure.result import MeasuredTimeline, Stayed
from brim.memory.measure.stayed import Living, living
from brim.memory.measure.timeline import timeline
from brim.memory.measure.trace import Entry, curve, line_of, stayed, stream

_SAMPLING_S = 0.001


class Recording(Protocol):
    """What a device has to tell of the steps that ran inside `recorded`."""

    log: OperatorLog

    def step_ended(self) -> None:
        """Called after each step; the first one only warms up."""

    def timeline(self) -> MeasuredTimeline: ...

    def stayed(self) -> tuple[Stayed, ...]:
        """What the steps after the first left behind."""


@contextmanager
def recorded(model: nn.Module, device: torch.device, snapshot: Path | None = None) -> Iterator[Recording]:
    """Record what runs inside. snapshot: a file to write, which pytorch.org/memory_viz opens; CUDA alone has one."""
    recording = CudaRecording(device, snapshot) if device.type == "cuda" else ResidentRecording()
    with recording.running(), recording.log.watching(model):
        yield recording


class ResidentRecording:
    """Samples from a thread of its own, and one at each mark."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, int]] = []
        self._warm: Living | None = None
        self._last: Living | None = None
        self.log = OperatorLog(on_mark=self._sample)

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def step_ended(self) -> None:
        self._last = living(self.log.where())
        self._warm = self._warm or self._last

    def timeline(self) -> MeasuredTimeline:
        times, live = np.asarray(self._samples, dtype=np.int64).reshape(-1, 2).T
        return timeline(times, live, reserved_bytes=None, marks=self._marks(), place_at=self.log.place_at)

    def stayed(self) -> tuple[Stayed, ...]:
        return self._last.since(self._warm) if self._last is not None and self._warm is not None else ()

    def _marks(self) -> list[tuple[int, str]]:
        """Each on the sample that was taken for it, which came just before."""
        times = sorted(time_ns for time_ns, _ in self._samples)
        starts = np.searchsorted(times, [time_ns for time_ns, _ in self.log.marks], side="right") - 1
        return [(times[max(start, 0)], label) for start, (_, label) in zip(starts, self.log.marks, strict=True)]

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_SAMPLING_S):
            self._sample()

    def _sample(self) -> None:
        self._samples.append((time.time_ns(), resident_bytes()))


class CudaRecording:
    """Every allocation and release, with the Python stack that asked for it."""

    def __init__(self, device: torch.device, snapshot: Path | None) -> None:
        self._device = device
        self._file = snapshot
        self._entries: Sequence[Entry] = ()
        self._before = (0, 0)
        self._warm_us: int | None = None
        self.log = OperatorLog(on_operator=_number_allocations())

    @contextmanager
    def running(self) -> Iterator[None]:
        memory = torch.cuda.memory
        torch.cuda.synchronize(self._device)
        self._before = (memory.memory_allocated(self._device), memory.memory_reserved(self._device))
        memory._record_memory_history(enabled="all", context="all", stacks="python", clear_history=True)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            traces = memory._snapshot()["device_traces"]
            if self._file is not None:
                memory._dump_snapshot(str(self._file))  # type: ignore[no-untyped-call]
            memory._record_memory_history(enabled=None)
            index = self._device.index if self._device.index is not None else torch.cuda.current_device()
            self._entries = traces[index] if index < len(traces) else []

    def step_ended(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._warm_us is None:
            self._warm_us = time.time_ns() // 1000

    def timeline(self) -> MeasuredTimeline:
        allocated, reserved = self._before
        found = curve(self._entries, allocated_bytes=allocated, reserved_bytes=reserved)
        return timeline(
            found.times_us * 1000,
            found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            marks=self.log.marks,
            place_at=self.log.place_at,
        )

    def stayed(self) -> tuple[Stayed, ...]:
        since = self._warm_us if self._warm_us is not None else 0
        return stayed(self._entries, since_us=since, where=lambda entry: _said(entry, self._place(entry)))

    def stream(self) -> EventStream:
        """The same events as a prediction is made of, to lay them side by side."""
        return stream(self._entries, self._place)

    def _place(self, entry: Entry) -> Place:
        number = str(entry.get("user_metadata") or "")
        if entry["action"] == "alloc" and number.isdecimal():
            return self.log.places[int(number)]
        return self.log.place_at(entry.get("time_us", 0) * 1000)


def _number_allocations() -> Callable[[int], None]:
    """Writes an operator's number on the allocations that it makes, where this PyTorch can."""
    write: Any = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    return (lambda number: write(str(number))) if write is not None else (lambda number: None)


def _said(entry: Entry, place: Place) -> str:
    return "; ".join(part for part in (said(place), line_of(entry)) if part)
