"""Compose the streams of whole generations from what was traced of them.

Of transformers' `generate`, steps between the traced ones are interpolated; of brim's own engine, the cache and the two
passes that take the most memory are put together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from brim.infer.engines import USUAL_PASS_TOKENS, CacheShape
from brim.memory.events import EventStream
from brim.memory.generation.passes import DECODE, FILL, PREFILL, TRACED_TOKENS
from brim.memory.trace import Binding, Recording, Workload, play, record


def brim_stream(
    slots: Callable[[CacheShape], Workload], rows: int, tokens: int, *, new_tokens: int
) -> tuple[EventStream, Recording]:
    """Compose brim's own engine: the load, the cache, a pass over prompts and the last token of all rows.

    Returns the stream and the recording that it is composed of. slots: the workload of a cache. rows, tokens: prompts,
    and the tokens of each. The tokens between the first and the last take less.
    """
    shape = CacheShape(
        rows=rows,
        columns=tokens + new_tokens - 1,
        prompts=min(rows, max(1, USUAL_PASS_TOKENS // tokens)),
        prompt_tokens=tokens,
    )
    recording = record(slots(shape), rows=rows, tokens=tokens)
    parts = {"load": "load", FILL: "cache", PREFILL: "prompts", DECODE: f"token {new_tokens}"}
    if new_tokens == 1:
        del parts[DECODE]
    stream = EventStream()
    bound: Binding = {}
    for part, label in parts.items():
        play(stream, recording.stream, recording.parts[part], bound, label=label)
    stream.mark("end")
    return stream, recording


_SPECIAL_LENGTHS = 4  # one of eight consecutive lengths is special, and three of them are traced


def static_stream(traced: Workload, rows: int, tokens: int, *, new_tokens: int) -> tuple[EventStream, Recording]:
    """Compose transformers' `generate` from recordings at the prompts' length and where the last tokens are written."""
    early = record(traced, rows=rows, tokens=tokens)
    further = new_tokens - TRACED_TOKENS
    if further <= 0:
        return compose_generation(early, early, new_tokens=new_tokens), early
    for more in range(_SPECIAL_LENGTHS):  # prompts are a few tokens longer where a length is special
        if more:
            early = record(traced, rows=rows, tokens=tokens + more)
        for after in (0, 1):
            late = record(traced, rows=rows, tokens=tokens + further + after)
            with suppress(UnlikeStepsError):
                return compose_generation(early, late, new_tokens=new_tokens), early
    raise UnlikeStepsError(f"no lengths from {tokens} tokens on are alike")


_LEAST_BYTES = 2**20  # smaller requests come from the allocator's small blocks, and matter only in the largest step


class UnlikeStepsError(Exception):
    """Report a step that is unlike others: kernels pad their masks, but not those whose length is a multiple of 8."""


def compose_generation(early: Recording, late: Recording, *, new_tokens: int) -> EventStream:
    """Compose the load, the prompts, and one step for each further token.

    early: recorded at the prompts' length. late: recorded at a length where the last traced step is the last of all,
    so that the largest step is exact. Between the two, sizes are interpolated, and what is small and freed within its
    step is left out.

    Raises UnlikeStepsError where one of the recorded lengths is a special one.
    """
    stream = EventStream()
    writer = _Steps(stream, early, late)
    writer.play("load", "load")
    writer.play("prefill", "prefill")
    steps = new_tokens - 1
    for step in range(1, min(steps, TRACED_TOKENS - 1) + 1):
        writer.play(f"decode {step}", f"token {step + 1}")
    for step in range(TRACED_TOKENS, steps + 1):
        writer.repeat(step, steps)
    stream.mark("end")
    return stream


class _Steps:
    """Write decode steps one after the other."""

    def __init__(self, stream: EventStream, early: Recording, late: Recording) -> None:
        self._stream = stream
        self._early, self._late = early.stream, late.stream
        self._parts, self._late_parts = early.parts, late.parts
        self._bound: dict[int, int] = {}
        # The storages that were born in the two steps before, in order.
        self._before: list[int] = []
        self._before_that: list[int] = []
        self._transient: set[int] | None = None

    def play(self, part: str, label: str) -> None:
        """Write a part as it was recorded."""
        self._stream.mark(label)
        self._before_that, self._before = self._before, []
        for position in range(*self._parts[part]):
            storage, place = self._early.storages[position], self._early.places[position]
            if storage >= 0:
                number = self._stream.birth(self._early.sizes[storage], self._early.categories[storage], place)
                self._bound[storage] = number
                self._before.append(number)
            else:
                self._stream.death(self._bound.pop(~storage), place)

    def repeat(self, step: int, last: int) -> None:
        """Write the last recorded step again, as step `step` of `last`."""
        part = f"decode {TRACED_TOKENS - 1}"
        start, end = self._parts[part]
        births = self._births(self._early, (start, end))
        late = self._births(self._late, self._late_parts[part])
        earlier = self._births(self._early, self._parts[f"decode {TRACED_TOKENS - 2}"])
        if not len(births) == len(late) == len(earlier) == len(self._before):
            raise UnlikeStepsError("the traced steps differ")
        share = (step - TRACED_TOKENS + 1) / (last - TRACED_TOKENS + 1)
        ordinal_before = {storage: ordinal for ordinal, storage in enumerate(earlier)}
        oldest = self._births(self._early, self._parts[f"decode {TRACED_TOKENS - 3}"])
        # Counted from the end, since that step begins differently.
        from_end = {storage: index - len(oldest) for index, storage in enumerate(oldest)}
        ordinal = {storage: index for index, storage in enumerate(births)}
        skipped = self._passing(start, end) if step < last else set()
        own: list[int] = [-1] * len(births)
        self._stream.mark(f"token {step + 1}")
        for position in range(start, end):
            storage, place = self._early.storages[position], self._early.places[position]
            if storage >= 0:
                index = ordinal[storage]
                size = self._early.sizes[storage]
                size += round(share * (self._late.sizes[late[index]] - size))
                if storage not in skipped or size >= _LEAST_BYTES:
                    own[index] = self._stream.birth(size, self._early.categories[storage], place)
            elif ~storage in ordinal:
                if own[ordinal[~storage]] >= 0:
                    self._stream.death(own[ordinal[~storage]], place)
            elif ~storage in ordinal_before:
                self._stream.death(self._before[ordinal_before[~storage]], place)
            else:
                self._stream.death(self._before_that[from_end[~storage]], place)
        self._before_that, self._before = self._before, own

    def _births(self, stream: EventStream, part: tuple[int, int]) -> list[int]:
        return [stream.storages[position] for position in range(*part) if stream.storages[position] >= 0]

    def _passing(self, start: int, end: int) -> set[int]:
        """Return the storages that are born and freed within the step."""
        if self._transient is None:
            within = self._early.storages[start:end]
            self._transient = {storage for storage in within if storage >= 0} & {~each for each in within if each < 0}
        return self._transient
