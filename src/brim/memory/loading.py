"""Predict what loading a base model allocates on the device: what stays, and what is there only while loading.

A model's tensors, real or stand-in, come as loading brings them, instead of one after the other in the model's order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor, nn

from brim.memory.events import EventStream, Place
from brim.memory.trace import DYNAMIC_MAP_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from brim.memory.bitsandbytes import KeptTensor


def loaded_tensors(model: PreTrainedModel, *, arriving_bytes: int | None = None) -> list[LoadedTensor]:
    """List the tensors in the order in which `model.to(device)` moves them.

    model: before an adapter is put on it, on meta or fake; with stand-ins where it is quantised. arriving_bytes: of an
    element of a weight that is quantised while it loads, that is of the dtype given to `from_pretrained`; None for a
    model that is not quantised so.
    """
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    stacks = _stacked_experts(model) if any(each.ndim == _EXPERTS_NDIM for each in model.parameters()) else {}
    seen: set[int] = set()
    found = []
    for name, module in _children_first(model):
        kept = _kept(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            path = f"{name}.{key}" if name else key
            # bitsandbytes' table is born with the first layer that is quantised: see _quantize_4bit.
            is_table = path == "bitsandbytes_dynamic_map"
            if tensor is None or id(tensor) in seen or (key in kept and key != "weight") or is_table:
                continue
            is_packed = bool(kept) and key == "weight"
            layer: Any = module
            seen.add(id(tensor))
            found.append(
                LoadedTensor(
                    name=path,
                    num_elements=layer.in_features * layer.out_features if is_packed else tensor.numel(),
                    element_bytes=(arriving_bytes or 1) if is_packed else tensor.element_size(),
                    layer=_layer(path),
                    kept=tuple(kept.values()) if key == "weight" else (),
                    transposed=_is_stand_in(module) and layer.source_cls.__name__ == "Conv1D",
                    stacks=_stacks(path, tensor, stacks),
                    in_checkpoint=key not in module._non_persistent_buffers_set,
                    tied=path in tied,
                )
            )
    return found


def _children_first(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths in the order of `nn.Module._apply`."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, module


def _kept(module: nn.Module) -> Mapping[str, KeptTensor]:
    """Return by name, in the order of birth, what a stand-in keeps in place of its weight."""
    if not _is_stand_in(module):
        return {}
    from brim.memory.bitsandbytes import KeptTensor

    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    names = [name for name in _ORDER if tensors.get(name) is not None]
    return {
        name: KeptTensor(name=name, num_elements=tensors[name].numel(), element_bytes=tensors[name].element_size())
        for name in names
    }


_EXPERTS_NDIM = 3  # experts × rows × columns


# quantize_4bit with and without double quantization, and int8_vectorwise_quant: see layout.py.
_ORDER = ("SCB", "weight", "code", "offset", "nested_absmax", "absmax", "nested_code")


def _is_stand_in(module: nn.Module) -> bool:
    """Compare names, since bitsandbytes is imported only where it is used."""
    return type(module).__name__ in ("StandInLinear4bit", "StandInLinear8bit")


def _layer(path: str) -> int | None:
    number = re.search(r"\.(?:layers|h|blocks|block)\.(\d+)\.", f".{path}")
    return int(number[1]) if number else None


def _stacked_experts(model: PreTrainedModel) -> dict[str, int]:
    """Return how parameters of experts end that loading stacks, each with its projections side by side.

    Loading stacks them from one tensor an expert. The mapping is transformers' own; only conversions that begin by
    stacking count.
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
    found = (projections for target, projections in stacked.items() if path.endswith(target))
    projections = next(found, None) if tensor.ndim == _EXPERTS_NDIM else None
    return None if projections is None else (tensor.shape[0], projections)


