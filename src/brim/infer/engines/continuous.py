"""Generate with continuous batching: rows that have ended leave at once, and waiting rows take their place.

This is brim's own engine. Prompts wait for their response, the longest first; the chapter decides when waiting rows
take the place of those that have ended, which of them are read in one pass, and with which models and settings the
engine can generate at all. transformers' `generate` does the others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from brim.batching.memory import OutOfMemory, attempt, free_caches
from brim.data.tokens import TokenRows
from brim.infer.engines.base import Finished, LocalEngine, OnFinished, Response
from brim.infer.engines.batching import Smaller, longest_first, too_large
from brim.infer.engines.cache import Passes
from brim.infer.engines.capacity import FixedRoom, Room
from brim.infer.engines.sampling import NextToken, Writing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_NOTABLY = 1.125  # times the rows, or the cache is not laid out again, which copies it once


_ONE_BY_ONE = FixedRoom(1, prefill_tokens=1)


@dataclass(slots=True, kw_only=True)
class RunStatistics:
    """Count what a run of the engine consisted of."""

    num_prefills: int = 0
    num_steps: int = 0  # of all rows that were in
    num_row_steps: int = 0
    most_rows: int = 0
    num_layouts: int = 0
    num_out_of_memory: int = 0

    @property
    def mean_rows(self) -> float:
        """Return the rows of a step, in the mean."""
        return self.num_row_steps / self.num_steps if self.num_steps else 0.0


class SlotsEngine(LocalEngine):
    """Write responses with continuous batching: brim's own engine."""

    name = "slots"
    statistics = RunStatistics()  # of the last run

    @staticmethod
    def why_not(
        config: PretrainedConfig, settings: Mapping[str, Any], architecture: type[PreTrainedModel] | None = None
    ) -> str:
        """Return the reason against this engine, or an empty text.

        settings: what `generation_settings` gives. architecture: the model's class; None: the one that transformers
        would load for this configuration, and for a class of the folder's own a plain decoder.
        """
        return _settings(settings) or _architecture(architecture or _model_class(config), config)

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """Respond to every prompt once, as Engine.run does."""
        self._model.eval()
        self.statistics = RunStatistics()
        queue = Queue(prompts, max_new_tokens=self._settings["max_new_tokens"])
        last: _Shape | None = None
        room = _ONE_BY_ONE if len(prompts) > 1 and self._rows_go_alone(prompts) else self._room
        while queue:
            shape = self._generate(queue, room, on_finished, last)
            if shape is not None:
                free_caches()
                self.statistics.num_out_of_memory += 1
                self._shrink(shape, last)
                last = shape

    def _generate(self, queue: Queue, room: Room, on_finished: OnFinished, last: _Shape | None) -> _Shape | None:
        """Respond to all that wait. Where memory runs out, put back what is not done, and return what was too much.

        last: what was too much before.
        """
        chooser = NextToken(self._settings, seed=self._seed, device=self._device, constraint=self._constraint)
        how: Any = {"precision": self._precision, "packed": self._packed}
        passes = partial(Passes, self._model, device=self._device, **how)
        run = _Run(queue, passes, chooser, room=room, settings=self._settings, statistics=self.statistics)
        responses = run.to_the_end()
        while True:
            # What the receiver of the responses raises passes.
            finished = attempt(lambda: next(responses, None), is_last=lambda: run.shape().is_alone_again(last))
            if finished is None:
                return None
            if isinstance(finished, OutOfMemory):
                shape = run.shape()
                queue.give_back(run.rows)
                return shape
            on_finished(finished)

    def _shrink(self, shape: _Shape, before: _Shape | None) -> None:
        """Let fewer rows go on together; a row alone gets one more try."""
        if len(shape.keys) > 1:
            self._room.shrink(rows=shape.rows, columns=shape.columns)
            after = min(self._room.rows(shape.columns), len(shape.keys))
            self._on_smaller(Smaller(doing="generation", keys=shape.keys, longest=shape.longest, after=after))
        elif shape.is_alone_again(before):
            raise too_large(key=shape.keys[0], num_tokens=shape.longest, doing="generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Describe a cache that ran out of memory."""

    rows: int
    columns: int
    keys: tuple[int, ...]  # of the rows that were in, or about to be
    longest: int  # tokens that a row has

    def is_alone_again(self, before: _Shape | None) -> bool:
        """Say whether it is of one row, which has not come further than before."""
        return before is not None and (self.keys, self.longest) == (before.keys, before.longest) and len(self.keys) == 1


class _Run:
    """Run one cache, from its first prompts to its last token."""

    def __init__(
        self,
        queue: Queue,
        passes: Callable[..., Passes],
        chooser: NextToken,
        *,
        room: Room,
        settings: Mapping[str, Any],
        statistics: RunStatistics,
    ) -> None:
        self._queue, self._chooser, self._room = queue, chooser, room
        self._end_ids, self._statistics = frozenset(settings["eos_token_id"]), statistics
        self._active: list[Writing] = []  # in the order of their slots; each has a token that the cache lacks
        self._entering: list[Writing] = []  # taken from the queue, not read yet
        rows, columns, cells = queue.first_shape(room)
        self._passes = passes(rows=rows, columns=columns, cells=cells, pad_id=settings["pad_token_id"])
        self._cache = self._passes.cache

    @property
    def rows(self) -> list[Writing]:
        """Return what is being written, which can go on later from where it stands."""
        return [*self._active, *self._entering]

    def shape(self) -> _Shape:
        """Return the shape of the cache, and the rows that are in or about to be."""
        return _Shape(
            rows=max(self._rows(self._cache.columns), 1),
            columns=self._cache.columns,
            keys=tuple(row.key for row in self.rows),
            longest=max((len(row.prompt) + len(row.generated) for row in self.rows), default=0),
        )

    @torch.inference_mode()
    def to_the_end(self) -> Iterator[list[Finished]]:
        """Respond to all that wait; yield the responses as they end."""
        while self._queue or self._active:
            layout = self._layout()
            yield from self._enter(layout) if self._may_enter(layout) else self._step()

    def _layout(self) -> int:
        """Return the columns: as many as there are, or, where notably more rows fit then, as few as are needed."""
        columns = self._cache.columns
        if not self._queue:
            return columns
        needed = self._queue.columns(self._active)
        return needed if self._rows(needed) >= _NOTABLY * self._rows(columns) else columns

    def _rows(self, columns: int) -> int:
        return min(self._room.rows(columns, cells=self._cache.cells), self._cache.cells // columns)

    def _may_enter(self, columns: int) -> bool:
        if not self._active:
            return True
        if not self._queue:
            return False
        rows = self._rows(columns)
        wanted = min(rows_to_wait_for(rows, self._queue.response_tokens), len(self._queue))
        return rows - len(self._active) >= wanted

    def _enter(self, columns: int) -> Iterator[list[Finished]]:
        """Fill the free slots with the longest that wait."""
        self._entering = self._queue.take(self._rows(columns) - len(self._active))
        lengths = [len(row.prompt) + len(row.generated) for row in self._entering]
        if not self._active or columns != self._cache.columns or self._cache.end < max(lengths):
            self._lay_out(columns=columns, end=max(self._cache.window, *lengths))
        is_packed = self._passes.is_packed
        for group in prefill_groups(lengths, most_tokens=self._room.prefill_tokens, is_packed=is_packed):
            rows = self._entering[: len(group)]
            logits = self._passes.prefill([row.tokens for row in rows])
            self._entering = self._entering[len(group) :]
            self._active += rows
            self._statistics.num_prefills += 1
            self._statistics.most_rows = max(self._statistics.most_rows, len(self._active))
            yield from self._write(logits, rows)
            del logits  # the next prompts are read without them

    def _step(self) -> Iterator[list[Finished]]:
        """Write a token of every row."""
        if self._cache.end == self._cache.columns:
            self._lay_out(columns=self._cache.columns, end=self._cache.window)
        logits = self._passes.decode([row.generated[-1] for row in self._active])
        self._statistics.num_steps += 1
        self._statistics.num_row_steps += len(self._active)
        yield from self._write(logits, list(self._active))

    def _lay_out(self, *, columns: int, end: int) -> None:
        self._cache.lay_out(columns=columns, end=end)
        self._statistics.num_layouts += 1

    def _write(self, logits: Tensor, rows: Sequence[Writing]) -> Iterator[list[Finished]]:
        """Choose the next token of these rows, the last ones that are in; those that end leave."""
        tokens = self._chooser.choose(logits, rows)
        finished, free = [], []
        first_slot = len(self._active) - len(rows)
        for number in reversed(range(len(rows))):
            row, token = rows[number], tokens[number]
            response = self._response(row, token)
            if response is not None:
                finished.append(Finished(position=row.position, response=response))
                free.append(first_slot + number)
                self._leave(first_slot + number)
        if finished:
            yield finished
        for slot in free:  # after the yield: if memory runs out here, too, no response is lost
            self._cache.remove(slot)

    def _response(self, row: Writing, token: int) -> Response | None:
        if token in self._end_ids:
            return Response(token_ids=row.generated, finish_reason="stop", end_id=token)
        row.generated.append(token)
        if len(row.generated) == self._chooser.max_new_tokens:
            return Response(token_ids=row.generated, finish_reason="length")
        forced = self._chooser.forced(row)
        if forced in self._end_ids:  # which needs no pass to be known
            return Response(token_ids=row.generated, finish_reason="stop", end_id=forced)
        return None

    def _leave(self, slot: int) -> None:
        """Take a row out; the last one moves into its slot."""
        row, last = self._active[slot], self._active.pop()
        if row is not last:
            self._active[slot] = last
        self._queue.finish(row)
        self._chooser.forget(row)


_LOOKED_AT = (0.0, 0.25, 0.5, 0.75)  # of the prompts, in their order: where the cache may hold the most


class Queue:
    """Order waiting rows by the columns that they need, and track how long responses have been so far."""

    def __init__(self, prompts: TokenRows, *, max_new_tokens: int) -> None:
        self._prompts, self._max_new_tokens = prompts, max_new_tokens
        self._order, self._lengths = longest_first(prompts), prompts.lengths
        self._next = 0  # in the order
        self._returned: list[Writing] = []  # the longest prompt first
        self._num_finished = self._sum_tokens = 0

    def __len__(self) -> int:
        return len(self._order) - self._next + len(self._returned)

    @property
    def response_tokens(self) -> float:
        """Return the mean length of a response; before any has ended, as many as there may be."""
        return (self._sum_tokens + self._max_new_tokens) / (self._num_finished + 1)

    def take(self, count: int) -> list[Writing]:
        """Return the longest `count` rows that wait, or all."""
        return [self._pop() for _ in range(min(count, len(self)))]

    def give_back(self, rows: Sequence[Writing]) -> None:
        """Take back rows that go on later, with what they have."""
        self._returned = sorted([*self._returned, *rows], key=lambda row: -len(row.prompt))

    def finish(self, row: Writing) -> None:
        """Count a row that has its response."""
        self._num_finished += 1
        self._sum_tokens += len(row.generated)

    def columns(self, active: Sequence[Writing] = ()) -> int:
        """Return the columns that a cache must have for these rows and for the next one that waits."""
        waiting = [self._longest_waiting()] if len(self) else []
        return self._needed(max([*waiting, *(len(row.prompt) for row in active)]))

    def first_shape(self, room: Room) -> tuple[int, int, int]:
        """Return rows, columns and cells of a cache to begin with.

        cells: the most that rows × columns will be: where prompts become shorter, more of them fit.
        """
        columns = self.columns()
        rows = min(room.rows(columns), len(self))
        cells = rows * columns
        for share in _LOOKED_AT:
            position = self._next + int(share * (len(self._order) - self._next))
            if position < len(self._order):
                shorter = self._needed(int(self._lengths[self._order[position]]))
                cells = max(cells, min(room.rows(shorter), len(self._order) - position) * shorter)
        if room.rows(columns, cells=cells) < rows:  # beside so many cells, the longest prompts would not fit
            cells = rows * columns
        return min(room.rows(columns, cells=cells), cells // columns), columns, cells

    def _needed(self, prompt_tokens: int) -> int:
        """Return the columns for a prompt and its response, whose last token is not read."""
        return prompt_tokens + self._max_new_tokens - 1

    def _longest_waiting(self) -> int:
        fresh = int(self._lengths[self._order[self._next]]) if self._next < len(self._order) else 0
        return max(fresh, len(self._returned[0].prompt) if self._returned else 0)

    def _pop(self) -> Writing:
        if self._returned and len(self._returned[0].prompt) >= self._longest_waiting():
            return self._returned.pop(0)
        position = int(self._order[self._next])
        self._next += 1
        row = self._prompts[position]
        ids = np.asarray(row.input_ids)[: row.num_prompt_tokens]
        return Writing(position=position, key=int(row.key), prompt=ids.tolist())


def rows_to_wait_for(rows: int, response_tokens: float) -> int:
    """Return the free slots at which it pays to fill them, in a cache of so many rows; at least 1.

    A pass over prompts reads the weights once more, as a step of all rows does: with k rows a pass, a response of
    `response_tokens` steps shares R / (k · response_tokens) of it per step. Until then k / 2 of R slots stand empty in
    the mean. The sum is least at k = R · sqrt(2 / response_tokens).
    """
    best = rows * math.sqrt(2 / max(response_tokens, 1.0))
    return max(1, min(round(best), rows // 2))


def prefill_groups(lengths: Sequence[int], *, most_tokens: int, is_packed: bool = False) -> list[range]:
    """Return neighbours that are read together, of at most `most_tokens`, or each one row alone.

    A group has rows × longest tokens; where rows are packed, which takes no padding, the sum of theirs.
    """
    groups: list[range] = []
    start, longest, total = 0, 0, 0
    for position, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        tokens = total if is_packed else (position + 1 - start) * longest
        if position > start and tokens > most_tokens:
            groups.append(range(start, position))
            start, longest, total = position, length, length
    return [*groups, range(start, len(lengths))] if lengths else []


_NOT_OURS = {
    "guidance_scale": "classifier-free guidance runs the model twice",
    "prompt_lookup_num_tokens": "prompt lookup writes several tokens at once",
    "max_time": "a limit of time needs a batch that stays together",
}


def _settings(settings: Mapping[str, Any]) -> str:
    if settings.get("num_beams", 1) > 1:
        return "generation.num_beams: beams stay together"
    if settings.get("use_cache") is False:
        return "generation.use_cache is false"
    for name, reason in _NOT_OURS.items():
        if settings.get(name) is not None:
            return f"generation.{name}: {reason}"
    return ""


def _architecture(architecture: type[PreTrainedModel], config: PretrainedConfig) -> str:
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    name = architecture.__name__
    if config.is_encoder_decoder:
        return f"{name} reads the prompt with an encoder"
    if architecture._is_stateful or not architecture._supports_default_dynamic_cache():
        return f"{name} keeps a state that is not keys and values"
    if "past_key_values" not in inspect.signature(architecture.forward).parameters:
        return f"{name} keeps nothing of earlier tokens"
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    others = kinds - {DynamicLayer, DynamicSlidingWindowLayer}
    if others:
        return f"{name} keeps more than keys and values ({', '.join(sorted(kind.__name__ for kind in others))})"
    return ""


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    return cast("type[PreTrainedModel]", found[0] if isinstance(found, tuple) else found)
