"""Write a model into a folder of its own, for PEFT, for plain transformers, or for the Hub.

What leaves the machine are the files of the run's model, with a card, and without a path of this machine. Export
writes such a package into a folder, upload sends one; neither ever sees checkpoints, logs or the run's config.yaml.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from safetensors import SafetensorError, safe_open

from brim.config import load_config
from brim.errors import ExportError, InputError, OutputError, Problem, WriteError
from brim.models import no_library_warnings
from brim.storage import MANIFEST, sha256, verified, whole_folder
from brim.train import RunFolder
from brim.workflows.runs import ExportResult, card_apart, local_name

FORMAT = "safetensors"


# What Ludwig has, and what people ask for, with what to do instead.
_OTHER_FORMATS = {
    "torch_export": "open the merged folder with transformers and call torch.export there",
    "torchscript": "open the merged folder with transformers; TorchScript is no longer developed",
    "onnx": "export with --merge, then `optimum-cli export onnx --model DIR OUT`",
    "gguf": "export with --merge, then `convert_hf_to_gguf.py DIR` of llama.cpp",
    "pickle": "export safetensors: a pickle can run code when it is opened",
    "bin": "export safetensors: a pickle can run code when it is opened",
}


@no_library_warnings()
def export_run(run: RunFolder, path: Path) -> ExportResult:
    """Write the adapter or model of a run into a new or an empty folder, with a card that stands alone.

    Raises OutputError for a folder that is taken, WriteError when the disk is full, ExportError for a damaged run.
    """
    check_target(path, run)
    package = package_of_run(run)
    with filling(path, num_bytes=package.num_bytes) as folder:
        place(folder, {**package.files, CARD: package.card.encode()})
    return ExportResult(path=path, kind=package.kind, num_bytes=size_of(path), divergence=None, probe=None)


def require_run(run: RunFolder | None) -> RunFolder:
    """Return a model's run. Raises InputError for a model that none has trained."""
    if run is None:
        raise InputError(
            what="there is no trained model to export: this model comes from a configuration, not from a run",
            expected="a run's folder, or a model that was trained just now",
            fix="name the folder that `brim train` wrote; what `Model.save` writes can be loaded, too",
        )
    return run


def check_format(name: str) -> None:
    """Refuse all formats but safetensors. Raises InputError with what to do instead."""
    if name != FORMAT:
        fix = _OTHER_FORMATS.get(name.lower(), "leave --format out")
        raise InputError(what=f"brim does not write the format {name!r}", where="--format", expected=FORMAT, fix=fix)


def check_target(path: Path, run: RunFolder) -> None:
    """Raise OutputError unless a new folder can be written there, outside the run. Writes nothing."""
    place_there = path.resolve()
    fix = "choose another with --output"
    if place_there.is_relative_to(run.path.resolve()):
        what = "the output directory lies in the run that is exported"
        raise OutputError(what=what, where=str(path), expected="a folder outside the run", fix=fix)
    if path.exists() and not path.is_dir():
        raise OutputError(what="the output directory is a file", where=str(path), fix=fix)
    try:
        if path.is_dir() and any(path.iterdir()):
            what, wanted = "the output directory holds other things; nothing was changed", "a new or an empty folder"
            raise OutputError(what=what, where=str(path), expected=wanted, fix=fix)
        above = next(each for each in place_there.parents if each.exists())
    except OSError as error:
        raise OutputError(_unwritable(path, error.strerror or str(error))) from None
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(_unwritable(path, f"no new folder can be made in {above}"))


