"""The states of the random generators that a forward pass draws from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """The states of torch's generators: the CPU's, each CUDA device's, and that of Apple's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Rewind torch's generators; those of devices that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    if torch.backends.mps.is_available() and "mps" in states:
        torch.mps.set_rng_state(states["mps"])
