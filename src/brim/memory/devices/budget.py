"""Decide how many bytes a run may take on a device, and how many of them it leaves free.

The budget is what the configuration allows of what the local device has free; on a CPU it is bounded by everything that
limits this process. Where possible, the C library is made to return large blocks to the system as soon as they are
freed.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brim.config.schema import MemoryConfig
from brim.errors import ConfigError, Problem
from brim.memory.devices.device import PACKING_BYTES, Device
from brim.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from brim.session import Shortfall


def budget_of(
    memory: MemoryConfig,
    device: Device,
    *,
    is_at_hand: bool,
    held_bytes: int = 0,
    trains: bool = True,
    shortfall: Shortfall | None = None,
) -> Budget:
    """Decide the budget of a run on a device.

    memory: the configuration's section. is_at_hand: the run takes place on this device, and what is free counts.
    held_bytes: tensors that exist already and are part of what is planned; on a CPU they do not count as outside.
    trains: whether there will be a backward pass, whose threads take address space. shortfall: of another process.

    Raises ConfigError where the device is smaller than the budget, and where nothing would be left for the model.
    """
    limits, outside_bytes = [], device.outside_bytes
    if is_at_hand and device.is_cpu:
        limits, now_bytes = cpu_limits(trains=trains, num_processes=device.num_processes), resident_bytes()
        outside_bytes = max((outside_bytes if now_bytes is None else now_bytes + PACKING_BYTES) - held_bytes, 0)
    elif is_at_hand:
        limit, outside_bytes = _found_on_cuda(device)
        limits.append(limit)
    has = f"{device.title} has {format_bytes(device.memory_bytes)}"
    limits.append(Limit(num_bytes=device.memory_bytes // device.num_processes, reason=has + _shared(device)))
    margin = cpu_margin(returns_at_once=returns_at_once(os.environ)) if device.is_cpu else cuda_margin()
    decided = decide(memory, device, limits=limits, outside_bytes=outside_bytes, margin=margin)
    if shortfall is None:
        return decided
    limits = [Limit(num_bytes=decided.limit_bytes - shortfall.num_bytes, reason=shortfall.reason)]
    return decide(MemoryConfig(margin=memory.margin), device, limits=limits, outside_bytes=outside_bytes, margin=margin)


def enforce(budget: Budget, device: Device) -> None:
    """Let PyTorch's allocator reserve no more than the budget leaves it, so that the budget is never exceeded.

    The limit holds for the process; `limit_lifted` lifts it when the job is over. What the allocator has cached counts;
    it is given back before the allocator gives up. On a CPU nothing can be enforced, but what is freed goes back to
    the system.
    """
    if device.is_cpu:
        map_large_blocks()
        return
    import torch

    allowed_bytes = budget.limit_bytes - budget.outside_bytes
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    before = _BEFORE.get()
    if before is not None:
        before.setdefault("fraction", torch.cuda.get_per_process_memory_fraction())
    torch.cuda.set_per_process_memory_fraction(min(max(allowed_bytes / total_bytes, 0.0), 1.0))


_BEFORE: ContextVar[dict[str, float] | None] = ContextVar("_BEFORE", default=None)  # None: no job is under way


@contextmanager
def limit_lifted() -> Iterator[None]:
    """Run a job; when it ends, even by an exception, restore the limit that the process had before `enforce`.

    Where jobs are nested, the outermost one does it. Without a limit, CUDA is not touched.
    """
    if _BEFORE.get() is not None:
        yield
        return
    before: dict[str, float] = {}
    token = _BEFORE.set(before)
    try:
        yield
    finally:
        _BEFORE.reset(token)
        if before:
            import torch

            torch.cuda.set_per_process_memory_fraction(before["fraction"])


def _found_on_cuda(device: Device) -> tuple[Limit, int]:
    """Return what the device has, and what lies outside PyTorch, as the context and other processes do.

    Libraries are loaded when they are first used, so no less is counted than what is usual for the card.
    """
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    reason = f"{device.title} has {format_bytes(total_bytes)}"
    if outside_bytes > device.outside_bytes:
        reason += f", of which {format_bytes(outside_bytes)} are taken by the driver and other processes"
    return Limit(num_bytes=total_bytes, reason=reason), max(outside_bytes, device.outside_bytes)


_MIB = 2**20


_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 where there is none


# A thread of the C library takes a stack of 8 MiB and an arena of 64 MiB from the address space, whatever it uses of
# them; the backward pass runs in one of its own, and PyTorch starts another for the gradients of the first step.
_ADDRESSES_OF_THREADS_BYTES = 2 * (8 + 64) * _MIB


# From this size on glibc maps a tensor by itself; unless the variable sets it, the threshold grows.
_MAPPED_FROM_BYTES = 128 * 1024


def _shared(device: Device) -> str:
    return f", shared by {device.num_processes} processes" if device.num_processes > 1 else ""


def cpu_limits(root: Path = Path("/"), *, trains: bool = True, num_processes: int = 1) -> list[Limit]:
    """Return what the process may have resident in all, one limit for each bound; none where the system does not say.

    root: where /proc and /sys are. trains: without a backward pass no threads are started. num_processes: that begin
    together, and share what is left of the machine and of a container.
    """
    resident_bytes = _kib(root / "proc/self/status", "VmRSS")
    if resident_bytes is None:
        return []
    available = _kib(root / "proc/meminfo", "MemAvailable")
    machine = [] if available is None else [(available, "what is available on this machine")]
    shared = [(left // num_processes, reason) for left, reason in (*machine, *_containers(root))]
    found = [*shared, *_process_limits(root, _ADDRESSES_OF_THREADS_BYTES if trains else 0)]
    return [Limit(num_bytes=resident_bytes + max(left, 0), reason=reason) for left, reason in found]


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process has resident now."""
    return _kib(root / "proc/self/status", "VmRSS")


