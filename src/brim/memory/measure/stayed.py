"""The tensors that Python can see, and those that a graph of theirs keeps: what steps left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from brim.memory.measure.result import Stayed

_Storage: TypeAlias = tuple[int, int]  # address and bytes


@dataclass(frozen=True, slots=True)
class _Kind:
    shape: tuple[int, ...]
    dtype: str
    made_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """Storages that were alive at one time."""

    kinds: Mapping[_Storage, _Kind]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kinds)

    def since(self, before: Living) -> tuple[Stayed, ...]:
        """What is alive now and was not then, the largest first; tensors of one kind together."""
        kept: dict[_Kind, list[int]] = {}
        for storage, kind in self.kinds.items():
            if storage not in before.kinds:
                kept.setdefault(kind, []).append(storage[1])
        found = [
            Stayed(count=len(sizes), num_bytes=sum(sizes), shape=kind.shape, dtype=kind.dtype, made_at=kind.made_at)
            for kind, sizes in kept.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.num_bytes))


def living(made_at: Mapping[int, str] | None = None) -> Living:
    """The storages of all tensors that Python's collector tracks, and of of their
    gradients and of those saved in their graphs.

    made_at: by address, where a storage was made, if that is known; else the node that made the tensor is named.
    """
    gc.collect()
    kinds: dict[_Storage, _Kind] = {}
    nodes: set[Any] = set()
    for tensor in _tensors():
        _add(kinds, tensor, made_at or {})
        if tensor.is_leaf and tensor.grad is not None:  # no object of Python's until it is asked for
            _add(kinds, tensor.grad, made_at or {})
        if tensor.grad_fn is not None:
            for saved in _saved(tensor.grad_fn, nodes):
                _add(kinds, saved, made_at or {})
    return Living(kinds=kinds)


def _tensors() -> Iterator[Tensor]:
    # The type is asked, and not isinstance: lazy modules would be loaded by a look at their __class__.
    return (each for each in gc.get_objects() if issubclass(type(each), Tensor))


def _add(kinds: dict[_Storage, _Kind], tensor: Tensor, made_at: Mapping[int, str]) -> None:
    if tensor.is_sparse or tensor.device.type == "meta":
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return
    address = storage.data_ptr()
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    kind = _Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), made_at.get(address, node))
    kinds.setdefault((address, storage.nbytes()), kind)


def _saved(root: Any, seen: set[Any]) -> Iterator[Tensor]:
    """Tensors that a graph keeps for its backward pass, from this node on."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from _tensors_in(node, name)


def _tensors_in(node: Any, name: str) -> Iterator[Tensor]:
    try:
        value = getattr(node, name)
    except RuntimeError:
        return  # freed: the backward pass has run
    for each in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(each, torch.Tensor):
            yield each
