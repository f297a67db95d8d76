"""The parameters of a recorded model, all layers, as sharding cuts them."""

from __future__ import annotations

from torch import nn

from brim.memory.depth import Depth
from brim.memory.layers import Expansion
from brim.memory.recorder import Recorder
from brim.memory.sharding_units import Weight


def weights_of(
    recorder: Recorder, model: nn.Module, depth: Depth, layers_path: str, expansion: Expansion
) -> tuple[Weight, ...]:
    """In the order of their storages; tied ones are one, and belong to the module that comes first."""
    weights = []
    for name, parameter in model.named_parameters():
        number = recorder.number_of(parameter)
        assert number is not None
        for layer in _layers_like(name, layers_path, depth):
            weights.append(
                Weight(
                    storage=expansion.number(number, layer),
                    shape=tuple(parameter.shape),
                    element_bytes=parameter.element_size(),
                    layer=layer,
                    trainable=parameter.requires_grad,
                )
            )
    return tuple(sorted(weights, key=lambda weight: weight.storage))


def _layers_like(name: str, layers_path: str, depth: Depth) -> list[int | None]:
    """The layers of the model that a recorded parameter stands for; None: it lies outside the layers."""
    if not name.startswith(f"{layers_path}."):
        return [None]
    recorded = int(name[len(layers_path) + 1 :].split(".", 1)[0])
    return [layer for layer in range(depth.num_layers) if depth.template(layer) == recorded]
