"""Leave a model, its optimizer and the random generators as they were, whatever is run in between."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brim.batching.copies import Copies
from brim.batching.random_states import random_states, restore_random_states
from brim.errors import ProbeError, Problem

_PutBack: TypeAlias = Callable[[], Any]


class Stateful(Protocol):
    """A learning-rate schedule, a gradient scaler, a data loader that knows its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@contextmanager
def no_trace(
    model: nn.Module, optimizer: Optimizer | None = None, *, others: Sequence[Stateful] = ()
) -> Iterator[None]:
    """What the block changes is undone when it ends, also by an exception.

    Weights (those that the optimizer has, and those that train), optimizer state and settings, gradients, buffers,
    attributes of modules such as training modes, and the random states of torch, NumPy and Python are bit for bit as
    they were. State that was born in the block is dropped. Without an optimizer weights are not copied.

    Raises ProbeError where weights changed though no optimizer was given.
    """
    weights = _weights(model, optimizer)
    versions = [weight._version for weight in weights]
    with tempfile.TemporaryFile() as file:
        copies = Copies(cast(BinaryIO, file))
        put_back = [
            *_keep_gradients(weights, copies),
            *_keep_buffers(model, copies),
            *_keep_attributes(model),
            *_keep_random_states(),
            *(_keep_other(other) for other in others),
        ]
        if optimizer is not None:
            put_back += _keep_optimizer(optimizer, weights, copies)
        try:
            yield
        finally:
            for each in put_back:
                each()
            copies.put_back()
    if optimizer is None and versions != [weight._version for weight in weights]:
        what = "the step changed weights, and no optimizer was given whose steps could be undone"
        raise ProbeError(Problem(what=what, fix="give the optimizer, too; these weights are no longer what they were"))


def _weights(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    found = [parameter for parameter in model.parameters() if parameter.requires_grad or parameter.grad is not None]
    groups = () if optimizer is None else optimizer.param_groups
    given = (weight for group in groups for weight in group["params"])
    return list({id(weight): weight for weight in (*found, *given)}.values())


def _keep_gradients(weights: Sequence[Tensor], copies: Copies) -> Iterator[_PutBack]:
    for weight in weights:
        gradient = weight.grad
        if gradient is not None:
            copies.keep(gradient)
        yield partial(setattr, weight, "grad", gradient)


def _keep_buffers(model: nn.Module, copies: Copies) -> Iterator[_PutBack]:
    for owner in model.modules():
        for buffer in owner._buffers.values():
            if buffer is not None:
                copies.keep(buffer)
        yield _putting_back(owner._buffers, dict(owner._buffers))


def _keep_attributes(model: nn.Module) -> Iterator[_PutBack]:
    """Training modes, and what else modules note down: rotary embeddings of some models, the longest row so far."""
    kept = [(module, _public(module)) for module in model.modules()]

    def put_back() -> None:
        for module, attributes in kept:
            for name in _public(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)

    yield put_back


def _public(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _keep_random_states() -> Iterator[_PutBack]:
    of_torch, of_numpy, of_python = random_states(), np.random.get_state(), random.getstate()
    yield partial(restore_random_states, of_torch)
    yield partial(np.random.set_state, of_numpy)
    yield partial(random.setstate, of_python)


def _keep_other(other: Stateful) -> _PutBack:
    return partial(other.load_state_dict, copy.deepcopy(other.state_dict()))


def _keep_optimizer(optimizer: Optimizer, weights: Sequence[Tensor], copies: Copies) -> list[_PutBack]:
    """The state's mappings are refilled with the tensors that they had; the tensors themselves with their values."""
    for weight in weights:
        copies.keep(weight)
    put_back: list[_PutBack] = [
        partial(optimizer.param_groups.__setitem__, slice(None), list(optimizer.param_groups)),
        _putting_back(optimizer.state, dict(optimizer.state)),
    ]
    for mapping in (*_mappings(optimizer.state), *optimizer.param_groups):
        for value in mapping.values():
            if isinstance(value, Tensor):
                copies.keep(value)
        put_back.append(_putting_back(mapping, {key: _frozen(value) for key, value in mapping.items()}))
    return put_back


def _mappings(state: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """The state of each parameter; bitsandbytes' optimizers keep further mappings inside."""
    for entries in state.values():
        if isinstance(entries, dict):
            yield entries
            yield from _mappings(entries)


def _frozen(value: Any) -> Any:
    """A value that the optimizer could change in place, copied; tensors, mappings and weights are kept as they are."""
    is_kept = isinstance(value, Tensor | dict) or (isinstance(value, list) and any(torch.is_tensor(v) for v in value))
    return value if is_kept else copy.deepcopy(value)


def _putting_back(mapping: Any, saved: Mapping[Any, Any]) -> _PutBack:
    def put_back() -> None:
        mapping.clear()
        mapping.update(saved)

    return put_back
