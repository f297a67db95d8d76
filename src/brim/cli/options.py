"""The arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.errors import InputError, Problem

ConfigOrRun = Annotated[
    Path, typer.Argument(metavar="CONFIG_OR_RUN", help="A YAML file, or the folder of a run or of a base model.")
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys to override, such as trainer.epochs=1."),
]
DatasetOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="csv, tsv, json, jsonl, parquet, or a saved datasets folder; a glob in quotes. May be repeated.",
    ),
]
SplitOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--split", metavar="NAME", help="train, validation, test or full. Default: full (all rows)."),
]
ReplanOption = Annotated[bool, typer.Option("--replan", help="Plan anew, whatever earlier runs found out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def config_file(config_or_run: Path, *, trains: bool = False) -> Path:
    """The configuration that a verb was given: a file, the one in a run's folder, or a base model's folder itself.

    trains: a base model alone is not enough, since it does not say how.
    Raises InputError when there is none. Loading one refuses a folder that is neither.
    """
    require_exists(config_or_run)
    if trains and config_or_run.is_dir() and not is_run(config_or_run):
        raise InputError(
            Problem(
                what="this folder is not a run: it has no config.yaml",
                where=str(config_or_run),
                expected="a YAML configuration, or the folder of a run",
                fix=f"write a configuration with base_model: {config_or_run} and trainer: {{type: finetune}}"
                if (config_or_run / "config.json").is_file()
                else "name the run's folder, or the YAML file",
            )
        )
    return config_or_run / "config.yaml" if is_run(config_or_run) else config_or_run


def is_run(path: Path) -> bool:
    """Whether it is a folder with a configuration in it."""
    return path.is_dir() and (path / "config.yaml").is_file()


def require_exists(path: Path, *, expected: str = "a YAML configuration, or the folder of a run or of a model") -> None:
    """Refuse a configuration or run that is not there."""
    try:
        exists = path.exists()
    except OSError:  # a name that no file can have
        exists = False
    if not exists:
        raise InputError(
            Problem(
                what=f"no such file or folder: {path}",
                expected=expected,
                fix="check the path; it is taken from the current folder",
            )
        )
