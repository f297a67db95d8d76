"""Let the C library give large blocks back to the system as soon as they are freed."""

from __future__ import annotations

import ctypes

# From mallopt(3): M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
_TRIM_THRESHOLD, _TOP_PAD, _MAP_THRESHOLD = -1, -2, -3
# Steps of 18 shapes of a Llama of 7 million weights, 311 MiB of them alive at most, took 488 MiB resident and 9.4 s of
# a core by glibc's own rule; 365 MiB and 11.0 s with this, 315 MiB and 13.4 s from 64 KiB on.
_MAPPED_FROM_BYTES = 1 << 20


def map_large_blocks() -> bool:
    """Have blocks of 1 MiB and more mapped by themselves. False where the C library has no such setting.

    By its own rule glibc takes blocks of up to 32 MiB from a heap, which keeps what is freed, and splits it: a run of
    many shapes comes to hold half as much again. For this process, until it ends; costs some time.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such symbol; no handle of the process itself, as on Windows
        return False
    options = ((_MAP_THRESHOLD, _MAPPED_FROM_BYTES), (_TRIM_THRESHOLD, _MAPPED_FROM_BYTES), (_TOP_PAD, 0))
    return all(set_option(ctypes.c_int(option), ctypes.c_int(value)) == 1 for option, value in options)
