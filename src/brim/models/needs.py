"""Say what a configuration needs of the machine that it runs on, as far as that is known without torch."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.config.schema import Config, FinetuneTrainer
from brim.errors import ConfigError, Problem
from brim.models.folders import ModelFolder
from brim.models.quantization import with_stored_quantization
from brim.notes import warning

# Of NVIDIA's driver, of Windows' for Linux beside it, and of AMD's, whose GPUs torch calls CUDA devices, too.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia"), Path("/dev/dxg"), Path("/dev/kfd"))


_NOTHING_TO_TRAIN = Problem(
    what="a quantised base model is frozen, and without an adapter there is nothing to train",
    where="quantization",
    fix="set adapter: lora; to train all weights, start from weights that are not quantised, without quantization",
)


_VERBS = {True: "`brim train`", False: "`brim predict`"}


# What pip calls the packages.
_TO_INSTALL = {
    "flash_attn": "flash-attn",
    "bitsandbytes": "'brim[quantization]'",
    "liger_kernel": "'brim[liger]'",
    "vllm": "vllm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    setting: str  # "trainer.optimizer.type: paged_adamw"
    package: str  # to import
    cuda: bool = False
    instead: str
    trains: bool = True  # else it is for predictions


def require_trainable(config: Config, folder: ModelFolder) -> None:
    """Raise ConfigError where the configuration trains, and this base model cannot be trained so.

    Not a rule of the configuration, since one may still predict. Raises ModelError as `with_stored_quantization` does.
    """
    adapter, quantization = config.adapter, with_stored_quantization(config, folder).quantization
    if not isinstance(config.trainer, FinetuneTrainer):
        return
    if adapter is None and quantization is not None:
        raise ConfigError(_NOTHING_TO_TRAIN)
    # Of an adapter that is trained further its own settings count.
    if adapter is None or not adapter.dropout or adapter.pretrained_adapter_weights is not None:
        return
    targets, experts = adapter.target_modules, _targets_that_are_experts(folder.config.get("model_type"))
    named = [targets] if isinstance(targets, str) else targets or ()
    if experts and any(name == "all-linear" or name.rpartition(".")[2] in experts for name in named):
        raise ConfigError(experts_with_dropout(adapter.dropout))


def experts_with_dropout(dropout: float) -> Problem:
    """Say why such an adapter is impossible; PEFT's own message speaks of its classes."""
    return Problem(
        what=f"adapter.dropout is {dropout}, and experts are among the target modules, which PEFT adapts without "
        "dropout only",
        fix="set adapter.dropout: 0, or name layers outside the experts in adapter.target_modules",
    )


def _targets_that_are_experts(kind: object) -> Collection[str]:
    """Return the names of layers that PEFT takes for parameters of experts, or of their router, in an architecture.

    They stand in the files of the installed PEFT and transformers: importing those takes seconds. Where another version
    has no such tables, nothing is known before the model is built.
    """
    like = {
        **_table("transformers", "conversion_mapping.py", "_MODEL_TO_CONVERSION_PATTERN"),
        "mixtral": "mixtral",  # which PEFT adds
    }
    names = _table("peft", "utils/transformers_weight_conversion.py", "_MOE_TARGET_MODULE_MAPPING")
    return tuple(names.get(like.get(kind, ""), ()))


def _table(package: str, file: str, name: str) -> Mapping[Any, Any]:
    """Return a mapping of literals that a module of an installed package defines; empty where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not (path := Path(spec.origin).parent / file).is_file():
        return {}
    found = re.search(rf"^{name}\b[^=\n]*= (\{{.*?^\}})", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    try:
        table = {} if found is None else ast.literal_eval(found[1])
    except (ValueError, SyntaxError):  # no longer literals
        return {}
    return table if isinstance(table, dict) else {}


def notes_on_this_machine(config: Config) -> list[str]:
    """Return a note for each setting that would stop a run here, or might; another machine may have what is lacking.

    Those that would are warnings.
    """
    notes: list[str] = []
    for need in _needs(config):
        if importlib.util.find_spec(need.package) is None:
            install = f"pip install {_TO_INSTALL[need.package]}"
            why = f"needs the package {need.package}, which is not installed here ({install})"
        elif not need.cuda:
            continue
        elif reason := why_no_cuda():
            why = f"needs a CUDA device, and there is none here: {reason}"
        else:
            unknown = "needs a CUDA device; a check loads no torch and cannot tell whether one is here"
            notes.append(f"{need.setting} {unknown}")
            continue
        stops = f"{need.setting} {why}; {_VERBS[need.trains]} stops at it on this machine: {need.instead}"
        notes.append(warning(stops, topic="machine"))
    return notes


def why_no_cuda() -> str:
    """Say why there cannot be a CUDA device here; empty where that cannot be known without torch."""
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
            cuda=True,
            instead="set model_parameters.attn_implementation: auto",
            trains=isinstance(trainer, FinetuneTrainer),
        )
    if config.model_parameters.kernels == "liger" and isinstance(trainer, FinetuneTrainer):
        yield _Need(
            setting="model_parameters.kernels: liger",
            package="liger_kernel",
            cuda=True,
            instead="set model_parameters.kernels: auto",
        )
    if config.quantization is not None:
        yield _Need(
            setting="quantization",
            package="bitsandbytes",
            instead="install it, or leave quantization out",
            trains=isinstance(trainer, FinetuneTrainer),
        )
    if isinstance(trainer, FinetuneTrainer):
        name = trainer.optimizer.type
        if name not in ("adam", "adamw", "sgd", "adafactor"):
            yield _Need(
                setting=f"trainer.optimizer.type: {name}",
                package="bitsandbytes",
                cuda=name.startswith("paged_"),
                instead=f"set trainer.optimizer.type: {name.removeprefix('paged_')}"
                if name.startswith("paged_")
                else "install it, or set trainer.optimizer.type: adamw",
            )
    if config.generation.engine == "vllm":
        yield _Need(
            setting="generation.engine: vllm",
            package="vllm",
            cuda=True,
            instead="set generation.engine: auto",
            trains=False,
        )
