"""Read a trained adapter's folder first, so that PEFT gets nothing to act on that brim does not know.

It needs neither torch nor PEFT, so that `brim check` reads it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from brim.config.prompts import pattern_fault
from brim.config.schema import LoraConfig
from brim.errors import ModelError, Problem
from brim.models.folders.model import local_folder
from brim.models.folders.untrusted import read_json, require_plain_files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


# Our keys, with the names that PEFT gives them, and its defaults.
_OF_PEFT: Mapping[str, tuple[str, Any]] = {
    "r": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "dropout": ("lora_dropout", 0.0),
    "bias_type": ("bias", "none"),
    "target_modules": ("target_modules", None),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
}


# Settings that can make PEFT import modules, read files or build layers that the weights do not have.
_REACH_OUT = ("auto_mapping", "megatron_core", "layer_replication", "trainable_token_indices")


_HARMLESS_DEFAULTS: Mapping[str, Any] = {"megatron_core": "megatron.core", "qalora_group_size": 16}


_MESSAGE_SHOWN = 300  # characters of another library's message, which can list every tensor of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """Describe a LoRA adapter that PEFT may open."""

    path: Path
    name: str  # as the configuration names it
    settings: LoraConfig  # its own


def open_adapter(weights: str) -> AdapterFolder:
    """Check a local folder or a Hub id; of the Hub, only the two files that are needed are fetched.

    Raises ModelError when a file is missing, it is not a LoRA adapter, or its settings are not known or not safe.
    """
    local = local_folder(weights)
    path = _from_hub(weights) if local is None else local
    require_plain_files(path)
    lacking = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if lacking:
        raise ModelError(unusable(weights, f"the folder holds no {' and no '.join(lacking)}"))
    return AdapterFolder(path=path, name=weights, settings=_own_settings(path, weights))


def continued(settings: LoraConfig) -> LoraConfig:
    """Complete settings that name a trained adapter with its own, where the user left them open.

    Raises ModelError as `open_adapter` does, and for each setting that was given and differs from the adapter's.
    """
    assert settings.pretrained_adapter_weights is not None, "there is an adapter to continue"
    adapter = open_adapter(settings.pretrained_adapter_weights)
    require_same(settings, adapter)
    update = {key: getattr(adapter.settings, key) for key in _OF_PEFT if key not in settings.model_fields_set}
    if local_folder(adapter.name) is not None:
        update["pretrained_adapter_weights"] = str(adapter.path)
    return settings.model_copy(update=update)


def require_same(settings: LoraConfig, adapter: AdapterFolder) -> None:
    """Raise ModelError for each setting that was given and differs from the adapter's, which would win silently.

    Target modules are not compared: what their names stand for is known with the model.
    """
    given, own = settings.model_fields_set, adapter.settings
    problems = []
    for key in _OF_PEFT:
        wanted, there = getattr(settings, key), getattr(own, key)
        if key == "alpha" and wanted is None:
            wanted = 2 * (settings.r if "r" in given else own.r)
        if key in given and key != "target_modules" and wanted != there:
            problems.append(differs(key, wanted, there, adapter.name))
    if problems:
        raise ModelError(*problems)


def differs(key: str, wanted: Any, there: Any, name: str) -> Problem:
    """Describe a setting of the configuration that contradicts the adapter's."""
    return Problem(
        what=f"adapter.{key} is {_yaml(wanted)}, and the adapter to go on from has {_yaml(there)}",
        where=name,
        fix=f"take adapter.{key} out of the configuration, or train a new adapter (pretrained_adapter_weights: null)",
    )


def unusable(weights: str, why: str) -> Problem:
    """Describe why an adapter cannot be used."""
    return Problem(
        what=f"the adapter cannot be loaded: {why if len(why) <= _MESSAGE_SHOWN else why[:_MESSAGE_SHOWN] + ' …'}",
        where=weights,
        expected=f"a PEFT folder ({CONFIG}, {WEIGHTS}) made for this base model",
        fix="check adapter.pretrained_adapter_weights and base_model",
    )


def _own_settings(path: Path, name: str) -> LoraConfig:
    try:
        values = read_json(path / CONFIG)
    except ModelError as error:
        raise ModelError(unusable(name, error.problems[0].what)) from None
    _require_known(values, name)
    own = {key: values.get(theirs, default) for key, (theirs, default) in _OF_PEFT.items()}
    if isinstance(own["alpha"], float) and own["alpha"].is_integer():
        own["alpha"] = int(own["alpha"])
    try:
        settings = LoraConfig.model_validate({"type": "lora", **own})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise ModelError(unusable(name, f"{_OF_PEFT[key][0]} in {CONFIG} is {_short(own[key])}")) from None
    _require_ranks(path / WEIGHTS, values, settings.r, name)
    return settings


