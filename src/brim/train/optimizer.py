"""The optimizer that the configuration names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.config import OptimizerConfig

_CLASSES: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


def build_optimizer(settings: OptimizerConfig, parameters: Iterable[Parameter]) -> Optimizer:
    """A torch optimizer over the parameters; the loop sets its learning rate before each step."""
    keys = settings.model_dump(exclude={"type"})
    return _CLASSES[settings.type](list(parameters), lr=0.0, **keys)  # type: ignore[call-arg]


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
