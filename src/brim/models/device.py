"""Pick the local device, say what it can do, and what a precision means.

A precision sets the dtype of weights, the dtype of arithmetic, and whether the loss is scaled.
"""

from __future__ import annotations

import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from brim.config import DeviceFacts


def pick_device() -> torch.device:
    """Return the accelerator that torch sees, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def device_facts(device: torch.device) -> DeviceFacts:
    """Return what decides an `auto`: the kind of device, and whether it computes bf16 in hardware."""
    if device.type == "cuda":
        return DeviceFacts(kind="cuda", bf16=torch.cuda.get_device_capability(device) >= (8, 0))
    return DeviceFacts(kind="mps" if device.type == "mps" else "cpu", bf16=False)


def device_name(device: torch.device) -> str:
    """Return the device's name, for the run's record."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_bytes(device: torch.device) -> int:
    """Return the most memory used so far: allocated on a CUDA device, resident in this process elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(resident if sys.platform == "darwin" else resident * 1024)


PrecisionName = Literal["fp32", "bf16-true", "bf16-mixed", "fp16-mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Describe one precision, resolved. Adapters are fp32 in each of them."""

    name: PrecisionName
    autocast_dtype: torch.dtype | None  # arithmetic under autocast; None: in the weights' own dtype
    scales_loss: bool  # fp16 gradients underflow unless the loss is scaled

    def weights_dtype(self, *, frozen: bool) -> torch.dtype | None:
        """Return the base weights' dtype; None keeps the one that they are stored in.

        Under mixed precision, weights that train are fp32, so that small updates are not rounded away; frozen ones
        gain nothing from being larger than they are on disk, but for those that `cast_products` is for.
        """
        if self.name == "fp32":
            return torch.float32
        if self.name == "bf16-true":
            return torch.bfloat16
        return None if frozen else torch.float32

    def autocast(self, device: torch.device, *, keeps_copies: bool = True) -> AbstractContextManager[object]:
        """Return the context in which a forward pass runs.

        keeps_copies: of each weight that trains, a copy in the lower precision stays until the context ends. Without
        gradients that is useless: a pass needs each weight once, and 7 billion of them are 13 GiB.
        """
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype, cache_enabled=keeps_copies)


def precision(name: PrecisionName) -> Precision:
    """Return the precision of this name; `auto` has been resolved before."""
    autocast = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(name)
    return Precision(name=name, autocast_dtype=autocast, scales_loss=name == "fp16-mixed")


def cast_products(model: nn.Module, dtype: torch.dtype) -> dict[str, float]:
    """Hold the weights of linear layers in the dtype of arithmetic; return those beyond its range, with their largest.

    Under autocast each pass would cast a frozen weight, and autograd would keep the copy for the gradient of the
    layer's input: the weights twice. Cast once, the products are the same to the bit. Embeddings and norms stay as they
    are stored, since autocast leaves them alone: they decide the dtype between the layers, which in fp16 would overflow
    in some models. So do a head that shares an embedding's weight, and experts, which no linear layer holds.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    beyond = {}
    for name, module in model.named_modules():
        if not _is_plain_linear(module) or id(module.weight) in embedded:
            continue
        weight = cast(nn.Parameter, module.weight)
        if not weight.is_meta and torch.finfo(dtype).max < (largest := _largest(weight)) < float("inf"):
            beyond[name] = largest
        weight.data = weight.data.to(dtype)
    return beyond


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether it is neither quantised nor an architecture's own kind; transformers' Conv1D is GPT-2's."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _largest(weight: Any) -> float:
    low, high = weight.data.aminmax()
    return float(max(-low, high))
