"""A model in a folder of its own, for PEFT, for plain transformers, or for the Hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from brim.api.package import CARD, File, package_of_run
from brim.api.results import ExportResult
from brim.errors import InputError, OutputError, Problem, WriteError
from brim.files import whole_folder
from brim.models.quiet import no_library_warnings
from brim.train.run_folder import RunFolder

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
            Problem(
                what="there is nothing trained to hand on: this model comes from a configuration, not from a run",
                expected="a run's folder, or a model that was trained just now",
                fix="name the folder that `brim train` wrote; what `Model.save` writes can be loaded, too",
            )
        )
    return run


def check_format(name: str) -> None:
    """Refuse all formats but safetensors. Raises InputError with what to do instead."""
    if name != FORMAT:
        fix = _OTHER_FORMATS.get(name.lower(), "leave --format out")
        raise InputError(
            Problem(what=f"brim does not write the format {name!r}", where="--format", expected=FORMAT, fix=fix)
        )


def check_target(path: Path, run: RunFolder) -> None:
    """Raise OutputError unless a new folder can be written there, outside the run. Writes nothing."""
    place_there = path.resolve()
    fix = "choose another with --output"
    if place_there.is_relative_to(run.path.resolve()):
        what = "the output directory lies in the run that is exported"
        raise OutputError(Problem(what=what, where=str(path), expected="a folder outside the run", fix=fix))
    if path.exists() and not path.is_dir():
        raise OutputError(Problem(what="the output directory is a file", where=str(path), fix=fix))
    try:
        if path.is_dir() and any(path.iterdir()):
            what, wanted = "the output directory holds other things; nothing was changed", "a new or an empty folder"
            raise OutputError(Problem(what=what, where=str(path), expected=wanted, fix=fix))
        above = next(each for each in place_there.parents if each.exists())
    except OSError as error:
        raise OutputError(_unwritable(path, error.strerror or str(error))) from None
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(_unwritable(path, f"no new folder can be made in {above}"))


@contextmanager
def filling(path: Path, *, num_bytes: int) -> Iterator[Path]:
    """A folder that becomes `path` when it is whole. num_bytes: what will be written, for which there must be room."""
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
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _unwritable(path: Path, why: str) -> Problem:
    what = f"the output directory cannot be written: {why}"
    return Problem(what=what, where=str(path), fix="choose another with --output")


def _no_room(path: Path, why: str) -> Problem:
    return Problem(
        what=f"the export could not be written: {why}",
        where=str(path),
        fix="make room or choose another place with --output; nothing was left there",
    )
