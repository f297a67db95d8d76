"""A trained adapter's folder, which we read first, so that PEFT gets nothing to act on that we do not know."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from brim.config import LoraConfig
from brim.errors import ModelError, Problem

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Our keys, with the names that PEFT gives them.
_NAMES = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "bias_type": "bias",
    "target_modules": "target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
_MESSAGE_SHOWN = 300  # characters of another library's message, which can list every tensor of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """A LoRA adapter that PEFT may open."""

    path: Path
    name: str  # as the configuration names it
    settings: LoraConfig  # its own


def open_adapter(weights: str) -> AdapterFolder:
    """Check a local folder or a Hub id; of the Hub, only the two files that are needed are fetched.

    Raises ModelError when a file is missing, it is no LoRA adapter, or its settings are not known or not safe.
    """
    local = Path(weights).expanduser()
    path = local.resolve() if local.is_dir() else _from_hub(weights)
    lacking = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if lacking:
        raise ModelError(unusable(weights, f"the folder holds no {' and no '.join(lacking)}"))
    return AdapterFolder(path=path, name=weights, settings=_own_settings(path, weights))


def continued(settings: LoraConfig) -> LoraConfig:
    """Settings that name a trained adapter, with its own in place of those that the user left open.

    Raises ModelError as `open_adapter`, and for each setting that the user gave and that differs from the adapter's.
    """
    assert settings.pretrained_adapter_weights is not None, "there is an adapter to continue"
    adapter = open_adapter(settings.pretrained_adapter_weights)
    require_same(settings, adapter)
    update = {key: getattr(adapter.settings, key) for key in _NAMES if key not in settings.model_fields_set}
    if Path(adapter.name).expanduser().is_dir():
        update["pretrained_adapter_weights"] = str(adapter.path)
    return settings.model_copy(update=update)


def require_same(settings: LoraConfig, adapter: AdapterFolder) -> None:
    """Raise ModelError for each setting that was given and differs from the adapter's, which would win silently.

    Target modules are not compared: what their names stand for is known with the model.
    """
    given, own = settings.model_fields_set, adapter.settings
    problems = []
    for key in _NAMES:
        wanted, there = getattr(settings, key), getattr(own, key)
        if key == "alpha" and wanted is None:
            wanted = 2 * (settings.r if "r" in given else own.r)
        if key in given and key != "target_modules" and wanted != there:
            problems.append(differs(key, wanted, there, adapter.name))
    if problems:
        raise ModelError(*problems)


def differs(key: str, wanted: Any, there: Any, name: str) -> Problem:
    """A setting of the configuration that contradicts the adapter's."""
    return Problem(
        what=f"adapter.{key} is {_yaml(wanted)}, and the adapter to go on from has {_yaml(there)}",
        where=name,
        fix=f"take adapter.{key} out of the configuration, or train a new adapter (pretrained_adapter_weights: null)",
    )


def unusable(weights: str, why: str) -> Problem:
    """What is said of an adapter that cannot be used."""
    return Problem(
        what=f"the adapter cannot be loaded: {why if len(why) <= _MESSAGE_SHOWN else why[:_MESSAGE_SHOWN] + ' …'}",
        where=weights,
        expected=f"a PEFT folder ({CONFIG}, {WEIGHTS}) made for this base model",
        fix="check adapter.pretrained_adapter_weights and base_model",
    )


def _own_settings(path: Path, name: str) -> LoraConfig:
    try:
        values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(unusable(name, f"{CONFIG} cannot be read: {error}")) from None
    if not isinstance(values, dict):
        raise ModelError(unusable(name, f"{CONFIG} holds no mapping"))
    known = _require_known(values, name)
    own = {key: values.get(theirs, known[theirs]) for key, theirs in _NAMES.items()}
    if isinstance(own["alpha"], float) and own["alpha"].is_integer():
        own["alpha"] = int(own["alpha"])
    try:
        return LoraConfig.model_validate({"type": "lora", **own})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        why = f"{_NAMES.get(key, key)} in {CONFIG} is {_yaml(own.get(key))}"
        raise ModelError(unusable(name, why)) from None


def _require_known(values: dict[str, Any], name: str) -> dict[str, Any]:
    """PEFT's settings with their defaults. Raises ModelError for what is no plain LoRA adapter."""
    import peft

    kind = values.get("peft_type")
    if kind != "LORA":
        raise ModelError(unusable(name, f"peft_type in {CONFIG} is {_yaml(kind)}, not LORA"))
    plain = peft.LoraConfig()
    known = {field.name: getattr(plain, field.name) for field in dataclasses.fields(peft.LoraConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ModelError(
            Problem(
                what=f"the adapter has settings that PEFT {peft.__version__} does not know: {', '.join(unknown)}",
                where=name,
                fix=f"upgrade peft, or take them out of {CONFIG} if you know that they change nothing",
            )
        )
    refused = sorted(key for key, value in values.items() if _reaches_out(key) and value and value != known[key])
    if refused:
        raise ModelError(
            Problem(
                what=f"the adapter has settings that make PEFT load other code or files: {', '.join(refused)}",
                where=name,
                expected="a plain LoRA adapter",
                fix=f"take them out of {CONFIG} if you know that the trained weights do not need them",
            )
        )
    return known


def _reaches_out(key: str) -> bool:
    """Whether a setting can name modules to import, files to read, or other adapters."""
    return key in ("auto_mapping", "megatron_core") or key.endswith("_config")


def _from_hub(weights: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(weights, allow_patterns=[CONFIG, WEIGHTS]))
    except HFValidationError:
        why = "it is neither a local folder nor a valid Hub id"
    except (HfHubHTTPError, OSError) as error:
        why = f"it is no local folder, and the Hub does not give it ({type(error).__name__})"
    raise ModelError(unusable(weights, why))


def _yaml(value: Any) -> str:
    """A setting as it reads in YAML."""
    return json.dumps(value, ensure_ascii=False, default=str)
