"""A configuration brought together with this machine: device, base model's folder, tokenizer, every `auto` resolved."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from brim.config import Choice, Config, resolve
from brim.data import TextEncoder, load_encoder
from brim.errors import InputError, Problem
from brim.models.device import device_facts, pick_device
from brim.models.folder import ModelFolder, locate

Say: TypeAlias = Callable[[str], None]  # takes a line that the user should see


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """All but the weights."""

    config: Config  # resolved: no `auto`, paths absolute
    choices: tuple[Choice, ...]
    folder: ModelFolder
    encoder: TextEncoder
    device: torch.device


def open_session(config: Config) -> Session:
    """Resolve a configuration. Raises ConfigError, ModelError, or InputError where several processes were started."""
    _require_one_process()
    device = pick_device()
    folder = locate(config.base_model, initialize=config.initialize)
    resolution = resolve(
        config.model_copy(update=_absolute_paths(config, folder)),
        device_facts(device),
        context_length=folder.context_length,
    )
    return Session(
        config=resolution.config,
        choices=resolution.choices,
        folder=folder,
        encoder=load_encoder(folder, trust_remote_code=config.trust_remote_code),
        device=device,
    )


def say_nothing(line: str) -> None:
    """For callers who do not listen."""


def _require_one_process() -> None:
    """Refuse what torchrun and its like start: each process would train a model of its own into the same folder."""
    num_processes = os.environ.get("WORLD_SIZE", "")
    if num_processes.isdecimal() and int(num_processes) > 1:
        raise InputError(
            Problem(
                what=f"several processes are not supported yet, and the environment names {num_processes}",
                where="WORLD_SIZE",
                fix="start one process, without torchrun or accelerate launch",
            )
        )


def _absolute_paths(config: Config, folder: ModelFolder) -> dict[str, object]:
    """What makes a saved configuration work from any folder."""
    update: dict[str, object] = {"base_model": folder.name}
    if config.dataset is not None:
        update["dataset"] = str(Path(config.dataset).expanduser().resolve())
    adapter = config.adapter
    if adapter is not None and adapter.pretrained_adapter_weights is not None:
        weights = Path(adapter.pretrained_adapter_weights).expanduser()
        if weights.is_dir():
            update["adapter"] = adapter.model_copy(update={"pretrained_adapter_weights": str(weights.resolve())})
    return update
