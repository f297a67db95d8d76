"""Gradient clipping, and the norm that it measures on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from brim.config import GradientClippingConfig


def clip_gradients(parameters: Sequence[Parameter], settings: GradientClippingConfig | None) -> Tensor:
    """Clip in place as the settings say; the norm over all gradients before any clipping, a scalar."""
    norm = gradient_norm(parameters)
    clip(parameters, norm, settings)
    return norm


def gradient_norm(parameters: Sequence[Parameter]) -> Tensor:
    """The norm over all gradients, a scalar. Nothing is changed."""
    return torch.as_tensor(get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip(parameters: Sequence[Parameter], norm: Tensor, settings: GradientClippingConfig | None) -> None:
    """Clip gradients of this norm in place.

    `clipglobalnorm` and `clipnorm` both bound the norm over all gradients, as they do in Ludwig.
    """
    if settings is None:
        return
    bounds = [bound for bound in (settings.clipglobalnorm, settings.clipnorm) if bound is not None]
    if bounds:
        clip_grads_with_norm_(parameters, min(bounds), norm)
    if settings.clipvalue is not None:
        clip_grad_value_(parameters, settings.clipvalue)
