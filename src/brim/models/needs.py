"""What a configuration needs of the machine that it runs on, as far as that can be told without torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brim.config import Config, FinetuneTrainer

# Of NVIDIA's driver, of Windows' for Linux beside it, and of AMD's, whose GPUs torch calls CUDA devices, too.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia"), Path("/dev/dxg"), Path("/dev/kfd"))
_VERBS = {True: "`brim train`", False: "`brim predict`"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    setting: str  # "trainer.optimizer.type: paged_adamw"
    package: str = ""  # to import
    install: str = ""
    cuda: bool = False
    instead: str
    trains: bool = True  # else it is for predictions


def notes_on_this_machine(config: Config) -> list[str]:
    """A note for each setting with which a run would stop here, or might: another machine may have what is lacking."""
    notes = []
    for need in _needs(config):
        if need.package and importlib.util.find_spec(need.package) is None:
            why = f"needs the package {need.package}, which is not installed here ({need.install})"
        elif need.cuda and (reason := why_no_cuda()):
            why = f"needs a CUDA device, and there is none here: {reason}"
        elif need.cuda:
            notes.append(
                f"{need.setting} needs a CUDA device; a check loads no torch and cannot tell whether one is here"
            )
            continue
        else:
            continue
        notes.append(f"{need.setting} {why}; {_VERBS[need.trains]} stops at it on this machine: {need.instead}")
    return notes


def why_no_cuda() -> str:
    """Why no CUDA device can be here; empty where that cannot be told without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all"
    if importlib.metadata.version("torch").endswith("+cpu"):
        return "the installed torch is built for CPUs alone"
    if sys.platform == "darwin":
        return "Macs have none"
    if sys.platform == "linux" and not any(path.exists() for path in _DRIVERS):
        return "no driver is loaded"
    return ""


def _needs(config: Config) -> Iterator[_Need]:
    trainer = config.trainer
    if config.model_parameters.attn_implementation == "flash_attention_2":
        yield _Need(
            setting="model_parameters.attn_implementation: flash_attention_2",
            package="flash_attn",
            install="pip install flash-attn",
            cuda=True,
            instead="set model_parameters.attn_implementation: auto",
            trains=isinstance(trainer, FinetuneTrainer),
        )
    if config.quantization is not None:
        yield _Need(
            setting="quantization",
            package="bitsandbytes",
            install="pip install 'bitsandbytes>=0.49'",
            instead="install it, or leave quantization out",
            trains=isinstance(trainer, FinetuneTrainer),
        )
    if isinstance(trainer, FinetuneTrainer):
        name = trainer.optimizer.type
        if name not in ("adam", "adamw", "sgd", "adafactor"):
            yield _Need(
                setting=f"trainer.optimizer.type: {name}",
                package="bitsandbytes",
                install="pip install 'bitsandbytes>=0.49'",
                cuda=name.startswith("paged_"),
                instead=f"set trainer.optimizer.type: {name.removeprefix('paged_')}"
                if name.startswith("paged_")
                else "install it, or set trainer.optimizer.type: adamw",
            )
    if config.generation.engine == "vllm":
        yield _Need(
            setting="generation.engine: vllm",
            package="vllm",
            install="pip install vllm",
            cuda=True,
            instead="set generation.engine: auto",
            trains=False,
        )
