"""Locate a base model and read what its folder says, without torch and without the weights.

It also checks the oldest versions of libraries that brim trusts with foreign folders.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import InputError, ModelError, Problem
from brim.models.folders.untrusted import TOKENIZER_BYTES, read_json, refusals, require_plain_files

if TYPE_CHECKING:
    import torch

FLOORS = {
    "transformers": ((5, 3), "earlier ones could be made to run a model's code unasked"),
    "accelerate": ((1, 15), "earlier ones could lose parts of an adapter"),
}


def require_floors() -> None:
    """Raise InputError where an older version is installed: pip only warns when another package asks for one."""
    problems = []
    for name, (floor, why) in FLOORS.items():
        version = importlib.metadata.version(name)
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < floor:
            oldest = ".".join(map(str, floor))
            problems.append(
                Problem(
                    what=f"{name} {version} is too old",
                    where="this Python environment",
                    expected=f"{oldest} or later: {why}",
                    fix=f"pip install '{name}>={oldest}'",
                )
            )
    if problems:
        raise InputError(*problems)


QUANTIZATION = "quantization_config"  # in config.json


Initialize = Literal["pretrained", "random"]


_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")


_KIND = re.compile(r"[\w.-]+")


_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


_PICKLED_WEIGHT_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json")


_HUB_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "*.model", "vocab*", "merges*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Describe a base model's folder: its configuration and tokenizer, and whether it has weights."""

    path: Path  # the folder that holds config.json and the tokenizer, in the Hub's cache for a Hub id
    name: str  # what from_pretrained takes: the folder, absolute, or the Hub id
    config: dict[str, Any]  # config.json
    context_length: int | None  # tokens; None where the architecture sets no limit
    tokenizer_file: Path | None  # tokenizer.json, where the folder has one
    has_weights: bool

    @property
    def is_quantised(self) -> bool:
        """Return whether the stored weights are quantised, and stay so when they are loaded."""
        return QUANTIZATION in self.config and not self.comes_in_mxfp4

    @property
    def comes_in_mxfp4(self) -> bool:
        """Return whether the experts' weights are stored in blocks of mxfp4, as those of gpt-oss.

        transformers computes with such blocks where Triton and the Hub's kernels are there, and does not train them
        (Mxfp4HfQuantizer.is_trainable); brim has them dequantised as they are loaded, for training and for inference.
        """
        stored = self.config.get(QUANTIZATION)
        return isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"

    @property
    def stored_dtype(self) -> torch.dtype:
        """Return the dtype that the weights are stored in, by config.json; fp32 where it does not say."""
        import torch

        text = self.config.get("text_config")
        for section in (self.config, text if isinstance(text, dict) else {}):
            name = section.get("dtype") or section.get("torch_dtype")
            found = getattr(torch, str(name).removeprefix("torch."), None)
            if isinstance(found, torch.dtype):
                return found
        return torch.float32

    def stays_as_read(self, dtype: torch.dtype | None, products_dtype: torch.dtype | None) -> bool:
        """Return whether a weight that is read is one that the model holds, in these dtypes (see `load_base`).

        Such weights go to a GPU one by one. Others, which are cast or joined there, would be there twice, and nobody
        knows beforehand how many at once, since threads read ahead: they are made on the CPU, and moved.
        """
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        if self.comes_in_mxfp4 or products_dtype not in (None, dtype or self.stored_dtype):
            return False
        conversions = get_checkpoint_conversion_mapping(self.config.get("model_type")) or []
        return not any(isinstance(each, WeightConverter) for each in conversions)

    @property
    def skipped_modules(self) -> list[str] | None:
        """Return the linear layers that are not quantised in a quantised folder; None where it names none."""
        stored = self.config.get(QUANTIZATION)
        names = stored.get("llm_int8_skip_modules") if isinstance(stored, dict) else None
        return None if names is None else list(names)


def locate(
    base_model: str,
    *,
    initialize: Initialize = "pretrained",
    trust_remote_code: bool = False,
    config_only: bool = False,
) -> ModelFolder:
    """Find a base model: a local folder, else a Hub id.

    With `initialize="random"` the folder needs a config.json and a tokenizer but no weights; with `config_only`, for
    questions about the architecture alone, no tokenizer either, and the path of the config.json itself will do.
    Raises ModelError, naming all that is missing, what the folder may not ask for, and what to do.
    """
    path, name, has_weights = _found(base_model, config_only=config_only)
    require_plain_files(path)
    config: dict[str, Any] = {}
    problems: list[Problem] = []
    try:
        config = _read_config(path)
    except ModelError as error:
        problems += error.problems
    problems += refusals(path, config, name=name, trust_remote_code=trust_remote_code, config_only=config_only)
    if initialize == "pretrained" and not config_only and not has_weights:
        problems.append(_no_weights(path))
    if not config_only and not any((path / file).is_file() for file in _TOKENIZER_FILES):
        problems.append(
            Problem(
                what="the base model's folder holds no tokenizer",
                where=str(path),
                expected="tokenizer.json (or an older tokenizer file) beside config.json",
                fix="save it with `tokenizer.save_pretrained(folder)` or copy it from the original model",
            )
        )
    tokenizer_file = path / "tokenizer.json"
    if tokenizer_file.is_file() and tokenizer_file.stat().st_size > TOKENIZER_BYTES:
        problems.append(
            Problem(
                what=f"tokenizer.json has {tokenizer_file.stat().st_size:,} bytes",
                where=str(tokenizer_file),
                expected=f"at most {TOKENIZER_BYTES:,}",
                fix="copy it from the original model again",
            )
        )
    if problems:
        raise ModelError(*problems)
    return ModelFolder(
        path=path,
        name=name,
        config=config,
        context_length=context_length(config),
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
        has_weights=has_weights,
    )


