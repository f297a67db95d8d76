"""The order in which a run's writes reach the disk, judged by the log of its operations.

A machine that loses power cannot be had in a test. What can be checked is what makes brim survive it on a disk that
keeps its word: a file is synced after its last write and before the rename that shows it; the folder is synced after
the rename; and nothing older is deleted before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from faults.shim import Operation, is_hidden

_WRITES = ("write", "pwrite", "writev", "sendfile", "copy", "ftruncate", "fallocate")


def renames(operations: Sequence[Operation]) -> Iterator[tuple[str, str]]:
    """Each name that a rename shows, with what is wrong with the order around it; "" where nothing is.

    A rename within a folder that is itself to be shown counts with that folder.
    """
    for position, operation in enumerate(operations):
        if operation.name != "rename" or is_hidden(operation.new_path or ""):
            continue
        before, after = operations[:position], operations[position + 1 :]
        wrong = [*_not_synced(operation.path, before), *_shown_late(operation.new_path or "", after)]
        if (operation.new_path or "").startswith("checkpoints/"):
            wrong += _log_not_synced(operation.path, before)
        yield operation.new_path or "", "; ".join(wrong)


def _not_synced(path: str, before: Sequence[Operation]) -> Iterator[str]:
    """What of the file or folder that is about to be shown was written after its last sync."""
    written: dict[str, bool] = {}  # name -> whether it has been synced since
    hidden = False  # whether a temporary file's rename bypassed libc, so that its last name is not known
    for operation in before:
        if not _is_in(operation.path, path):
            continue
        if operation.name in _WRITES:
            written[operation.path] = False
        elif operation.name in ("fsync", "fdatasync"):
            written[operation.path] = True
        elif operation.name == "rename":
            written[operation.new_path or ""] = written.pop(operation.path, False)
        elif operation.name in ("unlink", "rmdir"):
            written.pop(operation.path, None)
    unsynced = [name for name, synced in written.items() if not synced]
    renamed_unseen = [name for name in unsynced if PurePosixPath(name).name.startswith(".tmp")]
    hidden = len(renamed_unseen) <= sum(
        name.endswith(".safetensors") and synced and _synced_last(name, renamed_unseen, before)
        for name, synced in written.items()
    )
    yield from (f"{name} was not synced" for name in unsynced if not (hidden and name in renamed_unseen))
    if not written:
        yield "nothing was synced"


def _synced_last(name: str, others: Sequence[str], before: Sequence[Operation]) -> bool:
    """Whether a file was synced after the last write to any of the others."""
    synced = max((o.number for o in before if o.path == name and o.name == "fsync"), default=0)
    written = max((o.number for o in before if o.path in others and o.name in _WRITES), default=0)
    return synced > written


def _shown_late(path: str, after: Sequence[Operation]) -> Iterator[str]:
    """Whether the folder is synced before anything is deleted, and before anything but the logs is written elsewhere.

    The logs are those of the steps that are made beside a checkpoint.
    """
    folder = PurePosixPath(path).parent.as_posix()
    for operation in after:
        if operation.name in ("fsync", "fdatasync") and operation.path == folder:
            return
        if operation.name in _WRITES and (operation.path == "metrics.jsonl" or _is_in(operation.path, "tensorboard")):
            continue
        if operation.name in ("unlink", "rmdir", *_WRITES):
            yield f"{operation.name} of {operation.path} before {folder} was synced"
            return
    yield f"{folder} was not synced"


def _log_not_synced(folder: str, before: Sequence[Operation]) -> Iterator[str]:
    """What a resumed run keeps of the log must be on the disk before the checkpoint that it goes by is begun.

    The log of later steps is written beside the checkpoint. Each checkpoint has a sync of its own.
    """
    begun = next((number for number, o in enumerate(before) if (o.name, o.path) == ("mkdir", folder)), len(before))
    last = max((number for number, o in enumerate(before) if _shows_checkpoint(o)), default=0)
    if not any(o.path == "metrics.jsonl" and o.name == "fsync" for o in before[last:begun]):
        yield "metrics.jsonl was not synced"


def _shows_checkpoint(operation: Operation) -> bool:
    shown = operation.new_path or ""
    return operation.name == "rename" and shown.startswith("checkpoints/") and not is_hidden(shown)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