def returns_at_once(environment: Mapping[str, str]) -> bool:
    """Return whether glibc is set to map each tensor by itself, so that nothing that is freed is kept."""
    value = environment.get("MALLOC_MMAP_THRESHOLD_", "")
    return sys.platform == "linux" and value.isdigit() and 0 < int(value) <= _MAPPED_FROM_BYTES


def _containers(root: Path) -> Iterator[tuple[int, str]]:
    """Yield what is left in the control groups that the process is in, those above them included."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            left = _left_in(folder, *files)
            if left is not None:
                yield left, f"the container's limit ({files[0]})"
            if folder == base:
                break


def _left_in(folder: Path, limit_file: str, usage_file: str, cached: str) -> int | None:
    """Return what is left in a control group; the cache of files, which can be dropped, does not count as used."""
    limit, usage = (next(iter(_lines(folder / file)), "") for file in (limit_file, usage_file))
    if not limit.isdigit() or int(limit) >= _NO_LIMIT or not usage.isdigit():
        return None
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return int(limit) - int(usage) + int(statistics.get(cached, "0"))


def _process_limits(root: Path, addresses_bytes: int) -> Iterator[tuple[int, str]]:
    if sys.platform == "win32":
        return
    import resource

    status = root / "proc/self/status"
    for name, number, used, unused_bytes in (
        ("RLIMIT_AS", resource.RLIMIT_AS, _kib(status, "VmSize"), addresses_bytes),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, _kib(status, "VmData"), 0),
    ):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY and used is not None:
            yield soft - used - unused_bytes, name


def _kib(path: Path, key: str) -> int | None:
    """Return the value of a line such as `VmRSS:  1234 kB`, in bytes."""
    found = re.search(rf"^{key}:\s*(\d+) kB", "\n".join(_lines(path)), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


# A share of the budget. A trace was 0.25 to 0.35% below what an A100 then showed; what is interpolated between traces
# can be off by 0.5% more.
PREDICTION_SHARE = 0.01


# One kind of card (A100) shows 0.53 GiB outside PyTorch in most processes and 1.00 with more libraries loaded.
OUTSIDE_SPREAD_BYTES = 480 * _MIB


# What the C library holds beyond what is in use, once it maps large blocks by themselves: `map_large_blocks`.
HEAP_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Hold what a run may take of one device. The cap on allocated bytes is lower by the allocator's own overhead."""

    device: str  # as the catalogue or the driver names it; "cpu"
    limit_bytes: int  # what the run may take in all, with what lies outside PyTorch
    outside_bytes: int  # the part outside PyTorch's allocator: CUDA context, libraries; on a CPU the process as it is
    margin_bytes: int  # the part left free, since a prediction can be off
    limit_reason: str  # "of 16.0 GiB that the device has", "memory.budget", "RLIMIT_AS", …
    margin_reason: str

    @property
    def reserved_bytes(self) -> int:
        """Return what PyTorch's allocator may reserve."""
        return self.limit_bytes - self.outside_bytes - self.margin_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Hold the bytes that the run cannot exceed, and what sets this limit."""

    num_bytes: int  # in all, with what lies outside PyTorch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Hold what is left free where the user does not say: a share of what PyTorch may take, and bytes."""

    share: float
    num_bytes: int
    reason: str


