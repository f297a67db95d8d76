"""The operators that CUDA runs by other kernels, put in while a step is traced on fake CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from brim.memory.cuda.grouped_mm import grouped_mm
from brim.memory.cuda.rms_norm import rms_norm
from brim.memory.cuda.sdpa import sdpa
from brim.memory.cuda.target import CudaTarget

_dropout = functional.dropout
_softmax = functional.softmax


@contextmanager
def cuda_kernels(target: CudaTarget) -> Iterator[None]:
    """Trace forward and backward within this: activation checkpointing runs the forward pass in the backward pass.

    The functions are replaced in PyTorch's modules, for all threads. A TorchFunctionMode would be off while
    Tensor.backward runs, and so in what checkpointing computes anew.
    """
    attention: Any = partial(sdpa, target)
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (functional, "scaled_dot_product_attention", attention),
            (functional, "dropout", dropout),
            (functional, "softmax", softmax),
            (functional, "rms_norm", rms_norm),
            (functional, "grouped_mm", grouped_mm),
            (torch, "dropout", lambda input, p, train: dropout(input, p, train)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """native_dropout, whose mask is boolean: what CUDA takes where something, but not all, is dropped.

    After is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp.
    """
    if training and 0 < p < 1 and not inplace and input.numel() > 0:
        return torch.native_dropout(input, p, True)[0]
    return _dropout(input, p, training, inplace)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """On CUDA fp16 scores become an fp32 softmax in one kernel, without an fp32 copy; bf16 ones are copied.

    After softmax in aten/src/ATen/native/SoftMax.cpp.
    """
    if dim is not None and dtype == torch.float32 and input.dtype == torch.float16:
        return torch._softmax(input, dim, True)
    return _softmax(input, dim, _stacklevel, dtype)