def _require_known(values: dict[str, Any], name: str) -> None:
    """Raise ModelError unless it is a plain LoRA adapter. A setting that is off does not count, whatever its name."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ModelError(unusable(name, f"peft_type in {CONFIG} is {_short(kind)}, not LORA"))
    given = {key: value for key, value in sorted(values.items()) if value not in (None, False, "", [], {})}
    strange = [key for key in given if key not in _ALLOWED and given[key] != _HARMLESS_DEFAULTS.get(key)]
    reaching, unknown = ([key for key in strange if _reaches_out(key) is reaches] for reaches in (True, False))
    misfits = [key for key in given if key in _ALLOWED and not _ALLOWED[key](given[key])]
    problems = [
        Problem(
            what=f"the adapter has settings that {what}: {_some(keys)}",
            where=name,
            expected="a plain LoRA adapter",
            fix=f"take them out of {CONFIG} if you know that {unneeded}",
        )
        for keys, what, unneeded in (
            (unknown, "brim does not know", "they change nothing"),
            (reaching, "make PEFT load other code or files", "the trained weights do not need them"),
        )
        if keys
    ]
    problems += [unusable(name, f"{key} in {CONFIG} is {_short(given[key])}") for key in misfits]
    if problems:
        raise ModelError(*problems)


def _reaches_out(key: str) -> bool:
    """Return whether a setting can name modules to import, files to read, or other adapters."""
    return key in _REACH_OUT or key.endswith("_config")


def _require_ranks(weights: Path, values: Mapping[str, Any], r: int, name: str) -> None:
    """Refuse ranks that the weights do not have: PEFT would allocate memory for them first."""
    ranks = {r, *(values.get("rank_pattern") or {}).values()}
    try:
        with safe_open(weights, framework="numpy") as tensors:
            names = [key for key in tensors.keys() if _is_first_factor(key)]  # noqa: SIM118 (it is not a mapping)
            shapes = {key: tensors.get_slice(key).get_shape() for key in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(unusable(name, f"{WEIGHTS} is damaged: {error}")) from None
    if not shapes:
        raise ModelError(unusable(name, f"{WEIGHTS} holds no LoRA weights"))
    if values.get("target_parameters"):
        return  # the factors of several experts stand in one tensor
    for key, shape in shapes.items():
        if not shape or shape[0] not in ranks:
            has = f"has {shape[0] if shape else 'no'} rows"
            raise ModelError(unusable(name, f"{key} in {WEIGHTS} {has}, and r in {CONFIG} is {_short(r)}"))


def _is_first_factor(key: str) -> bool:
    return ".lora_A" in key or ".lora_embedding_A" in key


_PLAIN_NAME = re.compile(r"[\w.]+")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_names(value: Any) -> bool:
    """Return whether it is a plain name, or several: PEFT puts them into regular expressions."""
    names = value if isinstance(value, list) else [value]
    return all(isinstance(each, str) and _PLAIN_NAME.fullmatch(each) for each in names)


def _is_choice_of_layers(value: Any) -> bool:
    if isinstance(value, str):
        return pattern_fault(value) is None
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_layer_numbers(value: Any) -> bool:
    return all(isinstance(each, int) for each in (value if isinstance(value, list) else [value]))


def _is_pattern_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a test for mappings from names, or regular expressions for them, to values of a kind."""
    return lambda value: (
        isinstance(value, dict)
        and all(pattern_fault(rf"(.*\.)?({key})$") is None and kind(each) for key, each in value.items())
    )


_ALLOWED: Mapping[str, Callable[[Any], bool]] = {
    "peft_type": _is_text,
    "task_type": _is_text,
    "peft_version": _is_text,
    "base_model_name_or_path": _is_text,  # for people: it is never opened
    "revision": _is_text,
    "inference_mode": _is_flag,
    "r": _is_rank,
    "lora_alpha": _is_number,
    "lora_dropout": _is_number,
    "bias": _is_text,
    "lora_bias": _is_flag,
    "fan_in_fan_out": _is_flag,
    "use_rslora": _is_flag,
    "use_dora": _is_flag,
    "init_lora_weights": lambda value: isinstance(value, bool | str),
    "ensure_weight_tying": _is_flag,
    "target_modules": _is_choice_of_layers,
    "exclude_modules": _is_choice_of_layers,
    "target_parameters": _are_names,
    "modules_to_save": _are_names,
    "layers_pattern": _are_names,
    "layers_to_transform": _are_layer_numbers,
    "rank_pattern": _is_pattern_of(_is_rank),
    "alpha_pattern": _is_pattern_of(_is_number),
}


def _from_hub(weights: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(weights, allow_patterns=[CONFIG, WEIGHTS]))
    except HFValidationError:
        why = "it is neither a local folder nor a valid Hub id"
    except (HfHubHTTPError, OSError) as error:
        why = f"it is not a local folder, and the Hub does not give it ({type(error).__name__})"
    raise ModelError(unusable(weights, why))


def _some(names: list[str]) -> str:
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in names[:10]]
    return ", ".join(shown) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")


def _short(value: Any) -> str:
    text = _yaml(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of too many digits"
    return text if len(text) <= 60 else text[:59] + "…"


def _yaml(value: Any) -> str:
    """Write a setting as it reads in YAML."""
    return json.dumps(value, ensure_ascii=False, default=str)
