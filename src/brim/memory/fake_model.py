"""A model whose weights have shapes and no values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory.layers import Depth, depth_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUM_LAYERS = "num_hidden_layers"


def build_fake(
    architecture: PretrainedConfig, build: Callable[[PretrainedConfig], nn.Module], mode: FakeTensorMode
) -> nn.Module:
    """What `build` makes, on fake tensors of the CPU; it is built on the meta device, where nothing is computed.

    transformers' no_init_weights would leave out the tying of the head to the embeddings, too.
    """
    with torch.device("meta"):
        model = build(architecture)
    with mode:
        _replace_tensors(model)
    return model


def depth_of_architecture(architecture: PretrainedConfig) -> Depth:
    """How the decoder layers repeat, by what the configuration says of each of them."""
    num_layers = getattr(architecture, _NUM_LAYERS)
    lists = [value for _, value in _values_by_layer(architecture, num_layers)]
    return depth_of(list(zip(*lists, strict=True)) if lists else [()] * num_layers)


def with_layers(architecture: PretrainedConfig, layers: list[int]) -> PretrainedConfig:
    """The architecture with only these of its layers."""
    num_layers = getattr(architecture, _NUM_LAYERS)
    fewer = copy.deepcopy(architecture)
    setattr(fewer, _NUM_LAYERS, len(layers))
    for name, values in _values_by_layer(architecture, num_layers):
        setattr(fewer, name, [values[layer] for layer in layers])
    return fewer


def decoder_layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its path."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise LookupError(f"no list of {num_layers} layers in {type(model).__name__}")


def _values_by_layer(architecture: PretrainedConfig, num_layers: int) -> list[tuple[str, list[Any]]]:
    """Settings that hold one value a layer, such as `layer_types`."""
    return [
        (name, list(value))
        for name, value in vars(architecture).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers and not name.startswith("_")
    ]


def _replace_tensors(model: nn.Module) -> None:
    """Tied weights stay one."""
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    replaced[id(tensor)] = _fake_like(tensor)
                tensors[name] = replaced[id(tensor)]  # type: ignore[assignment]


def _fake_like(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
