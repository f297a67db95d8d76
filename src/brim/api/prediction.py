"""Predictions as a file: parquet, jsonl or csv, by its ending, whole or not at all."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from brim.data import Ledger, Source
from brim.errors import DataError, OutputError, Problem, WriteError
from brim.files import whole_file

ROW = "row"
_OWN_COLUMNS = (ROW, "finish_reason", "num_prompt_tokens", "num_response_tokens")
_ROWS_AT_ONCE = 1024


def check_output(path: Path) -> None:
    """Refuse, before any work is done, a file that could not be written or stands there already."""
    if path.suffix not in _WRITERS:
        raise OutputError(
            Problem(
                what=f"the output's ending {path.suffix!r} is not known" if path.suffix else "the output has no ending",
                where=str(path),
                expected=", ".join(_WRITERS),
                fix="name the file predictions.parquet, say",
            )
        )
    try:
        if path.exists() or path.is_symlink():
            raise OutputError(
                Problem(what="the output file exists already; nothing was changed", where=str(path), fix="name another")
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(_unwritable(path, error)) from error


def require_free_names(source: Source, response: str) -> None:
    """Refuse, before any work is done, data whose columns are called like those that predictions add."""
    taken = [name for name in (ROW, response, *_OWN_COLUMNS[1:]) if name in source.table.column_names]
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken)
        raise DataError(
            Problem(
                what=f"the data has {'a column' if len(taken) == 1 else 'columns'} {listed}, "
                f"{'a name' if len(taken) == 1 else 'names'} that predictions use themselves",
                where=source.name,
                fix="rename or remove it" if len(taken) == 1 else "rename or remove them",
            )
        )


def beside_input(source: Source, keys: NDArray[np.int64], responses: pd.DataFrame) -> pd.DataFrame:
    """The input's rows of these keys with what was generated for each: row, the input's columns, the responses."""
    # Whole numbers stay whole numbers beside empty cells.
    frame: pd.DataFrame = source.table.take(keys).to_pandas(integer_object_nulls=True)
    frame.insert(0, ROW, keys)
    for name in responses:
        frame[name] = responses[name].to_numpy()
    return frame


def ledger_path(output: Path) -> Path:
    """Where it stands which rows were cut or left out of these predictions."""
    return output.with_name(f"{output.name}.ledger.parquet")


def write_with_ledger(frame: pd.DataFrame, ledger: Ledger, path: Path) -> Path | None:
    """Write predictions, and the ledger beside them where it has entries, so that there is never one without the other.

    Returns the ledger's path. Raises WriteError when one of them cannot be written.
    """
    if not len(ledger):
        write_predictions(frame, path)
        return None
    beside = ledger_path(path)
    ledger.write(beside)
    try:
        write_predictions(frame, path)
    except BaseException:
        beside.unlink()
        raise
    return beside


def write_predictions(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame in the format of the path's ending. Raises WriteError when it cannot be written."""
    try:
        with whole_file(path) as temporary:
            _WRITERS[path.suffix](frame, temporary)
    except OSError as error:
        raise WriteError(_unwritable(path, error)) from error


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, index=False)


def _write_jsonl(frame: pd.DataFrame, path: Path) -> None:
    """By hand, since pandas rounds numbers to ten digits and turns dates into milliseconds."""
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, len(frame), _ROWS_AT_ONCE):
            for record in frame.iloc[start : start + _ROWS_AT_ONCE].to_dict("records"):
                plain = {name: _plain(value) for name, value in record.items()}
                file.write(json.dumps(plain, ensure_ascii=False, default=_as_json) + "\n")


def _write_csv(frame: pd.DataFrame, path: Path) -> None:
    """All texts quoted, so that a lone carriage return in one ends no line."""
    frame.to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC)


def _plain(value: Any) -> Any:
    """Null for what is missing; JSON has no NaN."""
    missing = value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value))
    return None if missing else value


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _unwritable(path: Path, error: OSError) -> Problem:
    below_a_file = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "its path leads through a file" if below_a_file else error.strerror or str(error)
    return Problem(
        what=f"the output cannot be written: {reason}",
        where=str(path),
        fix="name a file in a folder that may be written to and has room",
    )


_WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    ".parquet": _write_parquet,
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
}
