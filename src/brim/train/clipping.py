"""Gradient clipping, and the norm that it measures on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from brim.config import GradientClippingConfig


def clip_gradients(parameters: Sequence[Parameter], settings: GradientClippingConfig | None) -> Tensor:
    """Clip in place as the settings say; the norm over all gradients before any clipping, a scalar.

    `clipglobalnorm` and `clipnorm` both bound the norm over all gradients, as they do in Ludwig.
    """
    norms = [] if settings is None else [n for n in (settings.clipglobalnorm, settings.clipnorm) if n is not None]
    if norms:
        norm = clip_grad_norm_(parameters, min(norms))
    else:
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if settings is not None and settings.clipvalue is not None:
        clip_grad_value_(parameters, settings.clipvalue)
    return torch.as_tensor(norm)
