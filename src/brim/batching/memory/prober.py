"""Try a batch size on a device with any training loop's step, and leave everything as it was.

The model, its optimizer and the random generators are put back, whatever ran in between. Their copies are kept where
they do not count towards what is measured: those of a device's tensors in host memory, those of the host's in a file.
Placeholder memory stands for what a steady step holds and the first one does not: gradients and optimizer state.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brim.batching.memory.finder import Probe
from brim.batching.memory.meters import Counts, PeakMeter, peak_meter
from brim.batching.memory.oom import OutOfMemory, attempt, free_caches, random_states, restore_random_states
from brim.errors import ProbeError


@contextmanager
def standing_for(num_bytes: int, device: torch.device | str) -> Iterator[None]:
    """Hold so many bytes of the device while the block runs, written to, so that they are resident on a CPU."""
    held = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    try:
        yield
    finally:
        del held


@contextmanager
def gradients_at_hand(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set gradients of zeros where there are none, as after a step's first micro-batch; they are dropped afterwards."""
    without = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    try:
        for parameter in without:
            # Not zeros_like: what calloc gives is not resident before it is written to.
            parameter.grad = torch.empty_like(parameter, memory_format=torch.preserve_format).fill_(0)
        yield
    finally:
        for parameter in without:
            parameter.grad = None


class Prober:
    """Make `fits` of `find_batch_size` out of a training step.

    step: runs so many rows, forward and backward, and the optimizer's update if training has one; give it the longest
    rows that there are. It may return how many steps it ran (a loader that is empty runs none); what else it returns
    counts as one.
    model, optimizer: what the step changes; without an optimizer it may not change weights.
    others: what else it moves, such as a learning-rate schedule or a gradient scaler.
    num_steps: how often the step is run. None: twice where the optimizer has no state yet, since that is born at the
    end of the first step and takes memory in the second; else once.
    counts: of a CUDA device, the bytes that PyTorch's allocator reserved, or those that tensors took.

    After each probe weights, optimizer, gradients, buffers, random states and training modes are bit for bit what they
    were, caches are empty, and the device's peak counters begin again.
    """

    def __init__(
        self,
        step: Callable[[int], Any],
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        others: Sequence[Stateful] = (),
        device: torch.device | str | None = None,
        num_steps: int | None = None,
        counts: Counts = "reserved",
    ) -> None:
        self._step, self._model, self._optimizer, self._others = step, model, optimizer, others
        self._num_steps = num_steps
        self._meter = peak_meter(_device_of(model) if device is None else torch.device(device), counts=counts)

    @property
    def limit_bytes(self) -> int | None:
        """Return what a peak may reach as things stand; None: not known."""
        free_caches()
        return self._meter.limit_bytes()

    def __call__(self, size: int) -> Probe:
        """Run `size` rows. Exceptions other than running out of memory pass through, when all is as it was."""
        try:
            with no_trace(self._model, self._optimizer, others=self._others):
                return probed(size, lambda: self._run(size), self._meter)
        finally:
            self._meter.begin()

    def _run(self, size: int) -> int:
        total = 0
        for _ in range(self._times()):
            returned = self._step(size)
            is_count = isinstance(returned, int) and not isinstance(returned, bool)
            total += returned if is_count else 1
            del returned  # a loss may hold the whole graph
        if (device := _device_of(self._model)).type == "cuda":
            torch.cuda.synchronize(device)
        return total

    def _times(self) -> int:
        if self._num_steps is not None:
            return self._num_steps
        return 2 if self._optimizer is not None and not self._optimizer.state else 1


def probed(size: int, run: Callable[[], int], meter: PeakMeter) -> Probe:
    """Call `run` once, which returns the number of steps that it ran; what it changes stays changed.

    Exceptions other than running out of memory pass through.
    """
    meter.begin()
    started = time.perf_counter()
    steps = attempt(run)
    seconds = time.perf_counter() - started
    if isinstance(steps, OutOfMemory):
        return Probe(size=size, steps=0, outcome="out_of_memory", peak_bytes=None, seconds=seconds)
    return Probe(size=size, steps=steps, outcome="fits", peak_bytes=meter.peak_bytes(), seconds=seconds)


