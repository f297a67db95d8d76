"""Refuse what a base model's folder may not ask for: its own code, files from elsewhere, impossible sizes.

Kernels from elsewhere are refused, too. All of it is read from the folder's small files alone, so that `brim check`
says it without torch and before anything is opened by a library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brim.errors import ModelError, Problem

SMALL_FILE_BYTES = 32 << 20  # config.json has a few kB; the largest index of weights known has some MB


TOKENIZER_BYTES = 512 << 20  # the largest tokenizer.json known has 35 MB


_CODE = ("auto_map", "custom_pipelines", "trust_remote_code", "custom_generate")


_ATTENTION = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


_KERNELS = ("use_kernels", "kernel_config")


_PLAIN_KERNEL = re.compile(r"\w+")  # `organisation/name` would be fetched from the Hub and run


_MOST = {
    "num_hidden_layers": 10_000,
    "num_layers": 10_000,
    "n_layer": 10_000,
    "n_layers": 10_000,
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "n_routed_experts": 100_000,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 28,
    "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 20,
    "num_key_value_heads": 1 << 20,
    "max_position_embeddings": 1 << 40,
}


_INDEX = "model.safetensors.index.json"


_CUSTOM_GENERATE = "custom_generate/generate.py"


_NO_CODE = "a folder of weights and settings alone"


_DTYPE = re.compile(r"(torch\.)?(float(16|32|64|8_e4m3fn|8_e5m2)|bfloat16)|auto")


_OWN_CODE = "the base model asks for its own code to be run"


def refusals(
    path: Path, config: dict[str, Any], *, name: str, trust_remote_code: bool, config_only: bool = False
) -> list[Problem]:
    """List all that is refused of a folder; nothing for a plain one.

    config: what its config.json holds. config_only: only the architecture is asked for; a class that the folder brings
    is then ignored where transformers has one.
    """
    if not config:
        return []  # reported already
    others: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for file in ("tokenizer_config.json", "generation_config.json"):
        try:
            others[file] = read_json(path / file) if (path / file).exists() else {}
        except ModelError as error:
            problems += error.problems
    if not trust_remote_code:
        asking = without_auto_map(config) if config_only else config
        for file, content in {"config.json": asking, **others}.items():
            problems += _own_code(path, file, content, name=name, kind=config.get("model_type"))
        if (path / _CUSTOM_GENERATE).exists():
            what = f"{_OWN_CODE} ({_CUSTOM_GENERATE})"
            problems.append(
                Problem(what=what, where=str(path), expected=_NO_CODE, fix="remove the folder custom_generate")
            )
    problems += _kernels(path / "config.json", config)
    problems += _values(path / "config.json", config)
    problems += _elsewhere(path, config)
    return problems


def without_auto_map(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without classes of its own, where transformers has one; else as it is."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not config.get("auto_map") or not _transformers_has(kind):
        return config
    return {key: value for key, value in config.items() if key != "auto_map"}


def require_plain_files(path: Path) -> None:
    """Raise ModelError for entries of a folder that lead out of it, or that are not files and may never end."""
    problems: list[Problem] = []
    for entry in sorted(path.iterdir()):
        if entry.is_symlink() and not _stays(entry, path):
            problems.append(
                Problem(
                    what=f"{entry.name} is a link that leaves the folder",
                    where=str(path),
                    expected="files that lie in the folder",
                    fix="copy the file there, or name the folder that the link leads to",
                )
            )
        elif entry.exists() and not (entry.is_file() or entry.is_dir()):
            what = f"{entry.name} is not a regular file"
            problems.append(Problem(what=what, where=str(path), fix="copy the original file there"))
    if problems:
        raise ModelError(*problems)


def read_json(file: Path, *, most_bytes: int = SMALL_FILE_BYTES) -> dict[str, Any]:
    """Read a small JSON file that holds a mapping. Raises ModelError; FileNotFoundError where there is none."""
    fix = "copy it from the original model again"
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(what=f"{file.name} is not a regular file", where=str(file), fix=fix)
        if status.st_size > most_bytes:
            what = f"{file.name} has {status.st_size:,} bytes"
            raise ModelError(what=what, where=str(file), expected=f"at most {most_bytes:,}", fix=fix)
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except RecursionError:
        what = f"{file.name} cannot be read: it is nested too deeply"
        raise ModelError(what=what, where=str(file), fix=fix) from None
    except (OSError, ValueError) as error:
        raise ModelError(what=f"{file.name} cannot be read: {error}", where=str(file), fix=fix) from None
    if not isinstance(value, dict):
        raise ModelError(what=f"{file.name} holds no mapping", where=str(file), expected="{…}", fix=fix)
    return value


def _own_code(path: Path, file: str, content: dict[str, Any], *, name: str, kind: object) -> Iterator[Problem]:
    """Refuse custom classes, also those that transformers silently ignores in favour of its own."""
    keys = [key for key, value in _settings(content) if key.rpartition(".")[2] in _CODE and value]
    if not keys:
        return
    where, keys_there = str(path / file), ", ".join(keys)
    if name == str(path):
        remove = f"take {keys_there} out of {file}"
    else:
        remove = f"`hf download {name} --local-dir DIR`, take {keys_there} out of DIR/{file}, set base_model: DIR"
    if isinstance(kind, str) and _transformers_has(kind):
        fix = f"{remove}; transformers has a class of its own for {kind}"
    else:
        fix = (
            "choose a base model that transformers has a class for; otherwise read the code, and only if you trust "
            "who wrote it, set `trust_remote_code: true`"
        )
    yield Problem(what=f"{_OWN_CODE} ({keys_there} in {file})", where=where, expected=_NO_CODE, fix=fix)


def _transformers_has(kind: str) -> bool:
    """Return whether the installed transformers has this architecture, by its folders: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None or not re.fullmatch(r"[\w-]+", kind):
        return False
    return (Path(spec.origin).parent / "models" / kind.replace("-", "_")).is_dir()


