"""Adam's second beta where the batch moves: it forgets as fast in samples at every size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from brim.config import OptimizerConfig
from brim.config.moving_batch import has_beta2


class MovingBeta2:
    """Sets an Adam's rates before each update: beta2 becomes beta2^(size / final size).

    The average of squared gradients starts at 0, so after updates with betas b1 … bn its weights sum to 1 - b1·…·bn:
    that is what it has to be divided by. Adam's implementations divide by 1 - bn^n instead, with the present beta for
    all. With k² = (1 - bn^n) / (1 - b1·…·bn), the right update is theirs with the learning rate and eps divided by k;
    decoupled weight decay, which they multiply by the learning rate, is multiplied by k. While all sizes are the final
    one, k is 1, exactly.

    A weight that had no gradient in some updates has an n of its own, and its k would be another one; it gets that of
    the others.
    """

    def __init__(self, settings: OptimizerConfig, optimizer: Optimizer, *, final_size: int) -> None:
        assert has_beta2(settings), "a rule refuses other optimizers"
        keys = settings.model_dump()
        self._optimizer = optimizer
        self._final_size = final_size
        self._beta1, self._beta2 = keys["betas"]
        self._eps: float = keys["eps"]
        self._weight_decay: float = keys["weight_decay"]
        self._is_decoupled = settings.type != "adam"  # that of torch; bitsandbytes' Adam takes it off as AdamW does
        self._num_updates = 0
        self._exponents = 0.0  # of the betas of those updates, summed
        self._next_exponent = 1.0

    def set(self, *, size: int, learning_rate: float) -> None:
        """The rates of an update on a step of this size, as the schedule says."""
        self._next_exponent = size / self._final_size
        beta2 = self._beta2**self._next_exponent
        k = self._correction(beta2)
        for group in self._optimizer.param_groups:
            group["betas"] = (self._beta1, beta2)
            group["lr"] = learning_rate / k
            group["eps"] = self._eps / k
            group["weight_decay"] = self._weight_decay * k if self._is_decoupled else self._weight_decay

    def stepped(self) -> None:
        """The update for which rates were set took place."""
        self._num_updates += 1
        self._exponents += self._next_exponent

    def state(self) -> dict[str, Any]:
        """The betas used so far, as JSON."""
        return {"num_updates": self._num_updates, "exponents": self._exponents}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._num_updates, self._exponents = saved["num_updates"], saved["exponents"]

    def _correction(self, beta2: float) -> float:
        """k of the update to come."""
        theirs = 1 - beta2 ** (self._num_updates + 1)
        right = 1 - self._beta2 ** (self._exponents + self._next_exponent)
        return math.sqrt(theirs / right)
