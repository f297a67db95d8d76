"""Whether a loss function adds up its rows' losses, or averages them by mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

from brim.batching.oom import is_out_of_memory
from brim.batching.random_states import random_states, restore_random_states
from brim.batching.user_batch import take_rows
from brim.errors import InputError, Problem

# The same row goes through other kernels when it stands in a batch of three: in bf16 a loss can differ by as much.
_TOLERANCE = 0.01


def require_sum(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, *, samples: bool) -> None:
    """Raises InputError where a row that is taken two and three times has the loss that it has when taken once.

    A mean does not grow with copies of a row, whatever it is taken over; a sum does. Without dropout, so that a mean
    is not missed; modes and random states are left as they were.
    """
    states = random_states()
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        losses = [loss(take_rows(batch, np.zeros(copies, dtype=np.intp), samples=samples)) for copies in (1, 2, 3)]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return
    finally:
        for module in training:
            module.training = True
        restore_random_states(states)
    if not all(isinstance(value, Tensor) for value in losses):
        return  # the step itself says what is wrong with that
    once, twice, thrice = (float(value.detach().sum()) for value in losses)
    if once and math.isfinite(once) and all(abs(copies / once - 1) < _TOLERANCE for copies in (twice, thrice)):
        raise InputError(
            Problem(
                what="the loss function averages: two copies of a row have the loss of one",
                expected="the sum of the rows' losses, to be divided once, by the weight of the whole batch",
                fix='reduction="sum" or "none"; weight= for a mean over something else than rows;'
                " check=False if this is meant",
            )
        )
