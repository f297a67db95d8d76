"""Trace a model on fake CPU tensors as if it ran on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from brim.memory.cuda.accumulation import AccumulationInPlace
from brim.memory.cuda.autocast import autocast_as_on_cuda
from brim.memory.cuda.flash_attn_package import FlashAttnPackage
from brim.memory.cuda.target import CudaTarget
from brim.memory.cuda.transformers_view import transformers_on_cuda
from brim.memory.cuda.view import cuda_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def as_on_cuda(
    model: PreTrainedModel,
    target: CudaTarget,
    *,
    flash_attention: FlashAttnPackage | None = None,
    packed: bool = False,
) -> Iterator[None]:
    """Run the model's forward and backward pass within this; the optimizer within `foreach_as_on_cuda`.

    Enter it after the mode that records (see AccumulationInPlace).

    flash_attention: run attention with the flash-attn package, as `attn_implementation: flash_attention_2` does; build
    the model with another implementation. packed: see `transformers_on_cuda`.
    """
    with (
        cuda_kernels(target),
        autocast_as_on_cuda(),
        transformers_on_cuda(model, target, flash_attention=flash_attention, packed=packed),
        AccumulationInPlace(),
    ):
        yield