def with_loading(
    stream: EventStream,
    tensors: Sequence[LoadedTensor],
    kind: LoadKind,
    *,
    device_bytes: int | None = None,
    has_warmup: bool = True,
) -> EventStream:
    """Return the stream with the base model loaded in transformers' order, and what is there only while loading.

    stream: its part "load" gives birth to all weights, each at the place of its module. tensors: of the base model, of
    all layers. What the stream's load has beside them, such as an adapter, comes after them. Raises LookupError where
    a tensor is not in the stream's load. has_warmup: transformers' since 4.50 (see load_events).
    """
    part = next(index for index, (_, label) in enumerate(stream.marks) if label == "load")
    (start, _), (end, _) = stream.marks[part : part + 2]
    # By a module's path in the base model, and bytes: a module's tensors of the same size are interchangeable here.
    born: dict[tuple[str, int], list[int]] = defaultdict(list)
    place_of = {}
    for position in range(start, end):
        storage, place = stream.storages[position], stream.places[position]
        born[base_path(place.module), stream.sizes[storage]].append(storage)
        place_of[storage] = place
    loading = EventStream()
    resident = load_events(loading, tensors, kind, device_bytes=device_bytes, has_warmup=has_warmup)
    names = {storage: name for name, storage in resident.items()}
    out = EventStream(
        sizes=list(stream.sizes),
        categories=list(stream.categories),
        storages=stream.storages[:start],
        places=stream.places[:start],
    )
    given: dict[int, int] = {}
    for storage, place in zip(loading.storages, loading.places, strict=True):
        if storage < 0:
            out.death(given[~storage], place)
        elif storage in names:
            name, num_bytes = names[storage], loading.sizes[storage]
            same = born.get((name.rpartition(".")[0], num_bytes))
            if not same:
                raise LookupError(f"{name}, {num_bytes:,} bytes, is not among what the stream loads")
            out.storages.append(same.pop(0))
            out.places.append(place_of.pop(out.storages[-1]))
        else:
            given[storage] = out.birth(loading.sizes[storage], loading.categories[storage], place)
    for storage, place in place_of.items():
        out.storages.append(storage)
        out.places.append(place)
    shift = len(out.storages) - end
    out.storages += stream.storages[end:]
    out.places += stream.places[end:]
    out.marks = [(position if position <= start else position + shift, label) for position, label in stream.marks]
    return out


def of_all_layers(
    tensors: Sequence[LoadedTensor], *, layers_path: str, num_layers: int, template: Callable[[int], int]
) -> list[LoadedTensor]:
    """Extend the tensors of some layers to all `num_layers` of the model.

    template: returns the given layer that a layer is like.
    """
    prefix = f"{base_path(layers_path)}."

    def layer_of(tensor: LoadedTensor) -> int | None:
        number = tensor.name.removeprefix(prefix).partition(".")[0]
        return int(number) if tensor.name.startswith(prefix) and number.isdigit() else None

    by_layer: dict[int, list[LoadedTensor]] = defaultdict(list)
    for tensor in tensors:
        if (layer := layer_of(tensor)) is not None:
            by_layer[layer].append(tensor)

    def copies() -> Iterator[LoadedTensor]:
        for layer in range(num_layers):
            old = template(layer)
            for tensor in by_layer[old]:
                rest = tensor.name.removeprefix(f"{prefix}{old}.")
                yield replace(tensor, name=f"{prefix}{layer}.{rest}", layer=layer)

    out: list[LoadedTensor] = []
    for tensor in tensors:
        if layer_of(tensor) is None:
            out.append(tensor)
        elif tensor is by_layer[0][0]:
            out.extend(copies())
    return out


def base_path(module: str) -> str:
    """Return a module's path in the base model, from its path in the model as PEFT wraps it."""
    parts = f"{module}.".removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in ("", "base_layer"))


