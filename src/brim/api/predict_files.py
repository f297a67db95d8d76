"""The files of a prediction beside its output: the ledger of rows that were cut or left out, and the summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.api.predict_job import JobFolder, check_job
from brim.api.prediction import require_writable
from brim.data import Ledger
from brim.data.ledger import SCHEMA as LEDGER_SCHEMA
from brim.errors import OutputError, Problem
from brim.files import write_text, writing

_MARK = "num_response_tokens"  # in every summary


def ledger_path(output: Path) -> Path:
    """Where it stands which rows were cut or left out of these predictions."""
    return output.with_name(f"{output.name}.ledger.parquet")


def summary_path(output: Path) -> Path:
    """Where it stands what these predictions consist of, and what they took."""
    return output.with_name(f"{output.name}.summary.json")


def check_place(output: Path, *, resume: bool) -> None:
    """Refuse, before any work is done, a place that cannot be written, or holds what must not be written over.

    Raises OutputError.
    """
    require_writable(output)
    check_job(output, resume=resume)
    if not JobFolder(output).path.exists():
        for path, is_own in ((ledger_path(output), _is_ledger), (summary_path(output), _is_summary)):
            if (path.exists() or path.is_symlink()) and not is_own(path):
                raise OutputError(
                    Problem(
                        what="the output file exists already; nothing was changed", where=str(path), fix="name another"
                    )
                )


def write_ledger(ledger: Ledger, output: Path) -> Path | None:
    """Write the ledger where it has entries, and take away an earlier one where it has none. Returns its path."""
    path = ledger_path(output)
    if len(ledger):
        ledger.write(path)
        return path
    with writing("the ledger", path):
        path.unlink(missing_ok=True)
    return None


def write_summary(summary: Mapping[str, Any], output: Path) -> None:
    """Write the summary, whole or not at all."""
    path = summary_path(output)
    with writing("the summary", path):
        write_text(path, json.dumps(summary, indent=1) + "\n")


def read_summary(output: Path) -> Mapping[str, Any] | None:
    """The summary beside an output; None where there is none."""
    path = summary_path(output)
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and _MARK in summary else None


def _is_ledger(path: Path) -> bool:
    """Whether a file is a ledger of an output that is gone."""
    try:
        return bool(pq.read_schema(path).names == LEDGER_SCHEMA.names)
    except (pa.ArrowInvalid, OSError):
        return False


def _is_summary(path: Path) -> bool:
    output = path.with_name(path.name.removesuffix(".summary.json"))
    return not path.is_symlink() and read_summary(output) is not None
