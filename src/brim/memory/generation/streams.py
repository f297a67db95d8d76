"""Trace a generation, and compose the streams of whole generations from what was traced.

Of transformers' `generate`, the prompt and the first few tokens are traced, and steps between the traced ones are
interpolated. Of brim's engine, with a cache of R rows × C columns, the two passes that take the most memory are traced:
one over prompts into a full cache, one over the last token of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from brim.data.tokens import PromptBatch
from brim.infer.engines import CacheShape, NextToken, Passes, Writing
from brim.memory.events import EventStream
from brim.memory.trace import Binding, Recording, Workload, play, record
from brim.models import Precision
from brim.models.packing import PackedAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def brim_stream(
    slots: Callable[[CacheShape], Workload], rows: int, tokens: int, *, new_tokens: int, pass_tokens: int
) -> tuple[EventStream, Recording]:
    """Compose brim's own engine: the load, the cache, a pass over prompts and the last token of all rows.

    Returns the stream and the recording that it is composed of. slots: the workload of a cache. rows, tokens: prompts,
    and the tokens of each; pass_tokens: that are read together. The tokens between the first and the last take less.
    """
    shape = CacheShape(
        rows=rows,
        columns=tokens + new_tokens - 1,
        prompts=min(rows, max(1, pass_tokens // tokens)),
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
        dying = {~storage for storage in self._early.storages[start:end] if storage < 0}
        passing = dying.intersection(births) if step < last else set()  # born and freed within the step
        own: list[int] = [-1] * len(births)
        self._stream.mark(f"token {step + 1}")
        for position in range(start, end):
            storage, place = self._early.storages[position], self._early.places[position]
            if storage >= 0:
                index = ordinal[storage]
                size = self._early.sizes[storage]
                size += round(share * (self._late.sizes[late[index]] - size))
                if storage not in passing or size >= _LEAST_BYTES:
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


_CPU = torch.device("cpu")


def slots_at_their_peak(
    model: PreTrainedModel,
    shape: CacheShape,
    settings: Mapping[str, Any],
    precision: Precision,
    begin: Callable[[str], None],
    *,
    packed: PackedAttention | None = None,
) -> None:
    """Run `peak_passes` on fake tensors. settings: what `generation_settings` returns. packed: as `Passes` takes it."""
    # from_numpy would make a real tensor of an array's memory.
    with values_of_fakes(), patch.object(torch, "from_numpy", torch.tensor), torch.no_grad():
        sizes = {"rows": shape.rows, "columns": shape.columns}
        passes = Passes(model, **sizes, pad_id=0, device=_CPU, precision=precision, packed=packed)
        chooser = NextToken(settings, seed=0, device=_CPU)
        peak_passes(passes, chooser, shape, begin=begin)


FILL, PREFILL, DECODE = "prefill 1", "prefill 2", "decode"


def peak_passes(
    passes: Passes,
    chooser: NextToken,
    shape: CacheShape,
    *,
    token_id: int = 0,
    begin: Callable[[str], None] = lambda label: None,
) -> None:
    """Reach the peak of a job in a few passes: those that are left out take less.

    passes: unused, with the shape's rows and columns. begin: called with FILL, when the cache is made, then with
    PREFILL and DECODE.
    """
    cache = passes.cache
    begin(FILL)
    cache.lay_out(columns=shape.columns, end=shape.prompt_tokens)
    passes.prefill([[token_id]])
    cache.remove(0)
    cache.touch()
    begin(PREFILL)
    prompt = [token_id] * shape.prompt_tokens
    writing = [Writing(position=number, key=number, prompt=prompt) for number in range(shape.rows)]
    logits = passes.prefill([prompt] * shape.prompts)
    chooser.choose(logits, writing[: shape.prompts])
    del logits
    begin(DECODE)
    cache.starts = [0] * shape.rows
    passes.skip_to(shape.columns - 1)
    for row in writing:
        row.generated = [token_id] * (chooser.max_new_tokens - 1)
    chooser.choose(passes.decode([token_id] * shape.rows), writing)
    begin("over")


TRACED_TOKENS = 4  # the pass over the prompt gives the first; a first step and two steps that are alike follow


class _Enough(Exception):
    """End a generation when as many tokens as are traced have been generated."""


def generate_some(
    model: PreTrainedModel, batch: PromptBatch, settings: Mapping[str, Any], begin: Callable[[str], None]
) -> None:
    """Generate up to TRACED_TOKENS. begin: called with "prefill", then "decode 1" and so on."""
    from transformers import GenerationConfig, StoppingCriteria

    new_tokens = min(TRACED_TOKENS, settings["max_new_tokens"])

    class Begin(StoppingCriteria):  # type: ignore[misc]
        """Begin the next part of the trace; transformers calls it after each token."""

        def __init__(self) -> None:
            self.num_tokens = 0

        def __call__(self, input_ids: Tensor, scores: Any, **given: Any) -> Tensor:
            self.num_tokens += 1
            if self.num_tokens == new_tokens:
                begin("over")
                raise _Enough
            begin(f"decode {self.num_tokens}")
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    begin("prefill")
    with torch.no_grad(), values_of_fakes(), suppress(_Enough):
        model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            generation_config=GenerationConfig(**settings),
            stopping_criteria=[Begin()],
        )


@contextmanager
def values_of_fakes() -> Iterator[None]:
    """Answer where generation asks whether it is finished, and for tokens' values; no shape depends on them."""
    from transformers import GenerationMixin

    unfinished = GenerationMixin._beam_search_has_unfinished_sequences

    def always_unfinished(*args: Any, **kwargs: Any) -> bool:
        unfinished(*args, **kwargs)
        return True

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(GenerationMixin, "_beam_search_has_unfinished_sequences", staticmethod(always_unfinished))
        )
        for name, answer in (
            ("__bool__", lambda tensor: False),
            ("item", lambda tensor: 0),
            ("tolist", lambda tensor: [0] * tensor.numel()),
        ):
            stack.enter_context(patch.object(FakeTensor, name, answer))
        yield


def full_prompts(rows: int, tokens: int) -> PromptBatch:
    """Return prompts of one length."""
    shape = (rows, tokens)
    return PromptBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64), attention_mask=torch.ones(shape, dtype=torch.int64)
    )
