"""`brim train`: one run, from data to the model folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, Overrides, config_file


def train(
    config: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    output_directory: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output-directory", metavar="DIR", help="The run's folder. Default: results/<CONFIG's name>."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in that folder; start anew if there is none.")
    ] = False,
) -> None:
    """Train a model and write a run folder. With `trainer.type: none`, evaluate the model on the splits."""
    if config.is_dir() and output_directory is None:
        output_directory = config
    file = config_file(config)
    from brim.api.model import Model
    from brim.cli.progress import TrainProgress
    from brim.cli.tables import print_metrics
    from brim.units import format_seconds

    model = Model(file, overrides=overrides or [])
    result = model.train(
        dataset, output_directory=output_directory, resume=resume, observer=TrainProgress(sys.stderr), say=print
    )
    print_metrics(result.metrics)
    if result.output_directory is not None:
        print(f"{result.num_steps:,} steps in {format_seconds(result.seconds)}")
        print(f"run folder: {result.output_directory}")
        print(f"model:      {result.output_directory / 'model'}")
