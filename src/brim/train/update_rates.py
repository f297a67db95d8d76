"""What the loop sets before each update: the learning rate, and Adam's second beta where it moves with the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from brim.config import FinetuneTrainer
from brim.train.moving_beta2 import MovingBeta2
from brim.train.optimizer import set_learning_rate


class UpdateRates(Protocol):
    """The rates of an optimizer, from update to update."""

    def set(self, *, size: int, learning_rate: float) -> None:
        """Before an update; size: rows of the step as the schedule says."""

    def stepped(self) -> None:
        """The update for which rates were set took place; one that was left out is not told."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Back to what `state` gave."""


class FixedBetas:
    """The learning rate alone changes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def set(self, *, size: int, learning_rate: float) -> None:
        set_learning_rate(self._optimizer, learning_rate)

    def stepped(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        pass


def update_rates(trainer: FinetuneTrainer, optimizer: Optimizer, *, final_size: int) -> UpdateRates:
    """The rates that a resolved configuration asks for; a beta2 that moves is the optimizer's own at `final_size`."""
    assert isinstance(trainer.batch_beta2_scaling, bool), "resolved before"
    if trainer.batch_beta2_scaling:
        return MovingBeta2(trainer.optimizer, optimizer, final_size=final_size)
    return FixedBetas(optimizer)
