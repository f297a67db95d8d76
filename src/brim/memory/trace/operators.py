"""Describe operators: what one computes and moves, and what it returns on fake tensors.

FLOPs and bytes follow from the shapes that an operator is given. What operators return on fake tensors is cached: in a
trace most of them run again and again on similar tensors. PyTorch has such a cache, too, for every kind of tensor; but
there, telling two calls apart and rebuilding the result takes most of a trace's time. Here this is done for plain
strided tensors, in few steps, and all else is left to PyTorch. The results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from brim.memory.events import Unit

DEVICE_OF = torch.ops.prim.device.default


# Results of such operators do not follow from the sizes of their arguments, or they change a size in place.
_UNPREDICTABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


_UNKNOWN = object()


_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass(frozen=True, slots=True)
class _Made:
    """Describe a tensor that an operator makes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    viewed: int | None  # position among the given tensors of the one whose storage it shares; None: a new storage
    attributes: Mapping[str, Any]  # those of the fake tensor


@dataclass(frozen=True, slots=True)
class _Known:
    """Describe what an operator returns: how each result is made, or which of the given tensors it is; and its work."""

    results: tuple[_Made | int | None, ...]
    container: type | None  # None: there is one result, by itself
    work: OperatorWork | None


# About 1.5 kB each, a few hundred for each shape traced; no tensors are held. None: the result cannot be cached.
_MOST_KNOWN = 4096


_KNOWN: dict[tuple[Any, ...], _Known | None] = {}


def result_and_work(func: Any, args: Arguments, kwargs: Options) -> tuple[Any, OperatorWork | None]:
    """Return func(*args, **kwargs) as a FakeTensorMode would, and its work: None where no kernel runs, as for views.

    Call it where the modes above that one have been left.
    """
    tensors: list[FakeTensor] = []
    parts: list[Any] = [func, torch.get_default_dtype()]
    is_plain = _extend_key(args, parts, tensors)
    if is_plain and kwargs:
        is_plain = _extend_key(kwargs, parts, tensors) and _extend_key(kwargs.values(), parts, tensors)
    key = tuple(parts)
    known: Any = _KNOWN.get(key, _UNKNOWN) if is_plain else None
    if known is None or known is _UNKNOWN:
        out = func(*args, **kwargs)
        work = operator_work(func, args, kwargs, out)
        if known is _UNKNOWN:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = _known(func, out, tensors, work)
        return out, work
    if known.container is None:
        return _rebuilt(known.results[0], tensors), known.work
    return known.container([_rebuilt(result, tensors) for result in known.results]), known.work


def _extend_key(values: Any, parts: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add to `parts` all that a result can depend on, and to `tensors` those among the values; False: not possible."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or not _is_plain(value):
                return False
            parts += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            tensors.append(value)
        elif kind in _PLAIN:
            parts += (kind, value)  # the kind, since 1, 1.0 and True are equal
        elif kind is tuple or kind is list or kind is torch.Size:
            parts += (kind, len(value))
            if not _extend_key(value, parts, tensors):
                return False
        else:
            return False
    return True


def _rebuilt(result: _Made | int | None, tensors: Sequence[FakeTensor]) -> FakeTensor | None:
    if result is None:
        return None
    if isinstance(result, int):
        return tensors[result]
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(result.size, result.stride, dtype=result.dtype, device="meta")
        if result.viewed is not None:
            storage = tensors[result.viewed].untyped_storage()
            made.set_(storage, result.offset, result.size, result.stride)
    # As FakeTensor's constructor does it, but without checking each argument again.
    fake: FakeTensor = Tensor._make_subclass(
        FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=result.attributes["_fake_device"]
    )
    vars(fake).update(result.attributes)
    fake.fake_mode = torch._C._get_dispatch_mode(_FAKE)
    return fake


def _known(func: Any, out: Any, tensors: Sequence[FakeTensor], work: OperatorWork | None) -> _Known | None:
    if not isinstance(func, torch._ops.OpOverload) or any(tag in func.tags for tag in _UNPREDICTABLE):
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
    return _Known(tuple(results), container, work)


def _result(out: FakeTensor, tensors: Sequence[FakeTensor], *, is_shared: bool) -> _Made | int | None:
    """Describe how a tensor is made; None where that is not known."""
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
    """Return the bytes of a storage that holds the tensor and nothing else."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.dtype.is_complex and not tensor.is_quantized


Arguments: TypeAlias = tuple[Any, ...]


Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Hold the work of one call of an operator."""

    unit: Unit
    dtype: str
    flops: int
    num_bytes: int
    kernels: int = 1


Rule: TypeAlias = Callable[[Arguments, Options, Any], OperatorWork]


# These compute nothing, though by their schema they are not views.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "resize_",
        "set_",
        "is_same_size",
        "_local_scalar_dense",
        "_has_compatible_shallow_copy_type",
    )
)


_OVERWRITING = frozenset(("aten::zero_", "aten::fill_", "aten::copy_"))  # they do not read what they are called on


# These read as much of their first tensor as they return.
_GATHERING = frozenset(f"aten::{name}" for name in ("embedding", "index_select", "gather", "index", "nll_loss_forward"))


