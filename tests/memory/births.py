"""Births and deaths of storages while code runs on fake tensors: a small second recorder, for tests."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Births(TorchDispatchMode):
    """`log` has the bytes of each storage at its birth, and their negative at its death, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self._alive: dict[int, Any] = {}

    @property
    def live_bytes(self) -> int:
        return sum(self.log)

    @property
    def peak_bytes(self) -> int:
        live = [sum(self.log[: end + 1]) for end in range(len(self.log))]
        return max(live, default=0)

    def know(self, *tensors: torch.Tensor | None) -> None:
        """Storages that were there before."""
        for tensor in tensors:
            if tensor is not None:
                self._watch(tensor, silent=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self._watch(each)
        return out

    def _watch(self, tensor: torch.Tensor, *, silent: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        num_bytes = storage.nbytes()

        def die(_: Any) -> None:
            del self._alive[key]
            if not silent:
                self.log.append(-num_bytes)

        self._alive[key] = weakref.ref(storage, die)
        if not silent:
            self.log.append(num_bytes)
