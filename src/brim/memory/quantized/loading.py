"""What loading a base model allocates on the device: what stays, and what is there only on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from brim.memory.events import EventStream, Place
from brim.memory.quantized.layout import DYNAMIC_MAP_BYTES, KeptTensor

# moved: read on the CPU, then `model.to(device)`; what brim does with weights that are not quantised.
# placed: read tensor by tensor onto the device (`device_map`); so come weights that are stored quantised.
# quantized: placed in 16 or 32 bits, and quantised there.
LoadKind: TypeAlias = Literal["moved", "placed", "quantized"]
_Stay: TypeAlias = Callable[..., None]

_SPARE_BYTES = int(1.2 * 1024**3)  # caching_allocator_warmup, transformers/modeling_utils.py, leaves this


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTensor:
    """A parameter or buffer of the model, with the way on which it comes.

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
    has_table: bool = False

    def stay(self, name: str, num_bytes: int, place: Place) -> None:
        self.resident[name] = self.stream.birth(num_bytes, "weights", place)

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
    """Append the births and deaths of loading, in order; each tensor's path in the model, with its storage.

    tensors: in the model's order. device_bytes: the device's memory, which bounds the block that transformers takes and
    frees before it places weights, so that the allocator need not ask for memory weight by weight; has_warmup: whether
    it does. Weights are read in one thread, as transformers does while it quantises; of stored quantised weights, which
    four threads read ahead, the order is one of those possible.
    """
    loading = _Loading(stream)
    mine = [tensor for tensor in tensors if not tensor.tied]
    if kind == "moved":
        for tensor in mine:
            loading.stay(tensor.name, tensor.num_bytes, _place(tensor))
        return loading.resident
    if has_warmup:
        _warm_up(loading, mine, device_bytes)
    for tensor in in_checkpoint_order(mine):
        _place_one(loading, tensor, kind)
    for tensor in mine:
        if not tensor.in_checkpoint:
            loading.stay(tensor.name, tensor.num_bytes, _place(tensor))
    return loading.resident


def warmup_bytes(tensors: Iterable[LoadedTensor], device_bytes: int | None) -> int:
    """The block of `caching_allocator_warmup`: all weights as they will be, to the byte, without scales."""
    total = sum(_settled_bytes(tensor) for tensor in tensors if tensor.in_checkpoint and not tensor.tied)
    if device_bytes is not None:
        total = min(total, device_bytes - _SPARE_BYTES)
    return int(total // 2) * 2  # it is taken as fp16


def in_checkpoint_order(tensors: Iterable[LoadedTensor]) -> list[LoadedTensor]:
    """By name, numbers by value, those of a module before those of its parts: `dot_natural_key`."""
    return sorted((tensor for tensor in tensors if tensor.in_checkpoint), key=lambda tensor: _natural(tensor.name))


def _natural(name: str) -> list[tuple[int, int, str, int]]:
    """Numbers before words; a word's trailing digits by value."""
    parts = []
    for part in name.split("."):
        word = part.rstrip("0123456789")
        digits = part[len(word) :]
        parts.append((0, int(part), "", -1) if part.isdigit() else (1, 0, word, int(digits) if digits else -1))
    return parts


def _settled_bytes(tensor: LoadedTensor) -> float:
    """Half a byte or one for each quantised weight (`quantized_element_size`), else the tensor's own."""
    if not tensor.kept:
        return tensor.num_bytes
    packed = next(kept for kept in tensor.kept if kept.name == "weight")
    return tensor.num_elements * (1.0 if packed.num_elements == tensor.num_elements else 0.5)


def _warm_up(loading: _Loading, tensors: Sequence[LoadedTensor], device_bytes: int | None) -> None:
    place = Place(phase="load", operator="caching_allocator_warmup")
    num_bytes = warmup_bytes(tensors, device_bytes)
    if num_bytes > 0:
        loading.stream.death(loading.pass_by(num_bytes, place), place)


def _place_one(loading: _Loading, tensor: LoadedTensor, kind: LoadKind) -> None:
    if tensor.kept and kind == "quantized":
        is_8bit = any(kept.name == "SCB" for kept in tensor.kept)
        (_quantize_8bit if is_8bit else _quantize_4bit)(loading, tensor)
    elif tensor.kept:
        for kept in tensor.kept:
            loading.stay(_of_layer(tensor, kept), kept.num_bytes, _place(tensor))
    elif tensor.stacks is not None:
        _stack(loading, tensor, *tensor.stacks)
    else:
        loading.stay(tensor.name, tensor.num_bytes, _place(tensor))


def _quantize_4bit(loading: _Loading, tensor: LoadedTensor) -> None:
    """Bnb4bitQuantize (transformers/integrations/bitsandbytes.py), Params4bit._quantize, quantize_4bit."""
    place, stream = _place(tensor), loading.stream
    kept = {each.name: each for each in tensor.kept}
    arrived = [loading.pass_by(tensor.num_bytes, place)]
    if tensor.transposed:
        arrived.append(loading.pass_by(tensor.num_bytes, place))  # `.contiguous()` of the turned weight

    def stay(*names: str) -> None:
        for name in names:
            loading.stay(_of_layer(tensor, kept[name]), kept[name].num_bytes, place)

    if "offset" not in kept:
        stay("absmax", "weight")
        _normalized_code(loading, stay, place)
    else:
        scales_bytes = kept["absmax"].num_elements * 4
        scales = loading.pass_by(scales_bytes, place)
        stay("weight")
        _normalized_code(loading, stay, place)
        stay("offset")
        shifted = loading.pass_by(scales_bytes, place)
        if not loading.has_table:
            loading.stay("bitsandbytes_dynamic_map", DYNAMIC_MAP_BYTES, place)
            loading.has_table = True
        stay("nested_absmax", "absmax", *(["nested_code"] if "nested_code" in kept else []))
        stream.death(shifted, place)
        stream.death(scales, place)
    for storage in reversed(arrived):
        stream.death(storage, place)


def _normalized_code(loading: _Loading, stay: _Stay, place: Place) -> None:
    """The table of 16 values, divided by its largest: get_4bit_type, functional.py."""
    stay("code")
    absolute = loading.pass_by(16 * 4, place)
    largest = loading.pass_by(4, place)
    loading.stream.death(absolute, place)
    loading.stream.death(largest, place)


def _quantize_8bit(loading: _Loading, tensor: LoadedTensor) -> None:
    """Bnb8bitQuantize and Int8Params._quantize: the weight goes to the CPU and comes back in fp16 beside itself."""
    place = _place(tensor)
    arrived = loading.pass_by(tensor.num_bytes, place)
    again = loading.pass_by(tensor.num_elements * 2, place)
    for kept in tensor.kept:
        loading.stay(_of_layer(tensor, kept), kept.num_bytes, place)
    loading.stream.death(again, place)
    loading.stream.death(arrived, place)


def _stack(loading: _Loading, tensor: LoadedTensor, experts: int, projections: int) -> None:
    """MergeModulelist, then Concatenate (transformers/core_model_loading.py), both on the device."""
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


def _of_layer(tensor: LoadedTensor, kept: KeptTensor) -> str:
    return f"{tensor.name.rpartition('.')[0]}.{kept.name}"


def _place(tensor: LoadedTensor) -> Place:
    return Place(phase="load", layer=tensor.layer, module=tensor.name.rpartition(".")[0])
