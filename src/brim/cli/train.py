"""`brim train`: one run, from data to the model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides, ReplanOption, config_file


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
    replan: ReplanOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every note before the first step, not eight lines.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model and write a run folder. With `trainer.type: none`, evaluate the model on the splits."""
    if config.is_dir() and output_directory is None:
        output_directory = config
    file = config_file(config, trains=True)
    from brim.cli.opening import open_config
    from brim.cli.tables import finite_or_null, print_metrics
    from brim.notes import status
    from brim.report.screen import Screen

    open_config(config, overrides or [], dataset)
    with Screen(is_short=not verbose, hint="--verbose") as screen:
        screen(status("starting"))
        from brim.api.model import Model
        from brim.api.results import steps_in_words
        from brim.config import require_trust_said_again
        from brim.train.checkpoint import CheckpointStore
        from brim.train.run_folder import RunFolder

        model = Model(file, overrides=overrides or [])
        if config.is_dir():
            assert output_directory is not None, "set above"
            # Where there are checkpoints and none is whole, the run does not begin anew.
            goes_on = resume and bool(CheckpointStore(RunFolder(output_directory).checkpoints).steps())
            require_trust_said_again(model.config, overrides or [], file, begins=not goes_on)
        result = model.train(dataset, output_directory=output_directory, resume=resume, replan=replan, say=screen)
    folder = result.output_directory
    if as_json:
        told = {
            "output_directory": None if folder is None else str(folder),
            "num_steps": result.num_steps,
            "num_new_steps": result.num_new_steps,
            "best_step": result.best_step,
            "num_rows": result.num_rows,
            "seconds": result.seconds,
            "metrics": {
                split: {name: finite_or_null(value) for name, value in metrics.items()}
                for split, metrics in result.metrics.items()
            },
        }
        print(json.dumps(told))
        return
    print_metrics(result.metrics)
    if folder is not None:
        print(steps_in_words(result))
        print(f"run folder: {folder}")
        print(f"model:      {folder / 'model'}")
