"""One response, token by token as it is made."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from brim.batching.caches import free_caches
from brim.batching.oom import is_out_of_memory
from brim.errors import OutOfMemoryError, Problem
from brim.infer.engine import Constraint
from brim.infer.explained import explained
from brim.infer.kept_cache import KeptCache
from brim.infer.next_token import NextToken, Writing
from brim.infer.passes import Passes
from brim.infer.response import FinishReason
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stream_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    settings: Mapping[str, Any],
    seed: int,
    device: torch.device,
    precision: Precision,
    key: int = 0,
    constraint: Constraint | None = None,
    kept: KeptCache | None = None,
) -> Generator[int, None, FinishReason]:
    """The tokens of the response that SlotsEngine writes for a row of this key, without the one that ends it.

    prompt: at least one token. The generator's own result is the reason for the end. Raises InputError at once for
    settings that are refused. The cache is freed when the last token has been given, when the generator is closed or
    dropped, and when it raises: OutOfMemoryError for a prompt that memory does not suffice for, BrimError for scores
    that are not finite. kept: what earlier prompts have in common with this one is not read anew, and then the cache
    stays.
    """
    row = Writing(position=0, key=key, prompt=list(prompt))
    with explained():
        chooser = NextToken(settings, seed=seed, device=device, constraint=constraint)
    model.eval()
    begin = partial(Passes, model, rows=1, pad_id=settings["pad_token_id"], device=device, precision=precision)
    return _tokens(row, chooser, lambda columns: begin(columns=columns), frozenset(settings["eos_token_id"]), kept)


def _tokens(
    row: Writing,
    chooser: NextToken,
    begin: Callable[[int], Passes],
    end_ids: frozenset[int],
    kept: KeptCache | None,
) -> Generator[int, None, FinishReason]:
    cache = KeptCache(most_columns=_columns(row, chooser)) if kept is None else kept
    try:
        while len(row.generated) < chooser.max_new_tokens:
            token = _next(row, chooser, cache, begin)
            if token in end_ids:
                return "stop"
            row.generated.append(token)
            yield token
        return "length"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    finally:
        if kept is None:
            cache.clear()
    free_caches()
    raise _no_room(len(row.tokens))


@torch.inference_mode()
def _next(row: Writing, chooser: NextToken, cache: KeptCache, begin: Callable[[int], Passes]) -> int:
    """The token that follows what has been written. Not across a `yield`: the mode would be the caller's, too."""
    if row.generated:
        logits = cache.write(row.generated[-1])
    else:
        logits = cache.read(row.prompt, columns=_columns(row, chooser), begin=begin)
    with explained():
        (token,) = chooser.choose(logits, [row])
    return token


def _columns(row: Writing, chooser: NextToken) -> int:
    """The last token is not read."""
    return len(row.prompt) + chooser.max_new_tokens - 1


def _no_room(num_tokens: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        Problem(
            what=f"memory runs out over a single response (after {num_tokens:,} tokens, the prompt's among them)",
            fix="load the base in 4 bits (quantization.bits: 4), lower generation.max_new_tokens, or shorten the "
            "prompt",
        )
    )
