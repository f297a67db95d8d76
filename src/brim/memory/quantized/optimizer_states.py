"""The states that bitsandbytes' optimizers keep for a parameter on CUDA: bytes, and where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from brim.config import OptimizerConfig
from brim.memory.quantized.layout import DYNAMIC_MAP_BYTES

# Optimizer1State and Optimizer2State, optim/optimizer.py.
_ONE_STATE = ("lion", "lion_8bit", "sgd_8bit", "rmsprop_8bit", "adagrad_8bit", "paged_lion", "paged_lion_8bit")
_TWO_STATES = (
    "adam_8bit",
    "adamw_8bit",
    "paged_adam",
    "paged_adamw",
    "paged_adam_8bit",
    "paged_adamw_8bit",
)
_BLOCK_SIZE = 256  # elements that share a scale: init_state
_LEAST_PAGED = 100_000  # elements; smaller states are not paged: get_state_buffer

StateName: TypeAlias = Literal["state1", "state2", "absmax1", "absmax2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """How one of bitsandbytes' optimizers keeps its states."""

    num_states: int
    bits: int
    paged: bool
    min_8bit_size: int  # elements; smaller parameters keep 32-bit states

    @property
    def num_tables(self) -> int:
        """Tables of 8-bit values, one for all parameters: they move to the GPU with the first 8-bit state."""
        return self.num_states

    def is_8bit(self, num_elements: int) -> bool:
        return self.bits == 8 and num_elements >= self.min_8bit_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A state of one parameter. Paged ones are in memory that CUDA shares with the machine (cudaMallocManaged).

    The caching allocator knows nothing of those; on the GPU they take room that others leave.
    """

    name: StateName
    num_elements: int
    element_bytes: int
    paged: bool

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


def state_rule(settings: OptimizerConfig) -> StateRule | None:
    """The rule of an optimizer of bitsandbytes; None for torch's."""
    if settings.type not in _ONE_STATE + _TWO_STATES:
        return None
    return StateRule(
        num_states=1 if settings.type in _ONE_STATE else 2,
        bits=8 if settings.type.endswith("_8bit") else 32,
        paged=settings.type.startswith("paged_"),
        min_8bit_size=settings.model_dump().get("min_8bit_size", 0),
    )


def state_tensors(rule: StateRule, num_elements: int) -> tuple[StateTensor, ...]:
    """The states of a parameter of so many elements, in the order in which the first step makes them (init_state)."""
    eight = rule.is_8bit(num_elements)
    names: tuple[StateName, ...] = ("state1", "state2")
    scales: tuple[StateName, ...] = ("absmax1", "absmax2")
    states = [
        StateTensor(
            name=name,
            num_elements=num_elements,
            element_bytes=1 if eight else 4,
            paged=rule.paged and num_elements >= _LEAST_PAGED,
        )
        for name in names[: rule.num_states]
    ]
    if eight:
        blocks = -(-num_elements // _BLOCK_SIZE)
        states += [
            StateTensor(name=name, num_elements=blocks, element_bytes=4, paged=False)
            for name in scales[: rule.num_states]
        ]
    return tuple(states)


def state_bytes(rule: StateRule, parameters: Iterable[int]) -> tuple[int, int]:
    """Bytes in the caching allocator, before rounding, and paged bytes. parameters: elements of each."""
    sizes = list(parameters)
    tensors = [tensor for size in sizes for tensor in state_tensors(rule, size)]
    allocated = sum(tensor.num_bytes for tensor in tensors if not tensor.paged)
    if any(rule.is_8bit(size) for size in sizes):
        allocated += rule.num_tables * DYNAMIC_MAP_BYTES
    return allocated, sum(tensor.num_bytes for tensor in tensors if tensor.paged)
