"""What a forward pass changes in a module besides its gradients: its buffers, such as BatchNorm's running averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Key:
    owner: nn.Module
    name: str
    training: bool  # BatchNorm's averages move in training alone


class BufferKeeper:
    """Puts buffers back to where they were when a step began: those that are saved with the module.

    The others are caches, such as a rotary embedding's that grows with the longest row, and what they hold goes with
    attributes that nobody puts back. Quantised weights can be buffers of many GiB: so a buffer's first copy lies in
    the host's memory, and later steps copy those alone whose values the first has changed. Tensors' version counters
    will not do: BatchNorm changes its averages behind their back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changes: dict[_Key, bool] = {}  # of the buffers that a step has been seen with
        self._buffers: dict[_Key, Tensor] = {}
        self._copies: dict[_Key, Tensor] = {}

    def save(self) -> None:
        """A step begins."""
        self._buffers = {
            _Key(owner, name, owner.training): buffer
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if name not in owner._non_persistent_buffers_set
        }
        self._copies = {}
        for key, buffer in self._buffers.items():
            if key not in self._changes:
                self._copies[key] = buffer.detach().to("cpu", copy=True)
            elif self._changes[key]:
                self._copies[key] = buffer.detach().clone()

    def restore(self) -> None:
        """The step begins once more."""
        for key, buffer in self._buffers.items():
            if key.owner._buffers[key.name] is not buffer:
                key.owner._buffers[key.name] = buffer
        with torch.no_grad():
            for key, copy in self._copies.items():
                self._buffers[key].copy_(copy)

    def done(self) -> None:
        """The step went well: the copies are no longer needed."""
        for key in self._copies.keys() - self._changes.keys():
            now = key.owner._buffers[key.name]
            self._changes[key] = now is None or not torch.equal(now.detach().cpu(), self._copies[key])
        self._buffers, self._copies = {}, {}
