"""Steps put together from recorded parts."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from brim.memory.cuda.workspaces import CUBLAS_OPERATORS
from brim.memory.events import EventStream
from brim.memory.optimizer_recording import OptimizerRecording
from brim.memory.recording import Recording

Binding = MutableMapping[int, int]  # a recorded storage -> the one that stands for it in the composed stream


def compose_training(
    recordings: Sequence[Recording], optimizer: OptimizerRecording, *, micro_batches: int
) -> EventStream:
    """The load of the weights, then one step for each recording, of `micro_batches` micro-batches.

    The first step bears the optimizer's state. Recordings are of the same model, and may be of different shapes.
    """
    stream = EventStream()
    loaded: Binding = {}
    play(stream, recordings[0].stream, recordings[0].parts["load"], loaded, label="load")
    states: Binding = {}
    for number, recording in enumerate(recordings):
        step: Binding = dict(loaded) if recording is recordings[0] else {}
        for micro_batch in range(micro_batches):
            part = "first" if micro_batch == 0 else "next"
            label = f"step {number + 1}" + (f", micro-batch {micro_batch + 1}" if micro_batches > 1 else "")
            play(stream, recording.stream, recording.parts[part], step, label=label)
        part = "first" if number == 0 else "steady"
        _bind_gradients(states, step, recording, optimizer, part)
        play(stream, optimizer.stream, optimizer.parts[part], states, label=f"step {number + 1}: optimizer")
    stream.mark("end")
    return stream


def compose_parts(recording: Recording, parts: Sequence[str]) -> EventStream:
    """Parts as they were recorded, such as "load" and "evaluate", one after the other."""
    stream = EventStream()
    bound: Binding = {}
    for part in parts:
        play(stream, recording.stream, recording.parts[part], bound, label=part)
    stream.mark("end")
    return stream


def with_workspaces(stream: EventStream, num_bytes: int) -> EventStream:
    """The stream with cuBLAS' workspaces: one for the thread of the forward pass, one for that of the backward pass.

    Each is born with the first matrix product of its thread, and stays.
    """
    out = EventStream(sizes=list(stream.sizes), categories=list(stream.categories))
    marks = list(reversed(stream.marks))
    wanting = {True, False}
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        while marks and marks[-1][0] <= position:
            out.mark(marks.pop()[1])
        is_backward = place.phase == "backward"
        if is_backward in wanting and place.operator in CUBLAS_OPERATORS and place.phase != "load":
            wanting.discard(is_backward)
            out.birth(num_bytes, "workspace", place)
        out.storages.append(storage)
        out.places.append(place)
    while marks:
        out.mark(marks.pop()[1])
    return out


def play(
    stream: EventStream, recorded: EventStream, part: tuple[int, int], bound: Binding, *, label: str | None = None
) -> None:
    """Append a part of a recorded stream. bound: storages of earlier parts; those born here are added."""
    if label is not None:
        stream.mark(label)
    sizes, categories = recorded.sizes, recorded.categories
    for position in range(*part):
        storage, place = recorded.storages[position], recorded.places[position]
        if storage >= 0:
            bound[storage] = stream.birth(sizes[storage], categories[storage], place)
        else:
            stream.death(bound.pop(~storage), place)


def _bind_gradients(
    states: Binding, step: Binding, recording: Recording, optimizer: OptimizerRecording, part: str
) -> None:
    """The gradients that the update drops are those that the micro-batches made."""
    for weight, number in zip(recording.trained, optimizer.gradients[part], strict=True):
        if number is not None:
            assert weight.gradient is not None
            states[number] = step.pop(weight.gradient)
