"""brim's choice of tokens inside transformers' `generate`, so that a row's text is the same in whatever batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from brim.data import TokenRows
from brim.infer.next_token import NextToken, Writing

# What stays transformers' own: lengths, tokens, the cache, and a second pass of the model.
_THEIRS = (
    "max_new_tokens",
    "max_time",
    "guidance_scale",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


class ChosenByRow:
    """A logits processor that leaves each row one token: the one that NextToken chooses.

    prompts: of the batch, in its order.
    """

    def __init__(self, chooser: NextToken, prompts: TokenRows, *, end_ids: Sequence[int]) -> None:
        self._chooser, self._end_ids = chooser, frozenset(end_ids)
        self._rows = [
            Writing(position=number, key=row.key, prompt=row.input_ids.tolist()) for number, row in enumerate(prompts)
        ]
        self._writing = list(range(len(self._rows)))  # those that have not ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [B, T], of which the rows know all but the padding. scores: [B, V]."""
        rows = [self._rows[number] for number in self._writing]
        tokens = self._chooser.choose(scores[self._writing].float(), rows)
        for row, token in zip(rows, tokens, strict=True):
            row.generated.append(token)
        only = torch.full_like(scores, -torch.inf)
        only[:, 0] = 0  # of rows that have ended; `generate` pads them
        only[self._writing, 0] = -torch.inf
        only[self._writing, tokens] = 0
        self._writing = [number for number in self._writing if self._rows[number].generated[-1] not in self._end_ids]
        return only


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `generate` that takes the likeliest token and leaves all else to ChosenByRow."""
    return {**{name: settings[name] for name in _THEIRS if name in settings}, "do_sample": False, "num_beams": 1}
