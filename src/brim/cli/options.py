"""The arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.errors import InputError, Problem

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.")]
ConfigOrRun = Annotated[Path, typer.Argument(metavar="CONFIG_OR_RUN", help="A YAML file, or a run's folder.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys to override, such as trainer.epochs=1."),
]
DatasetOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--dataset", metavar="FILE", help="csv, tsv, json, jsonl, parquet, or a saved datasets folder."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def require_exists(path: Path) -> None:
    """Refuse a configuration or run that is not there."""
    if not path.exists():
        raise InputError(
            Problem(
                what=f"no such file or folder: {path}",
                expected="a YAML configuration, or the folder of a run",
                fix="check the path; it is taken from the current folder",
            )
        )
