"""Predictions as a file: parquet, jsonl or csv, by its ending, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from brim.errors import OutputError, Problem
from brim.files import whole_file

_WRITERS: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    ".parquet": lambda frame, path: frame.to_parquet(path, index=False),
    ".jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, force_ascii=False),
    ".csv": lambda frame, path: frame.to_csv(path, index=False),
}


def check_output(path: Path) -> None:
    """Refuse, before any work is done, a file that could not be written or stands there already."""
    if path.suffix not in _WRITERS:
        raise OutputError(
            Problem(
                what=f"the output's ending {path.suffix!r} is not known",
                where=str(path),
                expected=", ".join(_WRITERS),
                fix="name the file predictions.parquet, say",
            )
        )
    if path.exists():
        raise OutputError(
            Problem(what="the output file exists already; nothing was changed", where=str(path), fix="name another")
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            Problem(what=f"the output cannot be written: {error.strerror or error}", where=str(path))
        ) from error


def write_predictions(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame in the format of the path's ending."""
    with whole_file(path) as temporary:
        _WRITERS[path.suffix](frame, temporary)
