"""The tensors of a model, real or stand-in, as loading meets them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from brim.memory.quantized.layout import KeptTensor
from brim.memory.quantized.loading import LoadedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def loaded_tensors(model: PreTrainedModel, *, arriving_bytes: int | None = None) -> list[LoadedTensor]:
    """The tensors in the order in which `model.to(device)` moves them.

    model: before an adapter is put on it, on meta or fake; with stand-ins where it is quantised. arriving_bytes: of an
    element of a weight that is quantised while it loads, that is of the dtype given to `from_pretrained`; None for a
    model that is not quantised so.
    """
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    stacks = _stacked_experts(model)
    seen: set[int] = set()
    found = []
    for name, module in _children_first(model):
        kept = _kept(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            path = f"{name}.{key}" if name else key
            if tensor is None or id(tensor) in seen or (key in kept and key != "weight") or _is_table(path):
                continue
            seen.add(id(tensor))
            found.append(
                LoadedTensor(
                    name=path,
                    num_elements=_num_weights(module) if kept and key == "weight" else tensor.numel(),
                    element_bytes=(arriving_bytes or 1) if kept and key == "weight" else tensor.element_size(),
                    layer=_layer(path),
                    kept=tuple(kept.values()) if key == "weight" else (),
                    transposed=_is_turned(module),
                    stacks=_stacks(path, tensor, stacks),
                    in_checkpoint=key not in module._non_persistent_buffers_set,
                    tied=path in tied,
                )
            )
    return found


def _children_first(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """As `nn.Module._apply` goes."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, module


def _kept(module: nn.Module) -> Mapping[str, KeptTensor]:
    """What a stand-in keeps in its weight's place, by name; in the order of birth, which its tensors were made in."""
    if not _is_stand_in(module):
        return {}
    tensors = {**module._parameters, **module._buffers}
    names = [name for name in _ORDER if tensors.get(name) is not None]
    return {name: _as_kept(name, tensors[name]) for name in names}


# quantize_4bit with and without double quantization, and int8_vectorwise_quant: see layout.py.
_ORDER = ("SCB", "weight", "code", "offset", "nested_absmax", "absmax", "nested_code")


def _as_kept(name: str, tensor: Any) -> KeptTensor:
    return KeptTensor(name=name, num_elements=tensor.numel(), element_bytes=tensor.element_size())


def _is_stand_in(module: nn.Module) -> bool:
    """Told by name: bitsandbytes is imported only where it is used."""
    return type(module).__name__ in ("StandInLinear4bit", "StandInLinear8bit")


def _num_weights(module: Any) -> int:
    return int(module.in_features * module.out_features)


def _is_turned(module: Any) -> bool:
    return _is_stand_in(module) and module.source_cls.__name__ == "Conv1D"


def _is_table(path: str) -> bool:
    return path == "bitsandbytes_dynamic_map"  # born with the first layer: loading.py


def _layer(path: str) -> int | None:
    number = re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.", f".{path}")
    return int(number[1]) if number else None


def _stacked_experts(model: PreTrainedModel) -> dict[str, int]:
    """Ends of names of parameters that loading stacks from one tensor an expert, and how many side by side.

    The mapping is transformers' own; only conversions that begin by stacking are meant.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    return {
        target: len(each.source_patterns)
        for each in get_model_conversion_mapping(model)
        if isinstance(each, WeightConverter) and each.operations and isinstance(each.operations[0], MergeModulelist)
        for target in each.target_patterns
    }


def _stacks(path: str, tensor: Tensor, stacked: Mapping[str, int]) -> tuple[int, int] | None:
    if tensor.ndim != 3:
        return None
    for target, projections in stacked.items():
        if path.endswith(target):
            return tensor.shape[0], projections
    return None