def decide(
    memory: MemoryConfig, device: Device, *, limits: Sequence[Limit], outside_bytes: int, margin: Margin
) -> Budget:
    """Decide the budget of a run on a device that a run finds so. limits: at least one.

    Raises ConfigError where the device is smaller than the budget, and where nothing would be left for the model.
    """
    limit = _limit(memory.budget, device, limits)
    left_bytes = max(limit.num_bytes - outside_bytes, 0)
    margin_bytes, reason = _margin(margin, memory.margin, limit_bytes=limit.num_bytes, left_bytes=left_bytes)
    decided = Budget(
        device=device.name,
        limit_bytes=limit.num_bytes,
        outside_bytes=outside_bytes,
        margin_bytes=margin_bytes,
        limit_reason=limit.reason,
        margin_reason=reason,
    )
    if decided.reserved_bytes <= 0:
        raise ConfigError(_nothing_left(decided, device, is_asked=memory.budget != "auto"))
    return decided


def cpu_margin(*, returns_at_once: bool) -> Margin:
    """Return a CPU's margin. returns_at_once: the C library maps each tensor by itself, and keeps nothing freed."""
    if returns_at_once:
        return Margin(share=PREDICTION_SHARE, num_bytes=0, reason="a prediction can be off by 1%")
    return Margin(share=HEAP_SHARE, num_bytes=0, reason="the C library can keep up to 15% of it though it is freed")


def cuda_margin() -> Margin:
    """Return a GPU's margin, which covers what memory outside PyTorch may take beyond what is counted."""
    reason = f"a prediction can be off by 1%, and what lies outside PyTorch by {format_bytes(OUTSIDE_SPREAD_BYTES)}"
    return Margin(share=PREDICTION_SHARE, num_bytes=OUTSIDE_SPREAD_BYTES, reason=reason)


def _limit(asked: str | float, device: Device, limits: Sequence[Limit]) -> Limit:
    """Return the limit that counts. asked: auto, bytes with a unit, or a share of the device."""
    least = min(limits, key=lambda limit: limit.num_bytes)
    if asked == "auto":
        return least
    num_bytes = round(asked * device.memory_bytes) if isinstance(asked, float) else parse_bytes(str(asked))
    num_bytes //= device.num_processes
    if num_bytes > device.memory_bytes:
        has = f"{device.title} has {format_bytes(device.memory_bytes)}"
        raise ConfigError(
            what=f"memory.budget is {format_bytes(num_bytes)}, but {has}",
            fix="set memory.budget: auto, or to less than the device has",
        )
    if num_bytes > least.num_bytes:
        wish = f"memory.budget: {format_bytes(num_bytes)} is more than there is"
        return Limit(num_bytes=least.num_bytes, reason=f"{least.reason}; {wish}")
    return Limit(num_bytes=num_bytes, reason=f"memory.budget{_shared(device)}")


