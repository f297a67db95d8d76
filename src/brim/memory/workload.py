"""What is traced: a model, what is done with it, and how the device that is meant differs from this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.memory.recorder import Temporaries, no_temporaries

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One optimizer step, in its parts, as the loop does them."""

    micro_batch: Callable[[nn.Module, Any], None]  # forward and backward
    optimizer: Callable[[Sequence[Parameter]], Optimizer]
    accumulates: bool  # several micro-batches make a step
    update: Callable[[Sequence[Parameter], Optimizer], None]  # from gradients to weights, gradients dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that a trace runs, as callables that it runs on fake tensors.

    batch: the input of `rows` × `tokens`, as tensors on the device. run: of a phase without gradients; it is given
    what to call when something begins, such as "prefill".
    view: a context in which operators do what the device that is meant would do; None: the optimizer alone.
    """

    architecture: PretrainedConfig
    build: Callable[[PretrainedConfig], nn.Module]  # on the meta device, with adapter and all, in training mode or not
    batch: Callable[[int, int], Any]
    training: Training | None = None
    run: Callable[[nn.Module, Any, Callable[[str], None]], None] | None = None
    view: Callable[[nn.Module | None], AbstractContextManager[Any]] = nullcontext
    temporaries: Temporaries = no_temporaries
