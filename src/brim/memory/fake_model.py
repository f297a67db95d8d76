"""A model whose weights have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