def _margin(auto: Margin, asked: str | float, *, limit_bytes: int, left_bytes: int) -> tuple[int, str]:
    """Return what is left free, and why. asked: auto, bytes with a unit, or a share of the budget."""
    if asked == "auto":
        return round(auto.share * left_bytes) + auto.num_bytes, auto.reason
    num_bytes = round(asked * limit_bytes) if isinstance(asked, float) else parse_bytes(str(asked))
    return num_bytes, "memory.margin"


def _nothing_left(budget: Budget, device: Device, *, is_asked: bool) -> Problem:
    needed_bytes = (budget.outside_bytes + budget.margin_bytes) * device.num_processes
    kept = f" and {format_bytes(budget.margin_bytes)} are kept free" if budget.margin_bytes else ""
    larger = "set a larger memory.budget" if is_asked else "free memory there, or raise this limit"
    helps = budget.margin_bytes > 0 and budget.limit_bytes > budget.outside_bytes
    return Problem(
        what=f"of {format_bytes(budget.limit_bytes)} ({budget.limit_reason}), {format_bytes(budget.outside_bytes)} lie "
        f"outside PyTorch{kept}: nothing is left for the model",
        where="memory.budget" if is_asked else "",
        expected=f"more than {format_bytes(needed_bytes)}{_shared(device)}",
        fix=f"{larger}, or {'' if is_asked else 'set '}a smaller memory.margin" if helps else larger,
    )


# From mallopt(3): M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
_TRIM_THRESHOLD, _TOP_PAD, _MAP_THRESHOLD = -1, -2, -3


# Steps of 18 shapes on a Llama with 7 million weights, with at most 311 MiB alive, took 488 MiB resident and 9.4 s of a
# core by glibc's own rule; 365 MiB and 11.0 s with this threshold, 315 MiB and 13.4 s with one of 64 KiB.
_HEAP_MAPPED_FROM_BYTES = 1 << 20


# The most that mallopt takes. By its own rule glibc gives back what is free at the heap's end, from 64 MiB on: an epoch
# of the example's model touched 45,000 to 97,000 pages anew, 1% to 2% of its time, and 0 to 2,500 so. The peak was the
# same: 147 and 155 MiB above the process, and 149 and 144.
_KEPT_MAPPED_FROM_BYTES, _KEPT_BYTES = 32 << 20, 2**31 - 1


def settle_heap(*, is_cpu: bool, is_ample: bool) -> bool:
    """Let freed memory of a CPU go back to the system where it may become scarce; return whether it is kept.

    The user's own setting wins.
    """
    if not is_cpu or returns_at_once(os.environ):
        return False
    if not is_ample:
        map_large_blocks()
    elif not any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        keep_freed()
    return is_ample


def keep_freed() -> bool:
    """Have the C library keep what is freed, so that the next tensors need no pages from the system."""
    return _set_heap((_MAP_THRESHOLD, _KEPT_MAPPED_FROM_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES))


def map_large_blocks() -> bool:
    """Have the C library map blocks of 1 MiB and more by themselves. False where it has no such setting.

    By its own rule glibc takes blocks of up to 32 MiB from a heap, which keeps and splits what is freed: a run of many
    shapes ends up holding half as much again. The setting lasts until the process ends, and costs some time.
    """
    thresholds = ((_MAP_THRESHOLD, _HEAP_MAPPED_FROM_BYTES), (_TRIM_THRESHOLD, _HEAP_MAPPED_FROM_BYTES))
    return _set_heap(*thresholds, (_TOP_PAD, 0))


def _set_heap(*options: tuple[int, int]) -> bool:
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such symbol; no handle of the process itself, as on Windows
        return False
    return all(set_option(ctypes.c_int(option), ctypes.c_int(value)) == 1 for option, value in options)
