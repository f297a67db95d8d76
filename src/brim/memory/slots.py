"""Generation with brim's own engine as a trace sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from brim.infer.cache_shape import CacheShape
from brim.infer.next_token import NextToken
from brim.infer.passes import Passes
from brim.infer.peak_passes import peak_passes
from brim.memory.generation import values_of_fakes
from brim.models.precision import Precision

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
    """See peak_passes, here on fake tensors. settings: what `generation_settings` gives."""
    # An array's memory would be a real tensor.
    with values_of_fakes(), patch.object(torch, "from_numpy", torch.tensor), torch.no_grad():
        passes = Passes(model, rows=shape.rows, columns=shape.columns, pad_id=0, device=_CPU, precision=precision)
        chooser = NextToken(settings, seed=0, device=_CPU)
        peak_passes(passes, chooser, shape, begin=begin)
