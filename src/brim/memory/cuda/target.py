"""The GPU and the PyTorch that a step is traced for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

FlashAttnVersion: TypeAlias = Literal["2.5", "2.6", "2.7", "2.8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTarget:
    """What decides which kernel CUDA runs."""

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int] = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))  # type: ignore[assignment]
    multiprocessors: int | None = None  # None: attention is not split over the keys (decoding, very short batches)
    deterministic: bool = False  # torch.use_deterministic_algorithms

    @property
    def sm(self) -> int:
        """Such as 80 for compute capability 8.0."""
        return 10 * self.compute_capability[0] + self.compute_capability[1]
