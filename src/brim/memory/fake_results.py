"""What operators return on fake tensors, remembered: in a trace most of them run again and again on like tensors.

PyTorch remembers it, too, for every kind of tensor there is; telling two calls apart and building the result up again
takes most of a trace's time there. Here it is done for plain strided tensors, in few steps, and all else is left to
PyTorch. What comes out is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

DEVICE_OF = torch.ops.prim.device.default
# Their results do not follow from the sizes of what they are given, or they change a size in place.
_UNFORESEEABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_UNKNOWN = object()
_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operator makes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    viewed: int | None  # of the tensors that are given the one whose storage it has; None: a new storage
    attributes: Mapping[str, Any]  # of the fake tensor


@dataclass(frozen=True, slots=True)
class _Known:
    """What an operator returns: of each result how it is made, or which of the tensors that are given it is."""

    results: tuple[_Made | int | None, ...]
    container: type | None  # None: there is one result, by itself


# Some 1.5 kB each, a few hundred of a shape. It holds no tensors. None: what is returned cannot be remembered.
_MOST_KNOWN = 4096
_KNOWN: dict[tuple[Any, ...], _Known | None] = {}


def result_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As func(*args, **kwargs) within a FakeTensorMode; call it where the modes above that one have been left."""
    tensors: list[FakeTensor] = []
    words: list[Any] = [func, torch.get_default_dtype()]
    is_plain = _say(args, words, tensors)
    if is_plain and kwargs:
        is_plain = _say(kwargs, words, tensors) and _say(kwargs.values(), words, tensors)
    if not is_plain:
        return func(*args, **kwargs)
    key = tuple(words)
    known: Any = _KNOWN.get(key, _UNKNOWN)
    if known is _UNKNOWN:
        out = func(*args, **kwargs)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _known(func, out, tensors)
        return out
    if known is None:
        return func(*args, **kwargs)
    if known.container is None:
        return _again(known.results[0], tensors)
    return known.container([_again(result, tensors) for result in known.results])


def _say(values: Any, words: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add all that a result can depend on to the words, and the tensors to the tensors; False: it cannot be said."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or not _is_plain(value):
                return False
            words += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            tensors.append(value)
        elif kind in _PLAIN:
            words += (kind, value)  # 1, 1.0 and True are equal
        elif kind is tuple or kind is list or kind is torch.Size:
            words += (kind, len(value))
            if not _say(value, words, tensors):
                return False
        else:
            return False
    return True


def _again(result: _Made | int | None, tensors: Sequence[FakeTensor]) -> FakeTensor | None:
    if result is None:
        return None
    if isinstance(result, int):
        return tensors[result]
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(result.size, result.stride, dtype=result.dtype, device="meta")
        if result.viewed is not None:
            storage = tensors[result.viewed].untyped_storage()
            made.set_(storage, result.offset, result.size, result.stride)
    # As FakeTensor's constructor does it, which checks each argument again.
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=result.attributes["_fake_device"]
    )
    vars(fake).update(result.attributes)
    fake.fake_mode = torch._C._get_dispatch_mode(_FAKE)
    return fake


def _known(func: Any, out: Any, tensors: Sequence[FakeTensor]) -> _Known | None:
    if not isinstance(func, torch._ops.OpOverload) or any(tag in func.tags for tag in _UNFORESEEABLE):
        return None
    container = type(out) if isinstance(out, (tuple, list)) else None
    outputs = [out] if container is None else list(out)
    if container not in (None, tuple, list) or not all(each is None or type(each) is FakeTensor for each in outputs):
        return None
    storages = [each.untyped_storage()._cdata for each in outputs if each is not None]
    results: list[_Made | int | None] = []
    for each in outputs:
        found = None
        if each is not None:
            is_shared = storages.count(each.untyped_storage()._cdata) > 1
            found = _result(each, tensors, is_shared=is_shared)
            if found is None:
                return None
        results.append(found)
    return _Known(tuple(results), container)


def _result(out: FakeTensor, tensors: Sequence[FakeTensor], *, is_shared: bool) -> _Made | int | None:
    """How a tensor is made; None where that cannot be told."""
    for number, each in enumerate(tensors):
        if each is out:
            return number
    if out.constant is not None or not _is_plain(out) or out.requires_grad:
        return None
    storage = out.untyped_storage()
    owners = [number for number, each in enumerate(tensors) if each.untyped_storage()._cdata == storage._cdata]
    is_whole = out.storage_offset() == 0 and storage.nbytes() == _num_bytes(out)
    if len(owners) > 1 or (not owners and (is_shared or not is_whole)):
        return None
    return _Made(
        size=tuple(out.shape),
        stride=out.stride(),
        offset=int(out.storage_offset()),
        dtype=out.dtype,
        viewed=owners[0] if owners else None,
        attributes={name: value for name, value in vars(out).items() if name != "fake_mode"},
    )


def _num_bytes(tensor: Tensor) -> int:
    """Of a storage that holds it and nothing else."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.dtype.is_complex and not tensor.is_quantized
