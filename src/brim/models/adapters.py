"""LoRA adapters on a base model, through PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from brim.config import LoraConfig
from brim.errors import ModelError, Problem

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MESSAGE_SHOWN = 300  # characters of PEFT's own message, which can list every tensor of a model


def add_adapter(model: PreTrainedModel, settings: LoraConfig, *, seed: int, trainable: bool) -> PeftModel:
    """The base model with an adapter, new or pretrained; adapter weights are fp32, the base keeps its dtype.

    A new adapter's weights are drawn from the seed. Raises ModelError when the target modules are unknown, or the
    pretrained adapter does not fit.
    """
    torch.manual_seed(seed)
    if settings.pretrained_adapter_weights is not None:
        return _pretrained(model, settings.pretrained_adapter_weights, trainable=trainable)
    return _new(model, settings)


def is_adapted(model: nn.Module) -> bool:
    """Whether the model is one with an adapter."""
    import peft

    return isinstance(model, peft.PeftModel)


def _new(model: PreTrainedModel, settings: LoraConfig) -> PeftModel:
    import peft

    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.alpha if settings.alpha is not None else 2 * settings.r,
        lora_dropout=settings.dropout,
        bias=settings.bias_type,
        target_modules=_as_peft(settings.target_modules),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights=True if settings.init_lora_weights in (True, "default") else settings.init_lora_weights,
    )
    try:
        with warnings.catch_warnings():
            # GPT-2's layers are transposed; PEFT notices that and does what is right.
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out", category=UserWarning)
            return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise ModelError(
            Problem(
                what=f"adapter.target_modules: {str(error).splitlines()[0]}",
                expected="names of linear layers of this model: " + ", ".join(_linear_layer_names(model)),
                fix="set adapter.target_modules to some of them, or to all-linear",
            )
        ) from error


def _pretrained(model: PreTrainedModel, weights: str, *, trainable: bool) -> PeftModel:
    import peft

    folder = Path(weights).expanduser()
    if folder.is_dir():
        weights = str(folder)
        lacking = [name for name in _ADAPTER_FILES if not (folder / name).is_file()]
        if lacking:
            raise ModelError(_unusable(weights, f"the folder holds no {' and no '.join(lacking)}"))
    try:
        with warnings.catch_warnings():
            # PEFT would leave the missing ones as they were drawn, and go on.
            warnings.filterwarnings("error", message=".*missing adapter keys", category=UserWarning)
            adapted = peft.PeftModel.from_pretrained(model, weights, is_trainable=trainable)
    except (ValueError, OSError, RuntimeError, KeyError, TypeError, SafetensorError, UserWarning) as error:
        raise ModelError(_unusable(weights, " ".join(str(error).split()))) from error
    unused = _unused_weights(adapted, folder / _ADAPTER_FILES[1])
    if unused:
        raise ModelError(_unusable(weights, f"no layer takes {', '.join(unused)}"))
    return adapted


def _unused_weights(adapted: PeftModel, file: Path) -> list[str]:
    """Weights in the file that PEFT passed over, without a word, since no layer of the model is called so."""
    import peft

    if not file.is_file():  # an adapter of the Hub
        return []
    taken = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with safe_open(file, framework="pt") as tensors:
        return sorted(name for name in tensors.keys() if "lora_" in name and name not in taken)  # noqa: SIM118


def _unusable(weights: str, why: str) -> Problem:
    return Problem(
        what=f"the adapter cannot be loaded: {why if len(why) <= _MESSAGE_SHOWN else why[:_MESSAGE_SHOWN] + ' …'}",
        where=weights,
        expected=f"a PEFT folder ({', '.join(_ADAPTER_FILES)}) made for this base model",
        fix="check adapter.pretrained_adapter_weights and base_model",
    )


def _as_peft(target_modules: object) -> object:
    return list(target_modules) if isinstance(target_modules, (list, tuple)) else target_modules


def _linear_layer_names(model: nn.Module) -> list[str]:
    """The distinct last names of linear layers, in the order of the model."""
    from transformers.pytorch_utils import Conv1D  # what GPT-2 is made of

    names = [name.rsplit(".", 1)[-1] for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)]
    return list(dict.fromkeys(names))
