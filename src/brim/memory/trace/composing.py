"""Compose steps from recorded parts.

The first matrix product of a thread reserves a handle, and with it a workspace for the stream, which stays for good
(CublasHandlePool.cpp of PyTorch); the backward pass has a thread of its own. `device.cublas_workspace_bytes` says how
large it is. cuBLASLt, which runs `linear` with a bias, shares it since torch 2.11 (pytorch/pytorch#168175); the
megabyte that it keeps for itself in 2.10 is left out.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from brim.memory.events import EventStream
from brim.memory.trace.optimizer import OptimizerRecording
from brim.memory.trace.recording import Recording

Binding = MutableMapping[int, int]  # a recorded storage -> the one that stands for it in the composed stream


def compose_steps(steps: Sequence[Sequence[Recording]], optimizer: OptimizerRecording) -> EventStream:
    """Compose the load of the weights, then steps. steps: of each, the recordings of its micro-batches.

    The first step allocates the optimizer's state. Recordings are of the same model, and may be of different shapes.
    """
    stream = EventStream()
    first = steps[0][0]
    loaded: Binding = {}
    play(stream, first.stream, first.parts["load"], loaded, label="load")
    states: Binding = {}
    for number, step in enumerate(steps, start=1):
        bound: Binding = {}
        before: Recording | None = None
        for micro_batch, recording in enumerate(step, start=1):
            if recording is not before:
                carried = {} if before is None else _carried_gradients(before, recording, bound)
                bound = {**(loaded if recording is first else {}), **carried}
            part = "first" if micro_batch == 1 else "next"
            label = f"step {number}" + (f", micro-batch {micro_batch}" if len(step) > 1 else "")
            play(stream, recording.stream, recording.parts[part], bound, label=label)
            before = recording
        part = "first" if number == 1 else "steady"
        _bind_gradients(states, bound, step[-1], optimizer, part)
        play(stream, optimizer.stream, optimizer.parts[part], states, label=f"step {number}: optimizer")
    stream.mark("end")
    return stream


def compose_parts(recording: Recording, parts: Sequence[str]) -> EventStream:
    """Compose parts as they were recorded, such as "load" and "evaluate", one after the other."""
    stream = EventStream()
    bound: Binding = {}
    for part in parts:
        play(stream, recording.stream, recording.parts[part], bound, label=part)
    stream.mark("end")
    return stream


def with_workspaces(stream: EventStream, num_bytes: int) -> EventStream:
    """Return the stream with cuBLAS' workspaces: one for the forward pass's thread, one for the backward pass's.

    Each is born with the first matrix product of its thread, and stays.
    """
    out = EventStream(sizes=list(stream.sizes), categories=list(stream.categories))
    marks = list(reversed(stream.marks))
    missing = {True, False}
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        while marks and marks[-1][0] <= position:
            out.mark(marks.pop()[1])
        is_backward = place.phase == "backward"
        if is_backward in missing and place.operator in CUBLAS_OPERATORS and place.phase != "load":
            missing.discard(is_backward)
            out.birth(num_bytes, "workspace", place)
        out.storages.append(storage)
        out.places.append(place)
    while marks:
        out.mark(marks.pop()[1])
    return out


def play(
    stream: EventStream, recorded: EventStream, part: tuple[int, int], bound: Binding, *, label: str | None = None
) -> None:
    """Append a part of a recorded stream. bound: storages of earlier parts, to which those born here are added."""
    if label is not None:
        stream.mark(label)
    sizes, categories = recorded.sizes, recorded.categories
    for position in range(*part):
        storage, place = recorded.storages[position], recorded.places[position]
        if storage >= 0:
            bound[storage] = stream.birth(sizes[storage], categories[storage], place)
        else:
            stream.death(bound.pop(~storage), place)


def _carried_gradients(before: Recording, after: Recording, bound: Binding) -> Binding:
    """Bind the gradients that a micro-batch left to the numbers that the next one's recording has for them."""
    return {
        theirs.gradient: bound[ours.gradient]
        for ours, theirs in zip(before.trained, after.trained, strict=True)
        if ours.gradient is not None and theirs.gradient is not None
    }


def _bind_gradients(
    states: Binding, step: Binding, recording: Recording, optimizer: OptimizerRecording, part: str
) -> None:
    """Bind the gradients that the update drops to those that the micro-batches made."""
    for weight, number in zip(recording.trained, optimizer.gradients[part], strict=True):
        if number is not None:
            assert weight.gradient is not None
            states[number] = step.pop(weight.gradient)


# Operators that reserve a cuBLAS handle. Attention's fused kernels, `_grouped_mm` and bitsandbytes' kernels do not.
CUBLAS_OPERATORS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addmv", "mv", "dot", "vdot", "linear", "matmul")
)
