"""What tells the decoder layers of an architecture apart: their modules, and what its configuration says of each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.memory.depth import Depth, depth_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUM_LAYERS = "num_hidden_layers"
_FIRST_DENSE = "first_k_dense_replace"  # so many first layers have no experts
_PLAIN = (bool, int, str, torch.dtype, type(None))


def depth_of_architecture(architecture: PretrainedConfig) -> Depth:
    """How the decoder layers repeat; all of them are recorded where fewer cannot be had with the same configuration.

    Raises what transformers does when the architecture cannot be built, LookupError where no layers are found.
    """
    key = type(architecture), architecture.to_json_string(use_diff=False)
    if key not in _DEPTHS:
        _DEPTHS.clear()  # of the architecture at hand alone: each shape that is recorded asks for it
        _DEPTHS[key] = _depth(architecture)
    return _DEPTHS[key]


_DEPTHS: dict[tuple[type, str], Depth] = {}


def _depth(architecture: PretrainedConfig) -> Depth:
    num_layers = getattr(architecture.get_text_config(), _NUM_LAYERS)
    kinds = _kinds(architecture)
    depth = depth_of(kinds)
    if depth.num_recorded == num_layers or _kinds(with_layers(architecture, depth.recorded)) == [
        kinds[layer] for layer in depth.recorded
    ]:
        return depth
    return depth.whole()


def with_layers(architecture: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The architecture with only these of its layers, as far as its configuration can say so."""
    num_layers = getattr(architecture.get_text_config(), _NUM_LAYERS)
    fewer = copy.deepcopy(architecture)
    text = fewer.get_text_config()
    for name, values in _values_by_layer(text, num_layers):
        setattr(text, name, [values[layer] for layer in layers])
    num_dense = getattr(text, _FIRST_DENSE, None)
    if num_dense is not None:
        setattr(text, _FIRST_DENSE, sum(layer < num_dense for layer in layers))
    setattr(text, _NUM_LAYERS, len(layers))
    return fewer


def decoder_layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its path. Raises LookupError where there is none."""
    decoder = model.get_decoder()  # type: ignore[operator]  # not a vision tower, which may be as deep
    inside = set(decoder.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and module in inside:
            return name, module
    raise LookupError(f"no list of {num_layers} decoder layers in {type(model).__name__}")


def _kinds(architecture: PretrainedConfig) -> list[tuple[Any, ...]]:
    """One value a layer; layers of equal value do the same."""
    from transformers import AutoModelForCausalLM

    text = architecture.get_text_config()
    num_layers = getattr(text, _NUM_LAYERS)
    is_foreign = type(architecture).__module__.startswith("transformers_modules")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=is_foreign)
    _, layers = decoder_layers(model, num_layers)
    said = [values for _, values in _values_by_layer(text, num_layers)]
    return list(zip(_without_numbers([_modules(layer) for layer in layers]), *said, strict=True))


def _values_by_layer(architecture: PretrainedConfig, num_layers: int) -> list[tuple[str, list[Any]]]:
    """Settings that hold one value a layer, such as `layer_types`; not those that name all layers by their numbers."""
    return [
        (name, list(value))
        for name, value in vars(architecture).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers and not name.startswith("_")
        if list(value) != list(range(num_layers))
    ]


def _modules(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Every module's class, plain attributes and shapes."""
    facts: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        facts[path, ""] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN) and not name.startswith("_"):
                facts[path, name] = value
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            facts[path, name] = None if tensor is None else (tensor.shape, tensor.dtype)
    return facts


def _without_numbers(layers: list[dict[tuple[str, str], Any]]) -> list[dict[tuple[str, str], Any]]:
    """Without the attributes that count the layers."""
    offsets: dict[tuple[str, str], set[int | None]] = {}
    for number, layer in enumerate(layers):
        for key, value in layer.items():
            counts = isinstance(value, int) and not isinstance(value, bool)
            offsets.setdefault(key, set()).add(value - number if counts else None)
    counting = {key for key, found in offsets.items() if len(found) == 1 and None not in found}
    return [{key: value for key, value in layer.items() if key not in counting} for layer in layers]
