"""Memory that stands for what a steady step has at hand and the first one does not: gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def standing_for(num_bytes: int, device: torch.device | str) -> Iterator[None]:
    """Hold so many bytes of the device while the block runs, written to, so that they are resident on a CPU."""
    ballast = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    try:
        yield
    finally:
        del ballast


@contextmanager
def gradients_at_hand(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients of zeros where there are none, as in every micro-batch of a step but the first; dropped afterwards."""
    without = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    try:
        for parameter in without:
            # Not zeros_like: what calloc gives is not resident before it is written to.
            parameter.grad = torch.empty_like(parameter, memory_format=torch.preserve_format).fill_(0)
        yield
    finally:
        for parameter in without:
            parameter.grad = None
