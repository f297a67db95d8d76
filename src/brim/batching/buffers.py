"""What a forward pass changes in a module besides its gradients: its buffers, such as BatchNorm's running averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    owner: nn.Module
    name: str
    buffer: Tensor
    version: int  # grows with each change in place
    copy: Tensor | None  # on the CPU in the first step, then beside the buffer; None: it has not been seen to change


class BufferKeeper:
    """Puts buffers back to where they were when a step began.

    Quantised weights can be buffers of many GiB. So the first step's copies lie in the host's memory, and later steps
    copy those buffers alone that a pass has been seen to change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[tuple[int, str]] | None = None  # (owner's id, name); None before the first step
        self._saved: list[_Saved] = []

    def save(self) -> None:
        """A step begins."""
        self._saved = [
            _Saved(owner=owner, name=name, buffer=buffer, version=buffer._version, copy=self._copy(owner, name, buffer))
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def restore(self) -> None:
        """The step begins once more."""
        with torch.no_grad():
            for saved in self._saved:
                saved.owner._buffers[saved.name] = saved.buffer
                if saved.copy is not None and saved.buffer._version != saved.version:
                    saved.buffer.copy_(saved.copy)
        self._note_changes()

    def done(self) -> None:
        """The step went well: the copies are no longer needed."""
        self._note_changes()
        self._saved = []

    def _note_changes(self) -> None:
        self._changing = self._changing or set()
        self._changing |= {(id(s.owner), s.name) for s in self._saved if s.buffer._version != s.version}

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor) -> Tensor | None:
        if self._changing is None:
            return buffer.detach().to("cpu", copy=True)
        return buffer.detach().clone() if (id(owner), name) in self._changing else None
