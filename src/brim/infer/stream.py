"""Stream one response, token by token as it is made.

The text of tokens that arrive one after the other comes in pieces that join up to the text of all of them. The keys
and values of the one row are kept from one response to the next: what a prompt has in common with them is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brim.batching.memory import OutOfMemory, attempt, free_caches
from brim.data.tokens import TextEncoder
from brim.errors import OutOfMemoryError
from brim.infer.engines import FinishReason, LabelConstraint, NextToken, Passes, Writing
from brim.models import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character, or are not all there yet


_UNASSIGNED = "\U000e1000"  # no vocabulary has a token for it: where bytes are tokens, its last one is an inner byte


class GrowingText:
    """Say of each token what it adds to the text; what a later token could still change is held back.

    A character may take several tokens, and a tokenizer that falls back to bytes throws away all of a run of them when
    the last ones are no character. So text counts as settled only when a stray byte behind it would not change it.
    Special tokens have no text. Only the last few tokens are decoded each time.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._decode = partial(encoder.decode, skip_special_tokens=True)
        (tokens,) = encoder.encode([_UNASSIGNED], special_tokens=False)
        self._stray = tokens[-1:]
        self._tokens: list[int] = []  # the last ones: those of the piece before, and what came since
        self._num_before = 0  # of them, belonging to the piece before
        self._num_given = 0  # characters of their text

    def add(self, token_id: int) -> str:
        """Return the text that is settled now that this token has come."""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        certain = _num_in_common(text, self._decode([*self._tokens, *self._stray]))
        settled = text[:certain].rstrip(_REPLACEMENT)
        piece = settled[self._num_given :]
        if piece and settled == text:
            self._tokens, self._num_before = self._tokens[self._num_before :], len(self._tokens) - self._num_before
            self._num_given = len(self._decode(self._tokens))
        else:
            self._num_given += len(piece)
        return piece

    def rest(self) -> str:
        """Return what was held back, now that no token follows."""
        return self._decode(self._tokens)[self._num_given :]


def stream_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    settings: Mapping[str, Any],
    seed: int,
    device: torch.device,
    precision: Precision,
    key: int = 0,
    constraint: LabelConstraint | None = None,
    kept: KeptCache | None = None,
) -> Generator[int, None, FinishReason]:
    """Yield the tokens of the response that SlotsEngine writes for a row of this key, without the one that ends it.

    prompt: at least one token. The generator's own result is the reason for the end. Raises InputError at once for
    settings that are refused. The cache is freed when the last token has been given, when the generator is closed or
    dropped, and when it raises: OutOfMemoryError for a prompt that memory does not suffice for, BrimError for scores
    that are not finite. kept: what earlier prompts have in common with this one is not read again, and then the cache
    stays.
    """
    row = Writing(position=0, key=key, prompt=list(prompt))
    chooser = NextToken(settings, seed=seed, device=device, constraint=constraint)
    model.eval()
    begin = partial(Passes, model, rows=1, pad_id=settings["pad_token_id"], device=device, precision=precision)
    return _tokens(row, chooser, begin, frozenset(settings["eos_token_id"]), kept)


def _tokens(
    row: Writing,
    chooser: NextToken,
    begin: Callable[..., Passes],
    end_ids: frozenset[int],
    kept: KeptCache | None,
) -> Generator[int, None, FinishReason]:
    cache = KeptCache(most_columns=_columns(row, chooser)) if kept is None else kept
    try:
        while len(row.generated) < chooser.max_new_tokens:
            token = attempt(lambda: _next(row, chooser, cache, begin))
            if isinstance(token, OutOfMemory):
                break
            if token in end_ids:
                return "stop"
            row.generated.append(token)
            yield token
        else:
            return "length"
    finally:
        if kept is None:
            cache.clear()
    free_caches()
    raise OutOfMemoryError(
        what=f"memory runs out over a single response (after {len(row.tokens):,} tokens, the prompt's among them)",
        fix="load the base in 4 bits (quantization.bits: 4), lower generation.max_new_tokens, or shorten the prompt",
    )


@torch.inference_mode()
def _next(row: Writing, chooser: NextToken, cache: KeptCache, begin: Callable[..., Passes]) -> int:
    """Choose the token that follows what has been written.

    The mode must not last across a `yield`: it would be the caller's, too.
    """
    if row.generated:
        logits = cache.write(row.generated[-1])
    else:
        logits = cache.read(row.prompt, columns=_columns(row, chooser), begin=begin)
    (token,) = chooser.choose(logits, [row])
    return token


def _columns(row: Writing, chooser: NextToken) -> int:
    """Return the columns of a prompt and its response, whose last token is not read."""
    return len(row.prompt) + chooser.max_new_tokens - 1


_HEADROOM = 2  # so that a conversation is read again only each time that it has become twice as long


class KeptCache:
    """Read prompts and write tokens, for one row. Not for several responses at the same time.

    most_columns: that the model's context allows; None: no limit. Its memory is given back by `clear`, and when a pass
    raises.
    """

    def __init__(self, *, most_columns: int | None = None) -> None:
        self._most_columns = most_columns
        self._passes: Passes | None = None
        self._tokens: list[int] = []  # whose keys and values are there

    def read(self, prompt: Sequence[int], *, columns: int, begin: Callable[..., Passes]) -> Tensor:
        """Return logits [1, V] of what follows the prompt. columns: for it and its response; begin: makes a cache."""
        num_known = min(_num_in_common(self._tokens, prompt), len(prompt) - 1)  # the last token has to be read
        if self._passes is not None and num_known and columns <= self._passes.cache.columns:
            with self._pass() as passes:
                passes.skip_to(num_known)
                logits = passes.extend(prompt[num_known:])
        else:
            self.clear()
            roomy = _HEADROOM * columns if self._most_columns is None else min(_HEADROOM * columns, self._most_columns)
            self._passes = begin(columns=max(roomy, columns))
            with self._pass() as passes:
                passes.cache.lay_out(columns=passes.cache.columns, end=len(prompt))
                logits = passes.prefill([prompt])
        self._tokens = list(prompt)
        return logits

    def write(self, token: int) -> Tensor:
        """Add a token; return logits [1, V] of what follows it."""
        with self._pass() as passes:
            logits = passes.decode([token])
        self._tokens.append(token)
        return logits

    def clear(self) -> None:
        """Give the memory back."""
        if self._passes is not None:
            self._passes.cache.layers.clear()  # at once, even where a traceback still holds the passes
        self._passes, self._tokens = None, []

    @contextmanager
    def _pass(self) -> Iterator[Passes]:
        assert self._passes is not None, "a prompt has been read"
        try:
            yield self._passes
        except BaseException:  # Ctrl-C, too: what is half written is useless
            self.clear()
            raise


def _num_in_common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
