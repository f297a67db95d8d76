"""A sentence-transformers model as an encoder of texts: from a folder, or by its Hub id; it runs no code of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from brim.data.nearest_examples import Embeddings
from brim.errors import ConfigError, ModelError, Problem
from brim.models.quiet import no_library_bars
from brim.models.refusals import read_json, refusals, require_plain_files

KEY = "prompt.retrieval.model_name"
INSTALL = "pip install 'brim[retrieval]'"

_PACKAGE = "sentence_transformers"
_ORGANISATION = "sentence-transformers"  # of a Hub id that names none, as in the library
_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.jinja"]
_PICKLED = "pytorch_model.bin"
_WEIGHTS = "model.safetensors"


class FolderSentenceEncoder:
    """A model of sentence-transformers, loaded when it is first needed, on the GPU where there is one.

    It leaves the GPU after each call: the memory is the language model's, and its plan counts what is free.
    """

    def __init__(self, folder: Path) -> None:
        self.identity = _identity(folder)
        self._folder = folder
        self._model: Any = None

    def encode(self, texts: Sequence[str]) -> Embeddings:
        """One row of length 1 a text; texts of like length are padded together.

        Raises ModelError where the model cannot be loaded.
        """
        import torch

        if self._model is None:
            self._model = _loaded(self._folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(device)
        vectors = self._model.encode(
            list(texts), convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False, device=device
        )
        if device == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()
        return np.asarray(vectors, dtype=np.float32)


def load_sentence_encoder(name: str) -> FolderSentenceEncoder:
    """The model of a folder or a Hub id.

    Raises ConfigError where the extra is not installed or there is no such model; ModelError for a folder that asks for
    code of its own, holds pickled weights or is no model of sentence-transformers.
    """
    if not is_installed():
        raise ConfigError(
            Problem(
                what="prompt.retrieval.type: semantic needs the package sentence-transformers, which is not installed",
                where=KEY,
                fix=f"{INSTALL}, or set prompt.retrieval.type: random",
            )
        )
    folder = _folder(name)
    _require_harmless(folder)
    return FolderSentenceEncoder(folder)


def is_installed() -> bool:
    """Whether the package is there, without importing it."""
    return importlib.util.find_spec(_PACKAGE) is not None


def _loaded(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    try:
        with no_library_bars():
            return SentenceTransformer(
                str(folder),
                device="cpu",
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(_problem(f"the model that compares inputs cannot be loaded: {reason}", folder)) from error


def local_folder(name: str) -> Path | None:
    """The folder of this name, absolute; None where there is none."""
    if not name:
        return None
    try:
        local = Path(name).expanduser()
        return local.resolve() if local.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, the home of a user who is not there
        return None


def _folder(name: str) -> Path:
    local = local_folder(name)
    if local is not None:
        return local
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ConfigError(_problem(f"no such folder: {_cut(name)}", KEY))
    return _from_hub(name if "/" in name else f"{_ORGANISATION}/{name}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except HFValidationError:
        what = f"{_cut(name)} is neither a folder nor a Hub id"
    except (HfHubHTTPError, OSError) as error:
        what = f"{_cut(name)} is not on this machine, and the Hub did not give it ({type(error).__name__})"
    raise ConfigError(_problem(what, KEY))


def _require_harmless(folder: Path) -> None:
    """Refuse what a language model's folder may not hold either, and modules that are not the library's own."""
    require_plain_files(folder)
    problems = []
    with suppress(FileNotFoundError):  # older models have it in a module's folder; transformers refuses code there
        problems += refusals(folder, read_json(folder / "config.json"), name=str(folder), trust_remote_code=False)
    for file in sorted(folder.rglob(_PICKLED)):
        if not file.with_name(_WEIGHTS).is_file():
            what = f"weights are pickled ({file.relative_to(folder)}), which can run code when they are opened"
            problems.append(_problem(what, folder, fix="save the model again with sentence-transformers"))
    problems += [
        _problem(f"a module is not the library's own: {kind!r}", folder / "modules.json") for kind in _foreign(folder)
    ]
    if problems:
        raise ModelError(*problems)


def _foreign(folder: Path) -> list[object]:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(_problem(f"modules.json cannot be read: {error}", folder)) from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(_problem("modules.json is no list of modules", folder))
    kinds = [module.get("type") for module in modules]
    return [kind for kind in kinds if not (isinstance(kind, str) and kind.startswith(f"{_PACKAGE}."))]


def _identity(folder: Path) -> str:
    """The folder's files by name, size and time of change: reading gigabytes of weights would tell little more."""
    facts = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            facts.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\n".join([str(folder), *facts]).encode(), digest_size=16).hexdigest()


def _cut(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}…"


def _problem(what: str, where: str | Path, *, fix: str = "") -> Problem:
    return Problem(
        what=what,
        where=str(where),
        expected="a model of sentence-transformers with safetensors: a folder, or a Hub id such as "
        "sentence-transformers/all-MiniLM-L6-v2",
        fix=fix or f"check {KEY}",
    )