def bias_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of an element of each quantised layer's bias, by the bias's name in the base model."""
    return {
        f"{base_path(name)}.bias": bias.element_size()
        for name, module in model.named_modules()
        if _is_stand_in(module) and (bias := module._parameters.get("bias")) is not None
    }


# moved: made on the CPU, then `model.to(device)`. placed: read tensor by tensor onto the device (`device_map`).
# quantized: placed in 16 or 32 bits, and quantised there. Which it is says `ModelFolder.stays_as_read`.
LoadKind: TypeAlias = Literal["moved", "placed", "quantized"]


_SPARE_BYTES = int(1.2 * 1024**3)  # caching_allocator_warmup, transformers/modeling_utils.py, leaves this


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTensor:
    """Describe a parameter or buffer of the model, and how it is loaded.

    kept: of a quantised weight, what stays in its place, named as the layer's buffers; empty: the tensor itself stays.
    stacks: of experts' weights that the checkpoint holds one by one: (experts, projections side by side).
    """

    name: str
    num_elements: int
    element_bytes: int  # as it arrives
    layer: int | None = None
    kept: tuple[KeptTensor, ...] = ()
    transposed: bool = False  # GPT-2's Conv1D, turned before it is quantised
    stacks: tuple[int, int] | None = None
    in_checkpoint: bool = True  # buffers such as rotary frequencies are not; they come last
    tied: bool = False  # shares another's storage

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(slots=True)
class _Loading:
    stream: EventStream
    resident: dict[str, int] = field(default_factory=dict)  # a tensor's path in the model -> its storage

    def stay(self, name: str, num_bytes: int, place: Place) -> None:
        self.resident[name] = self.stream.birth(num_bytes, "weights", place)

    def keep(self, tensor: LoadedTensor, *kept: KeptTensor) -> None:
        """Give birth to what stays in place of a quantised weight."""
        for each in kept:
            self.stay(f"{tensor.name.rpartition('.')[0]}.{each.name}", each.num_bytes, _place(tensor))

    def pass_by(self, num_bytes: int, place: Place) -> int:
        return self.stream.birth(num_bytes, "temporary", place)


def load_events(
    stream: EventStream,
    tensors: Sequence[LoadedTensor],
    kind: LoadKind,
    *,
    device_bytes: int | None = None,
    has_warmup: bool = True,
) -> dict[str, int]:
    """Append the births and deaths of loading, in order. Returns the storage of each tensor, by its path in the model.

    tensors: in the model's order. device_bytes: the device's memory, which bounds the block that transformers takes and
    frees before it places weights, so that the allocator need not ask for memory weight by weight; has_warmup: whether
    it does. Weights are read in one thread, as transformers does while it quantises; of weights that stay as they are
    read, which four threads read ahead, the order is one of those possible.
    """
    loading = _Loading(stream)
    mine = [tensor for tensor in tensors if not tensor.tied]
    if kind == "moved":
        for tensor in mine:
            loading.stay(tensor.name, tensor.num_bytes, _place(tensor))
        return loading.resident
    if has_warmup and (num_bytes := warmup_bytes(mine, device_bytes)) > 0:
        place = Place(phase="load", operator="caching_allocator_warmup")
        stream.death(loading.pass_by(num_bytes, place), place)
    for tensor in in_checkpoint_order(mine):
        _place_one(loading, tensor, kind)
    for tensor in mine:
        if not tensor.in_checkpoint:
            loading.stay(tensor.name, tensor.num_bytes, _place(tensor))
    return loading.resident


def warmup_bytes(tensors: Iterable[LoadedTensor], device_bytes: int | None) -> int:
    """Return the size of `caching_allocator_warmup`'s block: all weights as they will be, without scales."""
    total = sum(_settled_bytes(tensor) for tensor in tensors if tensor.in_checkpoint and not tensor.tied)
    if device_bytes is not None:
        total = min(total, device_bytes - _SPARE_BYTES)
    return int(total // 2) * 2  # it is taken as fp16


def in_checkpoint_order(tensors: Iterable[LoadedTensor]) -> list[LoadedTensor]:
    """Sort as `dot_natural_key` does: by name, numbers by value, a module's own tensors before those of its parts."""
    return sorted((tensor for tensor in tensors if tensor.in_checkpoint), key=lambda tensor: _natural(tensor.name))


def _natural(name: str) -> list[tuple[int, int, str, int]]:
    """Return a key that sorts numbers before words, and a word's trailing digits by value."""
    parts = []
    for part in name.split("."):
        word = part.rstrip("0123456789")
        digits = part[len(word) :]
        parts.append((0, int(part), "", -1) if part.isdigit() else (1, 0, word, int(digits) if digits else -1))
    return parts


def _settled_bytes(tensor: LoadedTensor) -> float:
    """Count half a byte or one for each quantised weight (`quantized_element_size`), else the tensor's own bytes."""
    if not tensor.kept:
        return tensor.num_bytes
    packed = next(kept for kept in tensor.kept if kept.name == "weight")
    return tensor.num_elements * (1.0 if packed.num_elements == tensor.num_elements else 0.5)


def _place_one(loading: _Loading, tensor: LoadedTensor, kind: LoadKind) -> None:
    if tensor.kept and kind == "quantized":
        is_8bit = any(kept.name == "SCB" for kept in tensor.kept)
        (_quantize_8bit if is_8bit else _quantize_4bit)(loading, tensor)
    elif tensor.kept:
        loading.keep(tensor, *tensor.kept)
    elif tensor.stacks is not None:
        _stack(loading, tensor, *tensor.stacks)
    else:
        loading.stay(tensor.name, tensor.num_bytes, _place(tensor))


def _quantize_4bit(loading: _Loading, tensor: LoadedTensor) -> None:
    """Do as Bnb4bitQuantize (transformers/integrations/bitsandbytes.py), Params4bit._quantize and quantize_4bit."""
    place, stream = _place(tensor), loading.stream
    kept = {each.name: each for each in tensor.kept}
    arrived = [loading.pass_by(tensor.num_bytes, place)]
    if tensor.transposed:
        arrived.append(loading.pass_by(tensor.num_bytes, place))  # `.contiguous()` of the turned weight
    is_double = "offset" in kept
    scales_bytes = kept["absmax"].num_elements * 4
    if is_double:
        arrived.append(loading.pass_by(scales_bytes, place))
    else:
        loading.keep(tensor, kept["absmax"])
    # The table of 16 values is divided by its largest: get_4bit_type in functional.py.
    loading.keep(tensor, kept["weight"], kept["code"])
    for storage in [loading.pass_by(num_bytes, place) for num_bytes in (16 * 4, 4)]:
        stream.death(storage, place)
    if is_double:
        loading.keep(tensor, kept["offset"])
        arrived.append(loading.pass_by(scales_bytes, place))
        if "bitsandbytes_dynamic_map" not in loading.resident:
            loading.stay("bitsandbytes_dynamic_map", DYNAMIC_MAP_BYTES, place)
        loading.keep(tensor, *(kept[name] for name in ("nested_absmax", "absmax", "nested_code") if name in kept))
    for storage in reversed(arrived):
        stream.death(storage, place)


def _quantize_8bit(loading: _Loading, tensor: LoadedTensor) -> None:
    """Do as Bnb8bitQuantize and Int8Params._quantize: the weight goes to the CPU and comes back in fp16."""
    place = _place(tensor)
    arrived = loading.pass_by(tensor.num_bytes, place)
    again = loading.pass_by(tensor.num_elements * 2, place)
    loading.keep(tensor, *tensor.kept)
    loading.stream.death(again, place)
    loading.stream.death(arrived, place)


def _stack(loading: _Loading, tensor: LoadedTensor, experts: int, projections: int) -> None:
    """Do as MergeModulelist, then Concatenate (transformers/core_model_loading.py), both on the device."""
    place, stream = _place(tensor), loading.stream
    part_bytes = tensor.num_bytes // projections
    arrived = [[loading.pass_by(part_bytes // experts, place) for _ in range(experts)] for _ in range(projections)]
    parts = []
    for sources in arrived:
        if projections == 1:
            loading.stay(tensor.name, part_bytes, place)
        else:
            parts.append(loading.pass_by(part_bytes, place))
        for source in sources:
            stream.death(source, place)
    if projections > 1:
        loading.stay(tensor.name, tensor.num_bytes, place)
    for part in parts:
        stream.death(part, place)


def _place(tensor: LoadedTensor) -> Place:
    return Place(phase="load", layer=tensor.layer, module=tensor.name.rpartition(".")[0])
