"""The resident set of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from pathlib import Path

from brim.errors import BrimError, Problem

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5): VmHWM is set to what is resident now
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def require_resident() -> None:
    """Raise BrimError where the system does not tell."""
    if not (_STATUS.exists() and _CLEAR_REFS.exists()):
        raise BrimError(
            Problem(
                what="memory cannot be measured on this machine's CPU",
                expected="Linux, with /proc/self/status and /proc/self/clear_refs",
                fix="leave out --measure: a prediction needs no device; or measure on a CUDA device",
            )
        )


def resident_bytes() -> int:
    """What is resident now."""
    return int(_STATM.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most that was resident since the last reset."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, "every Linux has it"
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Forget the peak, once what is free has gone back to the system."""
    give_back()
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def give_back() -> None:
    """Drop cycles of garbage, and return free memory to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
