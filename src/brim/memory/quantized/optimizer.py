"""A stand-in for bitsandbytes' optimizers: its steps allocate on fake tensors what theirs allocate on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from brim.config import OptimizerConfig
from brim.memory.quantized.layout import DYNAMIC_MAP_BYTES
from brim.memory.quantized.optimizer_states import StateRule, StateTensor, state_rule, state_tensors
from brim.memory.recorder import note_kernel
from brim.train.optimizer import build_optimizer


def traceable_optimizer(settings: OptimizerConfig, parameters: Sequence[Parameter]) -> Optimizer:
    """The optimizer that the configuration names; a stand-in for one of bitsandbytes'."""
    rule = state_rule(settings)
    return build_optimizer(settings, parameters) if rule is None else StandInOptimizer(parameters, rule)


class StandInOptimizer(Optimizer):
    """Optimizer1State or Optimizer2State (optim/optimizer.py) without its kernels, which allocate nothing."""

    def __init__(self, parameters: Iterable[Parameter], rule: StateRule) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.rule = rule
        self.tables: list[Tensor] = []  # of 8-bit values, on the device since the first 8-bit state
        self.paged: list[Tensor] = []  # states outside the caching allocator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The first step makes the states, parameter by parameter; no step makes anything else."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._make_states(parameter)
                states = (state for state in self.state[parameter].values() if state.numel() == parameter.numel())
                read_and_written = (parameter, *states)
                note_kernel("optimizer", *read_and_written, *read_and_written, parameter.grad)

    def _make_states(self, parameter: Parameter) -> None:
        if self.rule.is_8bit(parameter.numel()) and not self.tables:
            size = DYNAMIC_MAP_BYTES // 4
            self.tables = [torch.zeros(size, device=parameter.device) for _ in range(self.rule.num_tables)]
        states = self.state[parameter]
        for tensor in state_tensors(self.rule, parameter.numel()):
            states[tensor.name] = _made(tensor, parameter)
            if tensor.paged:
                self.paged.append(states[tensor.name])
        if self.rule.is_8bit(parameter.numel()):
            states.update({f"qmap{number}": table for number, table in enumerate(self.tables, 1)})


def _made(tensor: StateTensor, parameter: Parameter) -> Tensor:
    """From the parameter, so that a recorder can tell whose state it is."""
    if tensor.name.startswith("absmax"):
        return parameter.new_zeros((tensor.num_elements,), dtype=torch.float32)
    return torch.zeros_like(parameter, dtype=torch.uint8 if tensor.element_bytes == 1 else torch.float32)
