"""The budget of a run: what the configuration allows, and what the device at hand has free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from brim.config.schema import MemoryConfig
from brim.memory.device import PACKING_BYTES, Device
from brim.planning.budget import Budget, Limit, Room, cpu_margin, cuda_margin, decide
from brim.planning.cpu_room import cpu_limits, resident_bytes, returns_at_once
from brim.planning.heap_settings import map_large_blocks
from brim.units import format_bytes


def budget_of(
    memory: MemoryConfig, device: Device, *, is_at_hand: bool, held_bytes: int = 0, trains: bool = True
) -> Budget:
    """memory: the configuration's section. is_at_hand: the run takes place on this device, and what is free counts.

    held_bytes: of tensors that are there already and are part of what is planned: on a CPU they are no more outside.
    trains: whether there will be a backward pass, whose threads take addresses.

    Raises ConfigError where the device is smaller than the budget, and where nothing would be left for the model.
    """
    if not is_at_hand:
        room = _room(device, limits=(), outside_bytes=device.outside_bytes)
    elif device.is_cpu:
        now_bytes = resident_bytes()
        outside_bytes = device.outside_bytes if now_bytes is None else now_bytes + PACKING_BYTES
        outside_bytes = max(outside_bytes - held_bytes, 0)
        room = _room(device, limits=tuple(cpu_limits(trains=trains)), outside_bytes=outside_bytes)
    else:
        room = _cuda_room(device)
    return decide(room, budget=memory.budget, margin=memory.margin)


def enforce(budget: Budget, device: Device) -> None:
    """Let PyTorch's allocator reserve no more than the budget leaves it, so that the budget is never exceeded.

    The limit is the process's; `limit_lifted` lifts it when the job is over. What the allocator has cached counts; it
    is given back before the allocator gives up. On a CPU nothing can be enforced, but what is freed goes back to the
    system.
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
    """Run a job; when it ends, also by an exception, the process has the limit again that it had before `enforce`.

    Of jobs within jobs the outermost one lifts it. Without a limit, CUDA is not touched.
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


def _cuda_room(device: Device) -> Room:
    """With the context made, what is neither free nor PyTorch's lies outside it: the context itself, other processes.

    Libraries are loaded when they are first used, so it cannot be less than what is usual for the card.
    """
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    has = f"{device.title} has {format_bytes(total_bytes)}"
    if outside_bytes <= device.outside_bytes:
        return _room(device, limits=(Limit(num_bytes=total_bytes, reason=has),), outside_bytes=device.outside_bytes)
    taken = f"{has}, of which {format_bytes(outside_bytes)} are taken by the driver and by others"
    return _room(device, limits=(Limit(num_bytes=total_bytes, reason=taken),), outside_bytes=outside_bytes)


def _room(device: Device, *, limits: tuple[Limit, ...], outside_bytes: int) -> Room:
    whole = Limit(num_bytes=device.memory_bytes, reason=f"{device.title} has {format_bytes(device.memory_bytes)}")
    is_cpu = device.is_cpu
    return Room(
        device=device.name,
        title=device.title,
        memory_bytes=device.memory_bytes,
        limits=(*limits, whole),
        outside_bytes=outside_bytes,
        margin=cpu_margin(returns_at_once=returns_at_once(os.environ)) if is_cpu else cuda_margin(),
    )
