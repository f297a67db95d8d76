"""Copies of tensors, kept where they do not count towards what is being measured."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import torch
from torch import Tensor


class Copies:
    """Of a device's tensors in the host's memory; of the host's in a file, which is the caller's to close."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._in_memory: list[tuple[Tensor, Tensor]] = []
        self._in_file: list[tuple[Tensor, int]] = []
        self._seen: set[int] = set()

    def keep(self, tensor: Tensor) -> None:
        """Remember what the tensor holds; of one that is given twice, what it held first."""
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if tensor.device.type != "cpu":
            self._in_memory.append((tensor, tensor.detach().to("cpu", copy=True)))
        elif tensor.numel():
            self._in_file.append((tensor, self._file.seek(0, os.SEEK_END)))
            self._file.write(_bytes_of(tensor.detach().contiguous()))

    def put_back(self) -> None:
        """Every tensor holds, bit for bit, what it held."""
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
    """The bytes of a contiguous tensor of the host, without a copy; of any dtype, which NumPy may not have."""
    view: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(view)
