"""Give back memory that nobody uses, so that the next try finds as much as there can be."""

from __future__ import annotations

import ctypes
import gc

import torch


def free_caches() -> None:
    """Collect cycles that hold tensors, then hand unused blocks back: the device's allocator's and the C library's."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where no CUDA device is in use
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    _trim_heap()


def _trim_heap() -> None:
    """glibc keeps freed blocks of its heap; other C libraries have no such call, and need none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no such symbol; no handle of the process itself, as on Windows
        return
    trim(ctypes.c_size_t(0))
