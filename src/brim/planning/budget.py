"""How many bytes a run may take on a device, and how many of them it leaves free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of one device. A cap on allocated bytes comes of it once the allocator's own overhead is known."""

    device: str  # as the catalogue or the driver names it; "cpu"
    limit_bytes: int  # that the run may take in all, what lies outside PyTorch included
    outside_bytes: int  # of them outside PyTorch's allocator: CUDA context, libraries; on a CPU the process as it is
    margin_bytes: int  # left free, since a prediction can be off
    limit_reason: str  # "of 16.0 GiB that the device has", "memory.budget", "RLIMIT_AS", …
    margin_reason: str

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's allocator may reserve."""
        return self.limit_bytes - self.outside_bytes - self.margin_bytes
