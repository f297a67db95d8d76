"""All that a response depends on beside its prompt, as names and values: what must be the same to go on with a job."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from brim.api.chat import template_texts
from brim.api.session import Session
from brim.config import mask_secrets
from brim.digests import sha256
from brim.models.adapter_folder import CONFIG, WEIGHTS

Fingerprint: TypeAlias = dict[str, Any]

# Where things lie, what they run on, what batches they are cut into and what becomes of rows that cannot be used. What
# a row is given to read is compared row by row.
_NO_RESULT = (
    "dataset",
    "base_model",
    "adapter.pretrained_adapter_weights",
    "chat.template",
    "backend.",
    "memory.",
    "trainer.",
    "generation.engine",
    "prompt.retrieval.",
    "preprocessing.on_bad_row",
    "preprocessing.on_overlong",
    "preprocessing.drop_unlearnable",
    "preprocessing.max_dropped_fraction",
)
_OF_ROWS = re.compile(r"(in|out)put_features\.\d+\.preprocessing\.missing_value_strategy")
_ENGINE = "generation.engine"
# Labels are looked for in the responses when the output is put together.
_WHICH_LABEL = (
    "output_features.0.type",
    "output_features.0.decoder.",
    "output_features.0.preprocessing.fallback_label",
    "output_features.0.preprocessing.vocab",
)
_WHICH_ROWS = ("preprocessing.split", "preprocessing.sample_ratio", "preprocessing.sample_size")

_BASE_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "vocab*", "merges*", "*.py", "*/*.jinja")
# Larger files are known by their size and samples: reading 16 GB takes as long as many a job.
_WHOLE_BYTES = 64 * 2**20
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


def fingerprint(session: Session, *, split: str) -> Fingerprint:
    """Of the configuration's keys that change a response, and of the files of the base model and the adapter."""
    config = dict(_flat(mask_secrets(session.config.model_dump(mode="json"))))
    kept = {key: value for key, value in config.items() if not _is_without_effect(key)}
    if split == "full":
        kept = {key: value for key, value in kept.items() if not key.startswith(_WHICH_ROWS)}
    decoder = session.config.output_features[0].categories
    if decoder is None or not decoder.constrain_to_vocabulary:
        kept = {key: value for key, value in kept.items() if not key.startswith(_WHICH_LABEL)}
    template = template_texts(session)
    return {
        **kept,
        "--split": split,
        **_other_numbers(session),
        **({} if template is None else {"the chat template": _digest(template.as_one().encode())}),
        **_base_files(session),
        **_adapter_files(session),
    }


def _other_numbers(session: Session) -> dict[str, str]:
    """vLLM draws from a row's seed in a way of its own; all other engines draw the same."""
    generation = session.config.generation
    samples = generation.do_sample and generation.temperature > 0
    return {_ENGINE: "vllm"} if samples and generation.engine == "vllm" else {}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words: "generation.top_p: 0.9 before, 1.0 now"; of files and texts only which."""
    lines = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        # An earlier version may have kept more; the engine is there only where it has an effect.
        if old != new and (name == _ENGINE or not _is_without_effect(name)):
            is_content = name.startswith("the ")
            lines.append(name if is_content else f"{name}: {json.dumps(old)} before, {json.dumps(new)} now")
    return lines


def _is_without_effect(key: str) -> bool:
    return key.startswith(_NO_RESULT) or _OF_ROWS.fullmatch(key) is not None


def _base_files(session: Session) -> dict[str, str]:
    """The files of a local folder; of a model from the Hub its commit, which its files cannot leave."""
    folder = session.folder
    if folder.name == str(folder.path):
        return {f"the base model's {name}": digest for name, digest in _files(folder.path, _BASE_FILES)}
    return {"the base model's commit on the Hub": folder.path.name}


def _adapter_files(session: Session) -> dict[str, str]:
    adapter = session.config.adapter
    if adapter is None or adapter.pretrained_adapter_weights is None:
        return {}
    folder = Path(adapter.pretrained_adapter_weights)
    return {f"the adapter's {name}": digest for name, digest in _files(folder, (CONFIG, WEIGHTS))}


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        yield path.relative_to(folder).as_posix(), _digest_of_file(path)


def _digest_of_file(path: Path) -> str:
    """The content's digest; of a large file that of its size and of samples, the ends among them."""
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return sha256(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, sampled: {digest.hexdigest()}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; lists of mappings by their positions."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for number, item in enumerate(tree):
            yield from _flat(item, f"{prefix}.{number}")
    else:
        yield prefix, tree
