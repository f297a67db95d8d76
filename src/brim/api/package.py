"""What of a run leaves the machine: the files of its model, with a card, and without a path of this machine.

Export writes a package into a folder, upload sends one; neither ever sees checkpoints, logs or the run's config.yaml.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from safetensors import SafetensorError, safe_open

from brim.config import load_config
from brim.digests import MANIFEST, sha256, verified
from brim.errors import ExportError, Problem
from brim.train.card import card_apart, local_name
from brim.train.run_folder import RunFolder, require_whole_model

Kind = Literal["adapter", "merged", "full"]
File: TypeAlias = Path | bytes  # where it lies, or its content

CARD, FACTS = "README.md", "export.json"

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_NAMES_OF_PATHS = ("base_model_name_or_path", "name_or_path", "_name_or_path")  # in JSON files, on the top level


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Files by name, without the card."""

    kind: Kind
    files: Mapping[str, File]
    card: str

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size if isinstance(file, Path) else len(file) for file in self.files.values())


def package_of_run(run: RunFolder) -> Package:
    """The adapter or model of a run as it was saved.

    Raises CheckpointError where a file was changed since, ExportError where one is missing or damaged.
    """
    require_whole_model(run)
    kind = kind_of(run.model)
    _require_readable(run.model)
    files = without_paths(files_of(run.model))
    return Package(kind=kind, files=completed(files, {"kind": kind}), card=card_of(run))


def package_of_export(folder: Path) -> Package:
    """What `brim export` wrote, with its card as it is now.

    Raises ExportError when a file was changed or is missing.
    """
    try:
        names = verified(folder)
        kind = json.loads((folder / FACTS).read_text(encoding="utf-8"))["kind"]
        card = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ExportError(
            Problem(
                what=f"this export is not whole ({error})",
                where=str(folder),
                expected=f"the files that its {MANIFEST} lists, and {CARD}",
                fix="export the run again into another folder",
            )
        ) from None
    return Package(kind=kind, files={name: folder / name for name in [*names, MANIFEST]}, card=card)


def card_of(run: RunFolder, *, merge: str | None = None) -> str:
    """The run's card for a folder apart from it. Raises ExportError where what it is made from is damaged."""
    path = run.card
    try:
        card = path.read_text(encoding="utf-8") if path.is_file() else None
        path = run.environment
        packages = json.loads(path.read_text(encoding="utf-8"))["packages"] if path.is_file() else {}
        return card_apart(card, load_config(run.config).config, packages=packages, merge=merge)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{path.name} is damaged: {error}"
        fix = f"delete it; the export then goes without what {path.name} tells"
        raise ExportError(Problem(what=what, where=str(path), fix=fix)) from None


def kind_of(model: Path) -> Kind:
    """What a model folder holds. Raises ExportError where it is neither an adapter nor a model."""
    if all((model / name).is_file() for name in _ADAPTER):
        return "adapter"
    weights = (model / "model.safetensors").is_file() or (model / "model.safetensors.index.json").is_file()
    if (model / "config.json").is_file() and weights:
        return "full"
    raise ExportError(
        Problem(
            what="the run's model is not whole",
            where=str(model),
            expected=f"{' and '.join(_ADAPTER)}, or config.json and model.safetensors",
            fix=f"write it anew with `brim train {model.parent} --resume`",
        )
    )


def files_of(model: Path) -> dict[str, Path]:
    """The files of a model folder by name: those in its manifest, else what a model consists of."""
    if (model / MANIFEST).is_file():
        names = sorted(json.loads((model / MANIFEST).read_text(encoding="utf-8")))
    else:
        names = sorted(path.name for path in model.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    return {name: model / name for name in names}


def without_paths(files: Mapping[str, Path]) -> dict[str, File]:
    """The files, with null for each name of a folder of this machine in the JSON ones."""
    return {name: _without_paths(file) if name.endswith(".json") else file for name, file in files.items()}


def completed(files: Mapping[str, File], facts: Mapping[str, object]) -> dict[str, File]:
    """The files with export.json and a manifest of them all; the card stays out, since its owner may write on."""
    together = {**files, FACTS: (json.dumps(facts, indent=1) + "\n").encode()}
    digests = {name: _digest(file) for name, file in sorted(together.items())}
    return {**together, MANIFEST: (json.dumps(digests, indent=1) + "\n").encode()}


def _digest(file: File) -> str:
    return sha256(file) if isinstance(file, Path) else hashlib.sha256(file).hexdigest()


def _without_paths(file: Path) -> File:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(_damaged(file, str(error))) from None
    if not isinstance(content, dict):
        return file
    paths = [key for key in _NAMES_OF_PATHS if isinstance(content.get(key), str) and _is_local(content[key])]
    if not paths:
        return file
    cleaned = {**content, **dict.fromkeys(paths)}
    return (json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n").encode()


def _is_local(name: str) -> bool:
    return local_name(name) != name


def _require_readable(model: Path) -> None:
    """Open each file of weights, which checks its header and its length."""
    for path in files_of(model).values():
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ExportError(_damaged(path, str(error))) from None


def _damaged(file: Path, why: str) -> Problem:
    return Problem(
        what=f"a file of the run's model is damaged: {why}",
        where=str(file),
        fix=f"write the model anew with `brim train {file.parent.parent} --resume`",
    )