@contextmanager
def filling(path: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yield a folder that becomes `path` when it is whole. num_bytes: what will be written, which must fit the disk."""
    target = path.resolve()
    above = next(each for each in target.parents if each.exists())
    free = shutil.disk_usage(above).free
    if free < num_bytes:
        raise WriteError(_no_room(path, f"it needs {num_bytes:,} bytes, and {free:,} are free"))
    try:
        with whole_folder(target) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise WriteError(_no_room(path, str(error))) from error
    finally:
        if not target.exists():
            _remove_empty(target.parent, above)


def _remove_empty(folder: Path, above: Path) -> None:
    """Take away the folders that were made below `above` for what was not written."""
    with suppress(OSError):  # someone else's things are in one
        while folder != above:
            folder.rmdir()
            folder = folder.parent


def place(folder: Path, files: Mapping[str, File]) -> None:
    """Write or copy files into a folder."""
    for name, file in files.items():
        if isinstance(file, Path):
            shutil.copyfile(file, folder / name)
        else:
            (folder / name).write_bytes(file)


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _unwritable(path: Path, why: str) -> Problem:
    what = f"the output directory cannot be written: {why}"
    return Problem(what=what, where=str(path), fix="choose another with --output")


def _no_room(path: Path, why: str) -> Problem:
    return Problem(
        what=f"the export could not be written: {why}",
        where=str(path),
        fix="free disk space, or choose another place with --output; nothing was left there",
    )


Kind = Literal["adapter", "merged", "full"]


File: TypeAlias = Path | bytes  # where it lies, or its content


CARD, FACTS = "README.md", "export.json"


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")


_NAMES_OF_PATHS = ("base_model_name_or_path", "name_or_path", "_name_or_path")  # in JSON files, on the top level


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Hold what leaves the machine: files by name, and the card."""

    kind: Kind
    files: Mapping[str, File]
    card: str

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size if isinstance(file, Path) else len(file) for file in self.files.values())


def package_of_run(run: RunFolder) -> Package:
    """Return the adapter or model of a run as it was saved.

    Raises CheckpointError where a file was changed since, ExportError where one is missing or damaged.
    """
    run.require_whole_model()
    kind = kind_of(run.model)
    _require_readable(run.model)
    files = without_paths(files_of(run.model))
    return Package(kind=kind, files=completed(files, {"kind": kind}), card=card_of(run))


def package_of_export(folder: Path) -> Package:
    """Return what `brim export` wrote, with its card as it is now.

    Raises ExportError when a file was changed or is missing.
    """
    try:
        names = verified(folder)
        kind = json.loads((folder / FACTS).read_text(encoding="utf-8"))["kind"]
        card = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ExportError(
            what=f"this export is not whole ({error})",
            where=str(folder),
            expected=f"the files that its {MANIFEST} lists, and {CARD}",
            fix="export the run again into another folder",
        ) from None
    return Package(kind=kind, files={name: folder / name for name in [*names, MANIFEST]}, card=card)


def card_of(run: RunFolder, *, merge: str | None = None) -> str:
    """Return the run's card for a folder outside the run. Raises ExportError where what it is made from is damaged."""
    path = run.card
    try:
        card = path.read_text(encoding="utf-8") if path.is_file() else None
        path = run.environment
        packages = json.loads(path.read_text(encoding="utf-8"))["packages"] if path.is_file() else {}
        return card_apart(card, load_config(run.config).config, packages=packages, merge=merge)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{path.name} is damaged: {error}"
        fix = f"delete it; the export then goes without what {path.name} records"
        raise ExportError(what=what, where=str(path), fix=fix) from None


def kind_of(model: Path) -> Kind:
    """Return the kind of a model folder. Raises ExportError where it holds neither an adapter nor a model."""
    if all((model / name).is_file() for name in ADAPTER):
        return "adapter"
    weights = (model / "model.safetensors").is_file() or (model / "model.safetensors.index.json").is_file()
    if (model / "config.json").is_file() and weights:
        return "full"
    raise ExportError(
        what="the run's model is not whole",
        where=str(model),
        expected=f"{' and '.join(ADAPTER)}, or config.json and model.safetensors",
        fix=f"write it again with `brim train {model.parent} --resume`",
    )


def files_of(model: Path) -> dict[str, Path]:
    """List the files of a model folder by name: those in its manifest, else what a model consists of."""
    if (model / MANIFEST).is_file():
        names = sorted(json.loads((model / MANIFEST).read_text(encoding="utf-8")))
    else:
        names = sorted(path.name for path in model.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    return {name: model / name for name in names}


def without_paths(files: Mapping[str, Path]) -> dict[str, File]:
    """Return the files with null, in the JSON ones, for each name of a folder of this machine."""
    return {name: _without_paths(file) if name.endswith(".json") else file for name, file in files.items()}


def completed(files: Mapping[str, File], facts: Mapping[str, object]) -> dict[str, File]:
    """Add export.json and a manifest of all files; the card is not in it, since its owner may edit it."""
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
    names = {key: content[key] for key in _NAMES_OF_PATHS if isinstance(content.get(key), str)}
    paths = [key for key, name in names.items() if local_name(name) != name]
    if not paths:
        return file
    cleaned = {**content, **dict.fromkeys(paths)}
    return (json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n").encode()


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
        fix=f"write the model again with `brim train {file.parent.parent} --resume`",
    )