def _kernels(file: Path, config: dict[str, Any]) -> Iterator[Problem]:
    for key, value in _settings(config):
        last = key.rpartition(".")[2]
        names = list(value.values()) if isinstance(value, dict) else [value]
        foreign = last in _ATTENTION and not all(
            each is None or (isinstance(each, str) and _PLAIN_KERNEL.fullmatch(each)) for each in names
        )
        if foreign or (last in _KERNELS and value):
            yield Problem(
                what=f"{key} in config.json makes transformers fetch compiled code from the Hub and run it",
                where=str(file),
                expected="an attention kernel's plain name, or none",
                fix=f"take {key} out of config.json; model_parameters.attn_implementation chooses the kernel",
            )


def _values(file: Path, config: dict[str, Any]) -> Iterator[Problem]:
    """Refuse sizes that would keep the machine busy, or fill its memory, and dtypes that torch does not have."""
    for key, value in _settings(config):
        last = key.rpartition(".")[2]
        if value is None:
            continue
        if last in ("dtype", "torch_dtype"):
            expected = "float32, float16 or bfloat16"
            is_right = isinstance(value, str) and _DTYPE.fullmatch(value) is not None
        elif last in _MOST:
            expected = f"a whole number from 1 to {_MOST[last]:,}"
            is_right = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST[last]
        else:
            continue
        if not is_right:
            yield Problem(
                what=f"{key} in config.json is {_short(value)}",
                where=str(file),
                expected=expected,
                fix="copy config.json from the original model again",
            )


def _elsewhere(path: Path, config: dict[str, Any]) -> Iterator[Problem]:
    """Refuse files that make transformers load weights from elsewhere than the folder's own safetensors."""
    if (path / "adapter_config.json").exists():
        yield Problem(
            what="the base model's folder holds an adapter, which names a base model of its own",
            where=str(path / "adapter_config.json"),
            expected="a whole model",
            fix="set base_model to the model that the adapter was trained on, and name this folder in "
            "adapter.pretrained_adapter_weights; or remove adapter_config.json",
        )
    if config.get("transformers_weights") is not None:
        yield Problem(
            what="transformers_weights in config.json names weights under another name",
            where=str(path / "config.json"),
            expected="model.safetensors, or model.safetensors.index.json with its parts",
            fix="take it out, and rename the weights",
        )
    if (path / _INDEX).exists() and not (path / "model.safetensors").exists():
        yield from _parts(path / _INDEX)


def _parts(index: Path) -> Iterator[Problem]:
    try:
        content = read_json(index)
    except ModelError as error:
        yield from error.problems
        return
    parts = content.get("weight_map")
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, str) for part in parts.values()):
        yield Problem(
            what=f"{_INDEX} does not say which file holds which weight",
            where=str(index),
            expected="weight_map: the name of a file for each weight",
            fix="copy it from the original model again",
        )
        return
    for part in sorted(set(parts.values())):
        if Path(part).name != part or not part.endswith(".safetensors"):
            yield Problem(
                what=f"{_INDEX} names {_short(part)}, which is not a safetensors file of this folder",
                where=str(index),
                expected="plain names, such as model-00001-of-00002.safetensors",
                fix="copy the folder again from its source",
            )


def _stays(entry: Path, folder: Path) -> bool:
    """Return whether a link ends in its folder, or where the Hub's cache keeps the files of this very model."""
    target, folder = Path(os.path.realpath(entry)), folder.resolve()  # resolve() raises for a loop of links
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return target.is_relative_to(folder) or target.is_relative_to(blobs)


def _settings(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted key, also those of the sections (text_config and others)."""
    for key, value in config.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _settings(value, f"{prefix}{key}.")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of too many digits"
    return text if len(text) <= 60 else text[:59] + "…"
