"""The optimizer that the configuration names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.config import OptimizerConfig
from brim.models.bitsandbytes_import import require_bitsandbytes

_OF_TORCH: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
_OF_BITSANDBYTES = {
    "lion": "Lion",
    "adam_8bit": "Adam8bit",
    "adamw_8bit": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "sgd_8bit": "SGD8bit",
    "rmsprop_8bit": "RMSprop8bit",
    "adagrad_8bit": "Adagrad8bit",
    "paged_adam": "PagedAdam",
    "paged_adamw": "PagedAdamW",
    "paged_lion": "PagedLion",
    "paged_adam_8bit": "PagedAdam8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_lion_8bit": "PagedLion8bit",
}


def build_optimizer(settings: OptimizerConfig, parameters: Iterable[Parameter]) -> Optimizer:
    """An optimizer over the parameters; the loop sets its learning rate before each step.

    Raises ModelError when it is one of bitsandbytes', which cannot be imported.
    """
    keys = settings.model_dump(exclude={"type"})
    if settings.type in _OF_TORCH:
        return _OF_TORCH[settings.type](list(parameters), lr=0.0, **keys)  # type: ignore[call-arg]
    return _from_bitsandbytes(settings.type, keys, list(parameters))


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def states_in_32_bits(settings: OptimizerConfig, parameters: Sequence[Parameter]) -> str | None:
    """A line on the weights that are too small for 8-bit states; None where there are none."""
    least = settings.model_dump().get("min_8bit_size", 0)
    small = [parameter for parameter in parameters if parameter.numel() < least]
    if not small:
        return None
    elements = sum(parameter.numel() for parameter in small)
    return (
        f"{settings.type}: {len(small):,} of {len(parameters):,} trained weights, {elements:,} elements in all, have "
        f"fewer than {least:,} elements and keep 32-bit states (trainer.optimizer.min_8bit_size)"
    )


def _from_bitsandbytes(name: str, keys: dict[str, Any], parameters: list[Parameter]) -> Optimizer:
    require_bitsandbytes()
    import bitsandbytes as bnb

    optimizer: Optimizer = getattr(bnb.optim, _OF_BITSANDBYTES[name])(parameters, lr=0.0, **keys)
    return optimizer