def _device_of(model: nn.Module) -> torch.device:
    weight = next(model.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


_PutBack: TypeAlias = Callable[[], Any]


class Stateful(Protocol):
    """Describe a learning-rate schedule, a gradient scaler, or a data loader that knows its position."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@contextmanager
def no_trace(
    model: nn.Module, optimizer: Optimizer | None = None, *, others: Sequence[Stateful] = ()
) -> Iterator[None]:
    """Undo what the block changes when it ends, also by an exception.

    Weights (those that the optimizer has, and those that train), optimizer state and settings, gradients, buffers,
    attributes of modules such as training modes, and the random states of torch, NumPy and Python are bit for bit as
    they were. State that was born in the block is dropped. Without an optimizer weights are not copied.

    Raises ProbeError where weights changed though no optimizer was given.
    """
    weights = _weights(model, optimizer)
    versions = [weight._version for weight in weights]
    with tempfile.TemporaryFile() as file:
        copies = Copies(cast(BinaryIO, file))
        put_back: list[_PutBack] = [
            *_keep_gradients(weights, copies),
            *_keep_buffers(model, copies),
            *_keep_attributes(model),
            *_keep_random_states(),
            *(partial(other.load_state_dict, copy.deepcopy(other.state_dict())) for other in others),
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
        raise ProbeError(what=what, fix="give the optimizer, too; these weights are no longer what they were")


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
    """Keep training modes, and what else modules note: rotary embeddings of some models, the longest row so far."""
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


def _keep_optimizer(optimizer: Optimizer, weights: Sequence[Tensor], copies: Copies) -> list[_PutBack]:
    """Keep the optimizer's state: mappings get back the tensors that they had, and tensors their values."""
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
    """Yield the state of each parameter; bitsandbytes' optimizers keep further mappings inside."""
    for entries in state.values():
        if isinstance(entries, dict):
            yield entries
            yield from _mappings(entries)


def _frozen(value: Any) -> Any:
    """Copy a value that the optimizer could change in place; tensors, mappings and weights are kept as they are."""
    is_kept = isinstance(value, Tensor | dict) or (isinstance(value, list) and any(torch.is_tensor(v) for v in value))
    return value if is_kept else copy.deepcopy(value)


def _putting_back(mapping: Any, saved: Mapping[Any, Any]) -> _PutBack:
    def put_back() -> None:
        mapping.clear()
        mapping.update(saved)

    return put_back


class Copies:
    """Keep copies of a device's tensors in host memory, and of the host's in a file, which the caller closes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._in_memory: list[tuple[Tensor, Tensor]] = []
        self._in_file: list[tuple[Tensor, int]] = []
        self._seen: set[int] = set()

    def keep(self, tensor: Tensor) -> None:
        """Keep what the tensor holds; of one that is given twice, what it held first."""
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if tensor.device.type != "cpu":
            self._in_memory.append((tensor, tensor.detach().to("cpu", copy=True)))
        elif tensor.numel():
            self._in_file.append((tensor, self._file.seek(0, os.SEEK_END)))
            self._file.write(_bytes_of(tensor.detach().contiguous()))

    def put_back(self) -> None:
        """Give every tensor back, bit for bit, what it held."""
        with torch.no_grad():
            for tensor, copy in self._in_memory:
                tensor.copy_(copy)
            for tensor, start in self._in_file:
                self._read(tensor.detach(), start)

    def _read(self, tensor: Tensor, start: int) -> None:
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        into = _bytes_of(target)
        self._file.seek(start)
        num_bytes = self._file.readinto(into)  # type: ignore[attr-defined]
        assert num_bytes == len(into), "what was written can be read"
        if target is not tensor:
            tensor.copy_(target)


def _bytes_of(tensor: Tensor) -> memoryview[Any]:
    """Return the bytes of a contiguous tensor of the host, without a copy; of any dtype, which NumPy may not have."""
    view: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(view)