# These touch only as much of the tensor that they are called on as there are values, which are the last argument.
_SCATTERING = frozenset(
    f"aten::{name}"
    for name in ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_add_", "scatter_")
)


# Tensors that one launch takes, by the number of lists (depth_to_max_tensors in MultiTensorApply.cuh of PyTorch).
_TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)


_CHUNKS_A_LAUNCH, _CHUNK = 320, 65536  # the same file


def operator_work(func: Any, args: Arguments, kwargs: Options, out: Any) -> OperatorWork | None:
    """Return the work of a call of one of ATen's operators; None where no kernel runs, as for views."""
    rule = _rule(func)
    return None if rule is None else rule(args, kwargs, out)


def attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, causal: bool, backward: bool
) -> int:
    """Count two products forward, five backward (one of them recomputes the scores), half of each where causal.

    query: [B, H, T, D]; key: [B, K, S, D]; value: [B, K, S, E]. After Dao et al., FlashAttention-2 (2023), section 4.1.
    """
    rows, heads, queries, width = query
    scores = rows * heads * queries * key[-2]
    flops = scores * (6 * width + 4 * value[-1] if backward else 2 * width + 2 * value[-1])
    return flops // 2 if causal else flops


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes that reading a whole tensor takes; what is expanded is in memory once."""
    num_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            num_bytes *= size
    return num_bytes


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@cache
def _rule(func: Any) -> Rule | None:
    name: str = func._schema.name
    if name in _FREE or any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
        return None
    if name.startswith("aten::_scaled_dot_product_"):
        return _attention(func)
    packet = torch.ops.aten.addmm if func.overloadpacket is torch.ops.aten.addmm_ else func.overloadpacket
    if packet in flop_registry:  # which does not know the product that is added in place
        return _product(flop_registry[packet])
    if name.startswith(("aten::_foreach_", "aten::_fused_ad", "aten::_fused_sgd")):
        return _over_lists(name)
    if name in _GATHERING:
        return _gather
    if name in _SCATTERING:
        return _scatter
    return _overwrite if name in _OVERWRITING else _elementwise


def _product(flops_of: Callable[..., int]) -> Rule:
    def rule(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
        tensors = [each for each in args if isinstance(each, Tensor)]
        flops = flops_of(*args, **kwargs, out_val=out)
        return OperatorWork("matrix", dtype_name(tensors[-1].dtype), int(flops), _moved(args) + _moved(out))

    return rule


def _attention(func: Any) -> Rule:
    names = [each.name for each in func._schema.arguments]
    backward = "grad_out" in names or "grad_out_" in names
    first = names.index("query")

    def rule(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = args[first : first + 3]
        masked = given.get("attn_mask") is not None or given.get("attn_bias") is not None
        causal = bool(given.get("is_causal")) and not masked
        flops = attention_flops(query.shape, key.shape, value.shape, causal=causal, backward=backward)
        return OperatorWork("attention", dtype_name(query.dtype), flops, _moved(args) + _moved(out))

    return rule


def _over_lists(name: str) -> Rule:
    """Return the rule of an operator over lists; its results have the shapes of the first list, except for norms."""
    writes = 0 if name == "aten::_foreach_norm" else 3 if "_fused_adam" in name else 1
    # A fused update takes weights, gradients and averages, and writes all but the gradients.
    written = (0, 2, 3) if writes == 3 else (0,) * writes

    def rule(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
        lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
        first = lists[0]
        chunks = sum(-(-each.numel() // _CHUNK) for each in first)
        tensors = _TENSORS_A_LAUNCH[min(len(lists), len(_TENSORS_A_LAUNCH)) - 1]
        kernels = max(1, -(-len(first) // tensors), -(-chunks // _CHUNKS_A_LAUNCH))
        num_bytes = _moved(args) + sum(_moved(lists[number]) for number in written)
        return OperatorWork("vector", dtype_name(first[0].dtype), 0, num_bytes, kernels)

    return rule


def _gather(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    first = out[0] if isinstance(out, tuple) else out
    return OperatorWork("vector", dtype_name(first.dtype), 0, 2 * _moved(first) + _moved(args[1:]))


def _scatter(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    values = next(each for each in reversed((*args, *kwargs.values())) if isinstance(each, Tensor))
    return OperatorWork("vector", dtype_name(args[0].dtype), 0, 2 * _moved(values) + _moved(args[1:]))


def _overwrite(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    return OperatorWork("vector", dtype_name(args[0].dtype), 0, _moved(args[0]) + _moved(args[1:]))


def _elementwise(args: Arguments, kwargs: Options, out: Any) -> OperatorWork:
    num_bytes = _moved(args) + _moved(out) + (_moved(tuple(kwargs.values())) if kwargs else 0)
    first = out if isinstance(out, Tensor) else next((each for each in args if isinstance(each, Tensor)), None)
    return OperatorWork("vector", "" if first is None else dtype_name(first.dtype), 0, num_bytes)


def _moved(value: Any) -> int:
    if isinstance(value, Tensor):
        return num_bytes_of(value)
    if isinstance(value, (list, tuple)):
        return sum(map(_moved, value))
    return 0
