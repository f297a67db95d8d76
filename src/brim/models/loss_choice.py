"""Whether a model's loss is computed in chunks: what the configuration asks for, and what the model allows."""

from __future__ import annotations

from typing import Literal

from torch import nn

from brim.config import Choice
from brim.errors import ConfigError, Problem
from brim.models.chunked_loss import chunk_rows
from brim.models.logit_head import LogitHead, NoLogitHead, logit_head
from brim.units import format_bytes

_KEY = "trainer.chunked_loss"


def chunked_head(setting: bool | Literal["auto"], model: nn.Module) -> tuple[LogitHead | None, tuple[Choice, ...]]:
    """The head to compute the loss with in chunks, None where all logits are to stand at once; and what was chosen.

    setting: trainer.chunked_loss. Raises ConfigError when it is true and the model does not allow it.
    """
    if setting is False:
        return None, ()
    found = logit_head(model)
    if isinstance(found, NoLogitHead):
        if setting is True:
            raise ConfigError(_not_in_chunks(found.reason))
        return None, (Choice(key=_KEY, value=False, reason=found.reason),)
    if setting is True:
        return found, ()
    return found, (Choice(key=_KEY, value=True, reason=_size_of_chunks(found)),)


def _size_of_chunks(head: LogitHead) -> str:
    vocabulary_size, weight = head.projection.out_features, head.projection.weight
    rows = chunk_rows(vocabulary_size, head_trains=weight.requires_grad)
    return f"logits of {rows:,} tokens at a time take {format_bytes(4 * rows * vocabulary_size)}"


def _not_in_chunks(reason: str) -> Problem:
    return Problem(
        what=f"{_KEY} is true, which this model does not allow: {reason}", where=_KEY, fix=f"set {_KEY}: auto"
    )
