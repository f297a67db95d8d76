"""A run's state as named tensors, to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brim.errors import CheckpointError, Problem


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that train, by name; tied ones once."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def restore_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into the model. Raises CheckpointError when their names are not those of the weights that train."""
    weights = trained_weights(model)
    if weights.keys() != tensors.keys():
        strange = sorted(weights.keys() ^ tensors.keys())
        raise CheckpointError(
            Problem(
                what=f"the checkpoint holds other weights than those that train: {', '.join(strange[:3])} …",
                expected="the versions of transformers and peft in the run's environment.json",
                fix="install those versions, or train anew into another folder",
            )
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors and as plain numbers, both under `<parameter>.<name>`."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    storages: set[int] = set()
    for parameter, entries in optimizer.state_dict()["state"].items():
        for name, value in _unwrapped(entries):
            key = f"{parameter}.{name}"
            if not isinstance(value, Tensor):
                numbers[key] = value
                continue
            # The tables of 8-bit numbers are one tensor in the states of all parameters; safetensors wants each apart.
            shared = value.untyped_storage().data_ptr() in storages
            storages.add(value.untyped_storage().data_ptr())
            tensors[key] = value.clone() if shared else value
    return tensors, numbers


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Put a saved state back; the settings stay those that the optimizer was built with."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **numbers}.items():
        parameter, name = key.split(".", 1)
        state.setdefault(int(parameter), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    if getattr(optimizer, "is_paged", False):
        _page(optimizer)


def _unwrapped(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A parameter's state; bitsandbytes' optimizers keep what is no plain tensor of it in a mapping inside."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from value.items()
        else:
            yield name, value


def _page(optimizer: Any) -> None:
    """Move states that have been read back into pages, where bitsandbytes made them."""
    for parameter, entries in optimizer.state.items():
        for name in ("state1", "state2"):
            if name in entries:
                page = optimizer.get_state_buffer(parameter, dtype=entries[name].dtype)
                entries[name] = page.copy_(entries[name])
