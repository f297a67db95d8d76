"""Tiny models as a planner sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.memory.tiny_architectures import write_folder

import brim.memory.predict as memory
from brim.memory import ConfigWorkload, cpu_device, find_device
from brim.memory.cuda import CudaTarget
from brim.planning.costs import TracedShapes


def shapes_of(
    folder: Path, *, device: str = "cpu", cache_folder: Path | None = None, settings: Any = None, **given: Any
) -> TracedShapes:
    """A Llama with a vocabulary large enough that the loss has several chunks; given: keys of `trainer` or above it."""
    model = write_folder(folder / "llama", "llama", vocab_size=2000, num_hidden_layers=2, max_position_embeddings=4096)
    above = {key: given.pop(key) for key in tuple(given) if key in ("adapter", "precision", "model_parameters")}
    trainer = {"type": "finetune", "batch_size": 1, "effective_batch_size": 32, **given}
    asked = memory.ask(
        {"base_model": str(model), "trainer": trainer, **above}, phase="train", device=device, memory_bytes=None
    )
    found = cpu_device() if device == "cpu" else find_device(device)
    target = None if found.is_cpu else CudaTarget(compute_capability=found.capability or (8, 0))
    workload = ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target)
    return TracedShapes(workload, found, cache_folder=cache_folder, settings=settings)
