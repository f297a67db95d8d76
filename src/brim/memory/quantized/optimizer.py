"""A stand-in for bitsandbytes' optimizers: its steps allocate on fake tensors what theirs allocate on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.memory.quantized.layout import DYNAMIC_MAP_BYTES
from brim.memory.quantized.optimizer_states import StateRule, StateTensor, state_tensors


class StandInOptimizer(Optimizer):
    """Optimizer1State or Optimizer2State (optim/optimizer.py) without its kernels, which allocate nothing.

    paged: a context in which what is born is not on the device; `paged_bytes` counts what is born in it.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        rule: StateRule,
        *,
        paged: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.rule = rule
        self.tables: list[Tensor] = []  # of 8-bit values, on the device since the first 8-bit state
        self.paged_bytes = 0
        self._paged = paged

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The first step makes the states, parameter by parameter; no step makes anything else."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self._make_states(parameter)

    def _make_states(self, parameter: Parameter) -> None:
        if self.rule.is_8bit(parameter.numel()) and not self.tables:
            self.tables = [
                torch.zeros(DYNAMIC_MAP_BYTES // 4, dtype=torch.float32, device=parameter.device)
                for _ in range(self.rule.num_tables)
            ]
        for tensor in state_tensors(self.rule, parameter.numel()):
            self.state[parameter][tensor.name] = self._make(tensor, parameter)

    def _make(self, tensor: StateTensor, parameter: Parameter) -> Tensor:
        shape = (tensor.num_elements,) if tensor.name.startswith("absmax") else parameter.shape
        dtype = torch.uint8 if tensor.element_bytes == 1 else torch.float32
        with self._paged() if tensor.paged else nullcontext():
            state = torch.zeros(shape, dtype=dtype, device=parameter.device)
        if tensor.paged:
            self.paged_bytes += tensor.num_bytes
        return state
