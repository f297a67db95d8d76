"""Whether what a model says to a prompt changes with the rows beside it: in a few architectures it wrongly does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brim.batching.oom import is_out_of_memory
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_TOKENS = 8  # recurrent states forget, so that what was read long ago shows less
# Norm of the difference over that of the scores about their mean. Over the families of tests/infer/families.py it is up
# to 2e-6 in fp32 where masks and states are right, and more than 0.7 where padding is read or states are mixed up.
_MOST_IN_FP32, _MOST_ELSE = 1e-3, 0.1


def is_misled_by_its_batch(
    model: PreTrainedModel, prompt: Sequence[int], *, pad_id: int, device: torch.device, precision: Precision
) -> bool:
    """Try it: the scores that follow the prompt's first tokens, alone and in a batch with a row of twice the length.

    Both where the prompt is read and where a token is added to it: some architectures mask the one and not the other.
    False where memory is too short for two rows: whoever runs them together finds out, and tells.
    """
    try:
        return _changes(model, prompt, pad_id=pad_id, device=device, precision=precision)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False


def _changes(
    model: PreTrainedModel, prompt: Sequence[int], *, pad_id: int, device: torch.device, precision: Precision
) -> bool:
    tokens = list(prompt[:_MOST_TOKENS])
    padding = [pad_id] * len(tokens)
    alone = torch.tensor([tokens], device=device)
    batch = torch.tensor([padding + tokens, tokens + tokens], device=device)
    mask = torch.ones_like(batch)
    mask[0, : len(padding)] = 0
    with torch.inference_mode(), precision.autocast(device, keeps_copies=False):
        expected = _scores(model, alone, torch.ones_like(alone), pad_id)
        found = _scores(model, batch, mask, pad_id)
    most = _MOST_IN_FP32 if precision.name == "fp32" else _MOST_ELSE
    changes = (found - expected).norm(dim=1) / (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    return not bool((changes <= most).all())


def _scores(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, pad_id: int) -> Tensor:
    """[2, V] fp32, of the first row: after the prompt, and after its last token once more."""
    from transformers import GenerationConfig

    twice: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": pad_id, "eos_token_id": None}
    again = [int(input_ids[0, -1])]
    output = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        generation_config=GenerationConfig(**twice, return_dict_in_generate=True, output_logits=True),
        prefix_allowed_tokens_fn=lambda row, tokens: again,
    )
    return torch.stack([logits[0] for logits in output.logits]).float()
