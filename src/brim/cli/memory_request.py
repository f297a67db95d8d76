"""What `brim memory` was asked for, checked before anything slow is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from brim.errors import InputError, Problem
from brim.memory.bounds import MOST_MEMORY_BYTES
from brim.memory.prediction import Phase
from brim.memory.sharding import Offload
from brim.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The flags."""

    batch_size: int | None
    sequence_length: int | None
    device: str | None
    memory_bytes: int | None
    phase: Phase | None
    world_size: int
    offload: Offload
    compare: bool
    explain: bool
    measure: bool
    layers: int | None
    steps: int | None
    plot: Path | None
    as_json: bool


def named_phase(text: str | None) -> Phase | None:
    """The phase of a name. Raises InputError for another."""
    if text is None or text in get_args(Phase):
        return cast("Phase | None", text)
    from brim.config.wording import misspelt, show

    meant = misspelt(text, get_args(Phase))
    raise InputError(
        Problem(
            what=f"unknown phase {show(text)}",
            where="--phase",
            expected="load, train, evaluate or generate",
            fix=f"did you mean {meant}?" if meant else "",
        )
    )


def named_offload(text: str) -> Offload:
    """What is kept on the CPU. Raises InputError for another name."""
    if text in get_args(Offload):
        return cast("Offload", text)
    raise InputError(
        Problem(what=f"unknown --offload {text[:60]!r}", where="--offload", expected="none, optimizer or weights")
    )


def device_memory(text: str | None) -> int | None:
    """The bytes of "14GiB". Raises InputError for what is no size."""
    if text is None:
        return None
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise InputError(
            Problem(what=str(error), where="--memory", expected="a size with its unit, such as 14GiB")
        ) from error
    if num_bytes == 0:
        raise InputError(Problem(what="the device has no memory", where="--memory", expected="a size such as 14GiB"))
    if num_bytes > MOST_MEMORY_BYTES:
        most = f"at most {format_bytes(MOST_MEMORY_BYTES)}"
        raise InputError(Problem(what="no device has so much memory", where="--memory", expected=most))
    return num_bytes


def check_request(request: MemoryRequest) -> None:
    """Refuse flags that contradict each other, an unknown device, and a picture that cannot be written.

    Raises InputError with all of the first, else with the one of the others.
    """
    problems = list(_contradictions(request))
    if problems:
        raise InputError(*problems)
    if request.device is not None:
        from brim.memory.device import find_device

        find_device(request.device)
    if request.plot is not None:
        from brim.report.picture import check_picture

        check_picture(request.plot)


def _contradictions(request: MemoryRequest) -> Iterator[Problem]:
    if request.device is not None and request.memory_bytes is not None:
        yield _problem("both --device and --memory are given", "keep one: a device's memory is known by its name")
    for name, value in (("--steps", request.steps), ("--layers", request.layers)):
        if value is not None and not request.measure:
            yield _problem(f"{name} is for measuring, and --measure is not given", f"add --measure, or remove {name}")
    if request.steps is not None and request.layers is not None:
        yield _problem("--steps records the whole model, and --layers cuts it", "keep one of them")
    if request.steps is not None and request.phase not in (None, "train"):
        yield _problem(f"--steps is of training, and --phase is {request.phase}", "remove one of them")
    if request.compare:
        yield from _beside_compare(request)
    if request.measure:
        yield from _beside_measure(request)


def _beside_compare(request: MemoryRequest) -> Iterator[Problem]:
    for name, is_given in (("--measure", request.measure), ("--explain", request.explain)):
        if is_given:
            yield _problem(f"--compare is of several configurations, {name} of one", f"remove --compare or {name}")
    if request.phase not in (None, "train"):
        yield _problem(f"--compare is of training, and --phase is {request.phase}", "remove one of them")


def _beside_measure(request: MemoryRequest) -> Iterator[Problem]:
    for name, value in (("--device", request.device), ("--memory", request.memory_bytes)):
        if value is not None:
            yield _problem(f"--measure is of the device at hand, and {name} names another", "remove one of them")
    if request.world_size > 1:
        yield _problem("--measure runs on one device, and --world-size is of several", "remove one of them")
    if request.offload != "none":
        yield _problem("--measure runs what brim trains today, which keeps all on the device", "remove --offload")


def _problem(what: str, fix: str) -> Problem:
    return Problem(what=what, where="command line", fix=fix)


def collect_seldom() -> None:
    """Let Python look for circles less often, in a process that only traces: its million objects hold no tensors.

    It takes a tenth of the time otherwise.
    """
    gc.set_threshold(100_000, 20, 100)


def check_device(device: str | None, memory_bytes: int | None) -> None:
    """Refuse two devices, and one that is not known, before anything slow is imported."""
    if device is None:
        return
    if memory_bytes is not None:
        raise InputError(
            Problem(
                what="both --device and --memory are given",
                where="command line",
                fix="keep one: a device's memory is known by its name",
            )
        )
    from brim.memory.device import find_device

    find_device(device)