def _found(base_model: str, *, config_only: bool) -> tuple[Path, str, bool]:
    """Return the folder, what from_pretrained takes for it, and whether it has weights."""
    local = local_path(base_model)
    if config_only and local is not None and local.name == "config.json" and local.is_file():
        local = local.parent
    if local is not None and local.is_dir():
        path = local.resolve()
        return path, str(path), any((path / file).is_file() for file in _WEIGHT_FILES)
    if local is None or _looks_like_a_path(base_model):
        raise ModelError(_no_such_folder(base_model, local))
    return _from_hub(base_model), base_model, True


def context_length(config: dict[str, Any]) -> int | None:
    """Read from config.json how many tokens the architecture's positions reach; None where it states no limit."""
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            if isinstance(section.get(key), int) and section[key] > 0:
                return int(section[key])
    return None


def local_folder(name: str) -> Path | None:
    """Return the folder of this name, absolute; None where there is none."""
    path = local_path(name) if name else None
    return path.resolve() if path is not None and path.is_dir() else None


def local_path(name: str) -> Path | None:
    """Return the path that the name may stand for; None where no file can have this name."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, the home of a user who is not there
        return None
    return path


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise ModelError(
            what="the base model's folder holds no config.json",
            where=str(path),
            expected="a transformers model: config.json, tokenizer.json, model.safetensors",
            fix="point base_model to the folder that save_pretrained wrote",
        ) from None
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ModelError(
            what="config.json does not say what kind of model this is",
            where=str(file),
            expected="the key model_type, as transformers writes it",
            fix="copy config.json from the original model again",
        )
    return config


def _no_weights(path: Path) -> Problem:
    pickled = [file for file in _PICKLED_WEIGHT_FILES if (path / file).exists()]
    if pickled:
        return Problem(
            what=f"the base model's weights are pickled ({pickled[0]}), which can run code when they are opened",
            where=str(path),
            expected="model.safetensors",
            fix="convert them where you trust them: load and save_pretrained with transformers",
        )
    return Problem(
        what="the base model's folder holds no weights",
        where=str(path),
        expected="model.safetensors, or model.safetensors.index.json with its parts",
        fix="copy the weights there, or set `initialize: random` to train from scratch",
    )


def _looks_like_a_path(base_model: str) -> bool:
    return base_model.startswith((".", "/", "~")) or base_model.count("/") != 1 or "\\" in base_model


def _no_such_folder(base_model: str, local: Path | None) -> Problem:
    if local is None:
        what = f"base_model: no folder can have this name: {base_model[:60]!r}"
        return Problem(what=what, expected="a local folder or a Hub id", fix="check the path")
    if local.exists():
        return Problem(what=f"base_model is a file, not a folder: {base_model}", fix="name the folder that holds it")
    parent = local.parent
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    nearest = difflib.get_close_matches(local.name, siblings, n=1)
    fix = f"did you mean {parent / nearest[0]}?" if nearest else "check the path; it is taken from the current folder"
    if "/" not in base_model:
        fix += ", or write a Hub id in full, such as meta-llama/Llama-2-7b-hf (Ludwig's short names are not known)"
    return Problem(what=f"base_model: no such folder: {base_model}", expected="a local folder or a Hub id", fix=fix)


def _from_hub(base_model: str) -> Path:
    """Fetch a model's small files (no weights) into the Hub's cache, and return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(base_model, allow_patterns=_HUB_PATTERNS))
    except GatedRepoError:
        what, fix = "needs its licence accepted on the Hub", "accept it there, then set HF_TOKEN in the environment"
    except RepositoryNotFoundError:
        what = "is neither a local folder nor a model on the Hub"
        fix = "check the spelling; private models need HF_TOKEN"
    except HFValidationError:
        what, fix = "is neither a local folder nor a valid Hub id", "write a folder's path or organisation/name"
    except (HfHubHTTPError, OSError) as error:
        what = f"is not on this machine, and the Hub could not be asked ({type(error).__name__})"
        fix = "point base_model to a local folder, or connect (and unset HF_HUB_OFFLINE) and try again"
    raise ModelError(what=f"base_model: {base_model} {what}", expected="a local folder or a Hub id", fix=fix)
