"""Read a recorded stream as passes over the decoder layers, with what lies between them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby

from brim.memory.events import EventStream


class NotUniformError(Exception):
    """Report that the recorded layers do not repeat, so that all of them have to be recorded."""


@dataclass(slots=True)
class Segment:
    """Hold consecutive events that belong to one layer, or to none."""

    layer: int | None
    events: list[int]  # positions in the recorded stream


@dataclass(slots=True)
class Pass:
    """Hold segments over all layers in order, up or down; or one segment of no layer."""

    segments: list[Segment]

    @property
    def is_over_layers(self) -> bool:
        return self.segments[0].layer is not None

    @property
    def start(self) -> int:
        """Return the position of its first event."""
        return next(segment.events[0] for segment in self.segments if segment.events)


def passes_over_layers(stream: EventStream, num_layers: int) -> list[Pass]:
    """Divide the whole stream into passes. Raises NotUniformError where the layers come in another order."""
    segments = _segments(stream, num_layers)
    passes: list[Pass] = []
    position = 0
    while position < len(segments):
        if segments[position].layer is None:
            passes.append(Pass([segments[position]]))
            position += 1
            continue
        run = segments[position : position + num_layers]
        numbers = [segment.layer for segment in run]
        if numbers not in (list(range(num_layers)), list(reversed(range(num_layers)))):
            raise NotUniformError(f"layers come in the order {numbers}")
        passes.append(Pass(run))
        position += num_layers
    return passes


def _segments(stream: EventStream, num_layers: int) -> list[Segment]:
    """Divide the stream into segments; outside the layers, a death belongs to the layer of its birth.

    Gradients that are dropped die so. What happens between a layer and the next one belongs to the first of the two. A
    mark begins a segment.
    """
    runs = _runs(stream)
    merged: list[_Run] = []
    following = _following(runs)
    for run, after in zip(runs, following, strict=True):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.section == run.section
            and ((last.layer == run.layer and last.inside == run.inside) or _is_between(last, run, after))
        ):
            last.events.extend(run.events)
        else:
            merged.append(run)
    return [
        segment
        for inside, streak in groupby(merged, key=lambda run: (run.inside, run.section))
        for segment in (
            [Segment(run.layer, run.events) for run in streak] if inside[0] else _outside(list(streak), num_layers)
        )
    ]


@dataclass(slots=True)
class _Run:
    """Hold consecutive events of the same kind."""

    section: tuple[int, str]  # marks before it, and the phase
    layer: int | None
    inside: bool  # a module of that layer runs
    events: list[int]


def _outside(streak: list[_Run], num_layers: int) -> list[Segment]:
    """Make runs outside the layers segments: of a layer each where deaths come in the layers' order, else of none.

    It may be the first layers alone, as with autocast's copies of weights, which die at once where only what is
    recomputed needs them; the others have nothing in such a pass.
    """
    segments: list[Segment] = []
    position = 0
    while position < len(streak):
        run = _in_order(streak[position : position + num_layers])
        if len(run) in (*range(_FEWEST, num_layers), num_layers):
            rest = [Segment(layer, []) for layer in range(len(run), num_layers)]
            found = [Segment(each.layer, each.events) for each in run]
            segments.extend([*found, *rest] if run[0].layer == 0 else [*rest[::-1], *found])
            position += len(run)
            continue
        if segments and segments[-1].layer is None:
            segments[-1].events.extend(streak[position].events)
        else:
            segments.append(Segment(None, list(streak[position].events)))
        position += 1
    return segments


_FEWEST = 3  # first layers: the first one and two that are alike


def _in_order(streak: list[_Run]) -> list[_Run]:
    """Return the runs at the beginning that are of the first layers, up from layer 0 or down to it; [] for none."""
    first = streak[0].layer
    if first is None:
        return []
    wanted = range(len(streak)) if first == 0 else range(first, -1, -1)
    matching = [each.layer == layer for each, layer in zip(streak, wanted, strict=False)]
    length = [*matching, False].index(False)
    return streak[:length] if first == 0 or length == first + 1 else []


def _runs(stream: EventStream) -> list[_Run]:
    born_in = _born_in(stream)
    marked = [position for position, _ in stream.marks]
    runs: list[_Run] = []
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        inside = place.layer is not None
        layer = place.layer if inside or storage >= 0 else born_in[~storage]
        section = (bisect_right(marked, position), place.phase)
        last = runs[-1] if runs else None
        if last is not None and (last.section, last.layer, last.inside) == (section, layer, inside):
            last.events.append(position)
        else:
            runs.append(_Run(section, layer, inside, [position]))
    return runs


def _following(runs: list[_Run]) -> list[_Run | None]:
    """Return, for each run, the next one inside a layer."""
    following: list[_Run | None] = []
    after: _Run | None = None
    for run in reversed(runs):
        following.append(after)
        after = run if run.inside else after
    return following[::-1]


def _is_between(last: _Run, run: _Run, after: _Run | None) -> bool:
    """Return whether a run lies between a layer's end and the beginning of its neighbour in the same pass."""
    if run.inside or not last.inside or after is None or after.section != run.section:
        return False
    assert last.layer is not None
    assert after.layer is not None
    return abs(after.layer - last.layer) == 1


def _born_in(stream: EventStream) -> list[int | None]:
    """Return, for each storage, the layer whose module ran when it was born."""
    layers: list[int | None] = [None] * len(stream.sizes)
    for storage, place in zip(stream.storages, stream.places, strict=True):
        if storage >= 0:
            layers[storage] = place.layer
    return layers
