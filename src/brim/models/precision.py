"""What a precision means: the dtype of weights, the dtype of arithmetic, and whether the loss is scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

PrecisionName = Literal["fp32", "bf16-true", "bf16-mixed", "fp16-mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One precision, resolved. Adapters are fp32 in each of them."""

    name: PrecisionName
    autocast_dtype: torch.dtype | None  # arithmetic under autocast; None: in the weights' own dtype
    scales_loss: bool  # fp16 gradients underflow unless the loss is scaled

    def weights_dtype(self, *, frozen: bool) -> torch.dtype | None:
        """The base weights' dtype; None keeps the one that they are stored in.

        Under mixed precision, weights that train are fp32, so that small updates are not rounded away; frozen ones
        gain nothing from being larger than they are on disk.
        """
        if self.name == "fp32":
            return torch.float32
        if self.name == "bf16-true":
            return torch.bfloat16
        return None if frozen else torch.float32

    def autocast(self, device: torch.device, *, keeps_copies: bool = True) -> AbstractContextManager[object]:
        """The context in which a forward pass runs.

        keeps_copies: of each weight that trains, a copy in the lower precision stays until the context ends. Without
        gradients that is for nothing: a pass needs each weight once, and 7 billion of them are 13 GiB.
        """
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype, cache_enabled=keeps_copies)


def precision(name: PrecisionName) -> Precision:
    """The precision of this name; `auto` has been resolved before."""
    autocast = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(name)
    return Precision(name=name, autocast_dtype=autocast, scales_loss=name == "fp16-mixed")
