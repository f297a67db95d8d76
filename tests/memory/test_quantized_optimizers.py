"""The states of bitsandbytes' optimizers against those that the real ones make on this machine."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter
from tests.memory.births import Births
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from brim.config.schema import OptimizerConfig
from brim.config.schema.optimizer import BitsandbytesOptimizerConfig
from brim.memory.trace import traceable_optimizer
from brim.memory.trace.optimizer import StandInOptimizer, state_bytes, state_rule, state_tensors
from brim.train import build_optimizer

TYPES = [section.model_fields["type"].default for section in get_args(BitsandbytesOptimizerConfig)]
SHAPES = [(4095,), (64, 64), (3, 7), (257, 401), (1000, 120)]  # below, at and above 4,096 elements; the last is paged


def settings_of(kind: str, **keys: Any) -> OptimizerConfig:
    settings: OptimizerConfig = TypeAdapter(OptimizerConfig).validate_python({"type": kind, **keys})
    return settings


def stepped(parameters: list[Parameter], kind: str) -> Any:
    """The real optimizer after a step on the CPU, where paged states are plain ones."""
    optimizer = build_optimizer(settings_of(kind), parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", TYPES)
def test_states_are_those_of_the_real_optimizer(kind: str) -> None:
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    real = stepped(parameters, kind)
    rule = state_rule(settings_of(kind))
    assert rule is not None
    stand_in = StandInOptimizer(parameters, rule)
    stand_in.step()
    tables: dict[int, int] = {}
    for parameter in parameters:
        state = real.state[parameter]
        tables |= {state[key].data_ptr(): state[key].nbytes for key in ("qmap1", "qmap2") if key in state}
        expected = {
            name: (tensor.shape, tensor.dtype) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)
        }
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in stand_in.state[parameter].items()}
        assert mine == expected
        in_order = [name for name in state if name in expected and not name.startswith("qmap")]
        assert list(mine)[: len(in_order)] == in_order
    assert [table.nbytes for table in stand_in.tables] == list(tables.values())
    allocated, paged = state_bytes(rule, [parameter.numel() for parameter in parameters])
    made = {id(tensor): tensor.nbytes for state in stand_in.state.values() for tensor in state.values()}
    assert allocated + paged == sum(made.values())
    assert sum(state.nbytes for state in stand_in.paged) == paged
    assert (paged > 0) == kind.startswith("paged_")


def test_torch_has_its_own_states() -> None:
    assert state_rule(settings_of("adamw")) is None
    parameters = [Parameter(torch.zeros(2))]
    assert type(traceable_optimizer(settings_of("adamw"), parameters)) is torch.optim.AdamW
    assert type(traceable_optimizer(settings_of("lion"), parameters)) is StandInOptimizer


def test_states_from_a_hundred_thousand_elements_are_paged_but_not_their_scales() -> None:
    rule = state_rule(settings_of("paged_adamw_8bit"))
    assert rule is not None
    assert [(tensor.name, tensor.num_bytes, tensor.paged) for tensor in state_tensors(rule, 100_000)] == [
        ("state1", 100_000, True),
        ("state2", 100_000, True),
        ("absmax1", 391 * 4, False),
        ("absmax2", 391 * 4, False),
    ]
    assert [tensor.paged for tensor in state_tensors(rule, 99_999)] == [False] * 4


def test_a_smaller_least_size_makes_more_states_8bit() -> None:
    rule = state_rule(settings_of("adam_8bit", min_8bit_size=16))
    assert rule is not None
    assert [tensor.num_bytes for tensor in state_tensors(rule, 16)] == [16, 16, 4, 4]
    assert [tensor.num_bytes for tensor in state_tensors(rule, 15)] == [60, 60]


def test_the_first_step_allocates_in_the_real_order_and_the_second_nothing() -> None:
    rule = state_rule(settings_of("adamw_8bit"))
    assert rule is not None
    with FakeTensorMode():
        parameters = [Parameter(torch.empty(10)), Parameter(torch.empty(128, 64)), Parameter(torch.empty(4096))]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = StandInOptimizer(parameters, rule)
        with Births() as births:
            optimizer.step()
            assert births.log == [40, 40, 1024, 1024, 8192, 8192, 128, 128, 4096, 4096, 64, 64]
            optimizer.step()
    assert len(births.log) == 12
