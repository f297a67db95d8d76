"""Whether padding on the left changes what a model says: it must not, but some recurrent architectures read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PADDED_BY = 8
_MOST_TOKENS = 8  # recurrent states forget, so that what was read long ago shows less
# Norm of the difference over that of the scores about their mean. Over the families of tests/infer/families.py, padding
# that is masked changes up to 1.1e-6 of it in fp32, and padding that is read more than 0.7.
_MOST_IN_FP32, _MOST_ELSE = 1e-3, 0.1


def is_misled_by_padding(
    model: PreTrainedModel, prompt: Sequence[int], *, pad_id: int, device: torch.device, precision: Precision
) -> bool:
    """Try it: scores of what follows the prompt's first tokens, with and without padding before them.

    Both where the prompt is read and where a token is added to it: some architectures mask the one and not the other.
    """
    tokens = torch.tensor([prompt[:_MOST_TOKENS]], device=device)
    padding = torch.full((1, _PADDED_BY), pad_id, device=device)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(tokens)], dim=1)
    with torch.inference_mode(), precision.autocast(device, keeps_copies=False):
        alone = _scores(model, tokens, torch.ones_like(tokens), pad_id)
        beside = _scores(model, torch.cat([padding, tokens], dim=1), mask, pad_id)
    most = _MOST_IN_FP32 if precision.name == "fp32" else _MOST_ELSE
    changes = (alone - beside).norm(dim=1) / (alone - alone.mean(dim=1, keepdim=True)).norm(dim=1)
    return not bool((changes <= most).all())


def _scores(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, pad_id: int) -> Tensor:
    """[2, V] fp32: after the prompt, and after its last token once more."""
    from transformers import GenerationConfig

    twice: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": pad_id, "eos_token_id": None}
    again = [int(input_ids[0, -1])]
    output = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        generation_config=GenerationConfig(**twice, return_dict_in_generate=True, output_logits=True),
        prefix_allowed_tokens_fn=lambda row, tokens: again,
    )
    return torch.cat(output.logits).float()
