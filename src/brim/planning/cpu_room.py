"""How much memory this process may still take on a CPU, by all that bounds it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from brim.planning.budget import Limit

_MIB = 2**20
_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 where there is none
# A thread of the C library takes a stack of 8 MiB and an arena of 64 MiB from the address space, whatever it uses of
# them; the backward pass runs in one of its own, and PyTorch starts another for the gradients of the first step.
_ADDRESSES_OF_THREADS_BYTES = 2 * (8 + 64) * _MIB
# Above this size glibc maps a tensor by itself, once the variable pins the threshold.
_MAPPED_FROM_BYTES = 128 * 1024


def cpu_limits(root: Path = Path("/"), *, trains: bool = True) -> list[Limit]:
    """What the process may have resident in all, once for each bound. Empty where the system does not tell.

    root: where /proc and /sys are. trains: without a backward pass no threads come.
    """
    resident_bytes = _kib(root / "proc/self/status", "VmRSS")
    if resident_bytes is None:
        return []
    found = [*_machine(root), *_containers(root), *_process_limits(root, _ADDRESSES_OF_THREADS_BYTES if trains else 0)]
    return [Limit(num_bytes=resident_bytes + max(left, 0), reason=reason) for left, reason in found]


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Of this process, now."""
    return _kib(root / "proc/self/status", "VmRSS")


def returns_at_once(environment: Mapping[str, str]) -> bool:
    """Whether glibc is told to map tensors by themselves, so that nothing that is freed is kept."""
    value = environment.get("MALLOC_MMAP_THRESHOLD_", "")
    return sys.platform == "linux" and value.isdigit() and 0 < int(value) <= _MAPPED_FROM_BYTES


def _machine(root: Path) -> Iterator[tuple[int, str]]:
    available = _kib(root / "proc/meminfo", "MemAvailable")
    if available is not None:
        yield available, "what is available on this machine"


def _containers(root: Path) -> Iterator[tuple[int, str]]:
    """Of the control groups that the process is in, those above them included."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            left = _left_in(folder, *files)
            if left is not None:
                yield left, f"the container's limit ({files[0]})"
            if folder == base:
                break


def _left_in(folder: Path, limit_file: str, usage_file: str, cached: str) -> int | None:
    """Files that were read and can be forgotten do not count."""
    limit, usage = (next(iter(_lines(folder / file)), "") for file in (limit_file, usage_file))
    if not limit.isdigit() or int(limit) >= _NO_LIMIT or not usage.isdigit():
        return None
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return int(limit) - int(usage) + int(statistics.get(cached, "0"))


def _process_limits(root: Path, addresses_bytes: int) -> Iterator[tuple[int, str]]:
    if sys.platform == "win32":
        return
    import resource

    status = root / "proc/self/status"
    for name, number, used, unused_bytes in (
        ("RLIMIT_AS", resource.RLIMIT_AS, _kib(status, "VmSize"), addresses_bytes),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, _kib(status, "VmData"), 0),
    ):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY and used is not None:
            yield soft - used - unused_bytes, name


def _kib(path: Path, key: str) -> int | None:
    """A line such as `VmRSS:  1234 kB`, in bytes."""
    found = re.search(rf"^{key}:\s*(\d+) kB", "\n".join(_lines(path)), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
