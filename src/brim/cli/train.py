"""Run `brim train`, `brim plan` and `brim schema`.

`train` makes one run, from the data to the model's folder; `plan` shows how a configuration would train before anything
is loaded; `schema` prints the configuration's JSON Schema for editors.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brim.cli.options import (
    ConfigOrRun,
    DatasetOption,
    JsonOption,
    MemoryOption,
    Overrides,
    ReplanOption,
    VerboseOption,
    config_file,
    finite_or_null,
    metric_lines,
    open_config,
    print_plan,
    print_result,
    resumable,
)
from brim.memory import MOST_MADE_UP, MOST_TOKENS

if TYPE_CHECKING:
    from brim.workflows.runs import TrainResult


def plan(
    config_or_run: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows", min=1, max=MOST_MADE_UP, metavar="N", help="Instead of data: how many rows to train on."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence-length", min=2, max=MOST_TOKENS, metavar="N", help="Tokens of each of those rows."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="A device, such as t4, a100-80gb or cpu. Default: this machine's."
        ),
    ] = None,
    memory: MemoryOption = None,
    replan: ReplanOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how batches would be cut, and the memory and time of training, for each strategy that is left open.

    Reads the data, the tokenizer and the base model's config.json; needs no GPU and no weights. With --rows and
    --sequence-length, it reads config.json alone.
    """
    from brim.cli.memory import check_device, collect_seldom, device_memory

    collect_seldom()
    memory_bytes = device_memory(memory)
    check_device(device, memory_bytes)
    from brim.config import require_trust_said_again

    file = config_file(config_or_run)
    config = open_config(config_or_run, overrides or [], dataset).config
    if config_or_run.is_dir():
        require_trust_said_again(config, overrides or [], file, begins=True)
    from brim.report import Screen
    from brim.workflows.training import plan as make_plan

    with Screen(is_short=not (verbose or as_json), hint="--verbose") as screen:
        made = make_plan(
            file,
            dataset,
            num_rows=rows,
            sequence_length=sequence_length,
            overrides=overrides or [],
            device=device,
            memory_bytes=memory_bytes,
            replan=replan,
            say=screen,
        )
        print_plan(made, screen, title=Path(config.base_model).name, verbose=verbose, as_json=as_json)


def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from brim.config import json_schema

    print(json.dumps(json_schema(), indent=2))


def train(
    config: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    output_directory: Annotated[
        Path | None,
        typer.Option("--output-directory", metavar="DIR", help="The run's folder. Default: results/<CONFIG's name>."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in that folder; start a new one if there is none.")
    ] = False,
    replan: ReplanOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model and write a run folder. With `trainer.type: none`, evaluate the model on the splits."""
    if config.is_dir() and output_directory is None:
        output_directory = config
    file = config_file(config, trains=True)
    from brim.notes import status
    from brim.report import Screen

    open_config(config, overrides or [], dataset)
    with Screen(is_short=not verbose, hint="--verbose") as screen:
        screen(status("starting"))
        from brim.config import require_trust_said_again
        from brim.model import Model
        from brim.train import CheckpointStore, RunFolder
        from brim.workflows.runs import steps_in_words

        model = Model(file, overrides=overrides or [])
        if config.is_dir():
            assert output_directory is not None, "set above"
            # Where there are checkpoints but none is whole, the run does not start again.
            goes_on = resume and bool(CheckpointStore(RunFolder(output_directory).checkpoints).steps())
            require_trust_said_again(model.config, overrides or [], file, begins=not goes_on)
        with resumable():
            result = model.train(dataset, output_directory=output_directory, resume=resume, replan=replan, say=screen)
    if as_json:
        print(json.dumps(_as_json(result)))
        return
    folder, lines = result.output_directory, [*metric_lines(result.metrics)]
    if folder is not None:
        named = shlex.quote(str(folder))
        next_command = f"brim evaluate {named}{'' if 'test' in result.metrics else ' --dataset FILE'} --against-base"
        lines = [
            ("done", steps_in_words(result)),
            *lines,
            ("run", str(folder)),
            ("model", str(folder / "model")),
            ("next", next_command),
        ]
    print_result(lines)


def _as_json(result: TrainResult) -> dict[str, object]:
    folder = result.output_directory
    return {
        "output_directory": None if folder is None else str(folder),
        "num_steps": result.num_steps,
        "num_new_steps": result.num_new_steps,
        "best_step": result.best_step,
        "num_rows": result.num_rows,
        "seconds": result.seconds,
        "metrics": finite_or_null(result.metrics),
    }
