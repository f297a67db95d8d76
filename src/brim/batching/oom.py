"""Whether an exception says that memory ran out."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_MESSAGES = re.compile(
    r"""
      DefaultCPUAllocator:\ (can't\ allocate|not\ enough)\ memory
    | ^std::bad_alloc
    | (CUDA|HIP|XPU|MPS\ backend)\ out\ of\ memory
    | (CUDA|HIP)(\ driver)?\ error:\ out\ of\ memory
    | CUDA_ERROR_OUT_OF_MEMORY | hipErrorOutOfMemory
    | (CUBLAS|CUBLASLT|CUSPARSE|CUSOLVER|CUFFT|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED
    """,
    re.VERBOSE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is of an allocation that failed, on a device or in the host.

    True promises that fewer rows can help. Everything else is to be raised again.
    """
    return any(_is_one(link) for link in _chain(error))


def _is_one(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from. What it was raised beside (`__context__`) is another matter."""
    seen = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
