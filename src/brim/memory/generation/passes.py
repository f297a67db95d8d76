"""Run what is traced of a generation: of transformers' own `generate`, and of brim's own engine.

Of `generate`, the prompt and the first few tokens are traced. Of brim's engine, with a cache of R rows × C columns, the
two passes that take the most memory are traced: one over prompts into a full cache, one over the last token of all.
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
from brim.models import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CPU = torch.device("cpu")


def slots_at_their_peak(
    model: PreTrainedModel,
    shape: CacheShape,
    settings: Mapping[str, Any],
    precision: Precision,
    begin: Callable[[str], None],
) -> None:
    """Run `peak_passes` on fake tensors. settings: what `generation_settings` returns."""
    # from_numpy would make a real tensor of an array's memory.
    with values_of_fakes(), patch.object(torch, "from_numpy", torch.tensor), torch.no_grad():
        passes = Passes(model, rows=shape.rows, columns=shape.columns, pad_id=0, device=_CPU, precision=precision)
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
    passes.lay_out(columns=shape.columns, end=shape.prompt_tokens)
    passes.prefill([[token_id]])
    passes.remove(0)
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
