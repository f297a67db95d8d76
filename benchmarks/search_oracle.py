"""Predict the address space that a batch size takes: brim's memory model of the step, in the C library's blocks.

Under RLIMIT_AS what counts is what is mapped: what the process had before, and the tensors that are alive at the peak.
With glibc's thresholds pinned (docs/decisions/0010-resident-memory-on-a-cpu.md) a tensor of 64 KiB or more is a mapping
of its own, in whole pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.search_subject import Subject
from brim.batching import Surface
from brim.memory import ConfigWorkload
from brim.memory.devices import cpu_device
from brim.memory.events import EventStream
from brim.models import read_architecture
from brim.planning.costs import Traces, TrainingSteps
from brim.planning.costs.sampling import Region, sampled

_PAGE_BYTES = 4096
_MAPPED_FROM_BYTES = 65536  # MALLOC_MMAP_THRESHOLD_
_HEADER_BYTES = 8  # of a block of the heap; 16 of a mapping
_ALIGNMENT_BYTES, _LEAST_BLOCK_BYTES = 64, 32  # PyTorch asks for 64; what memalign may cut off before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Hold what a step takes beside the weights, which are there already."""

    peak: Surface
    update_bytes: int  # at the peak of the optimizer's step
    weights_bytes: int
    tokens: int
    num_traces: int

    def __call__(self, rows: int) -> float:
        """Return bytes that are mapped at the peak beyond those of the process that has the model."""
        return max(float(self.peak(rows, self.tokens)), self.update_bytes) - self.weights_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Foretold:
        return cls(**{**saved, "peak": Surface.from_dict(saved["peak"])})


def foretell(subject: Subject, *, room_bytes: int, most_rows: int) -> Foretold:
    """Trace the subject's step, at a few sizes up to the one that fills the room."""
    architecture = read_architecture(subject.folder, trust_remote_code=False)
    workload = ConfigWorkload(subject.config, subject.folder, architecture, target=None)
    shapes = _MappedTraces(TrainingSteps(workload, is_single=True), cpu_device())
    weights = {id(each): each for each in subject.model.parameters()}.values()
    weights_bytes = sum(block_bytes(weight.untyped_storage().nbytes()) for weight in weights)
    where = Region(
        longest=subject.tokens,
        short=subject.tokens,
        most_rows=most_rows,
        cap_bytes=room_bytes + weights_bytes,
        chunk_positions=0,
    )
    peak = sampled(shapes.peak_bytes, where)
    return Foretold(
        peak=peak,
        update_bytes=max(shapes.basics["first_update"], shapes.basics["update"]),
        weights_bytes=weights_bytes,
        tokens=subject.tokens,
        num_traces=shapes.num_traced,
    )


def block_bytes(num_bytes: int) -> int:
    """Return what glibc takes for a tensor: malloc.c, _int_memalign and sysmalloc_mmap of version 2.36."""
    if num_bytes == 0:
        return 0
    block = _block(num_bytes)
    asked = _block(block + _ALIGNMENT_BYTES + _LEAST_BLOCK_BYTES)
    if asked < _MAPPED_FROM_BYTES:
        return block
    return -(-(asked + _HEADER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


def aimed_at(foretold: Foretold, before_bytes: int, constant_bytes: int) -> Callable[[int], float]:
    """Return the predicted peak of the whole address space. constant_bytes: beside the tensors, by the calibration."""
    return lambda rows: before_bytes + constant_bytes + foretold(rows)


def _block(num_bytes: int) -> int:
    return (num_bytes + _HEADER_BYTES + 15) & ~15


class _MappedTraces(Traces):
    """Hold traces whose tensors take the C library's blocks."""

    def live_bytes(self, stream: EventStream) -> NDArray[np.int64]:
        """Return the bytes that are mapped after each event."""
        distinct, where = np.unique(np.array(stream.sizes, dtype=np.int64), return_inverse=True)
        sizes = np.array([block_bytes(int(size)) for size in distinct], dtype=np.int64)[where]
        storages = np.array(stream.storages, dtype=np.int64)
        of_event = sizes[np.maximum(storages, ~storages)]
        return np.cumsum(np.where(storages >= 0, of_event, -of_event))
