"""Run `brim train`, `brim plan` and `brim schema`.

`train` makes one run, from the data to the model's folder; `plan` shows how a configuration would train before anything
is loaded; `schema` prints the configuration's JSON Schema for editors.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brim.cli.options import (
    ConfigOrRun,
    DatasetOption,
    GpusOption,
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
from brim.errors import InputError
from brim.memory import MOST_GPUS, MOST_MADE_UP, MOST_TOKENS

if TYPE_CHECKING:
    from brim.distributed import Place
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
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, max=MOST_GPUS, metavar="N", help="Plan for so many of them, or CPU processes."),
    ] = None,
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
            gpus=gpus,
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
    gpus: GpusOption = None,
    replan: ReplanOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model and write a run folder. With `trainer.type: none`, evaluate the model on the splits."""
    if config.is_dir() and output_directory is None:
        output_directory = config
    file = config_file(config, trains=True)
    from brim.distributed import Place, watch_parent

    place = Place.of_environment()
    watch_parent()
    settings = open_config(config, overrides or [], dataset).config
    settings.backend.require_local()
    num_workers = settings.backend.trainer.num_workers
    if not place.is_launched:
        _in_processes(gpus, num_workers, trains=settings.trainer.type != "none")
    from brim.notes import status
    from brim.report import Screen

    with ExitStack() as stack:
        # The others' errors are shown, and nothing else of them.
        stream = None if place.is_first else stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        screen = stack.enter_context(Screen(stream, is_short=not verbose, hint="--verbose"))
        screen(status("starting"))
        for line in _notes(place, gpus, num_workers):
            screen(line)
        from brim.config import require_trust_said_again
        from brim.model import Model
        from brim.train import RunFolder
        from brim.train.checkpoints import CheckpointStore

        model = Model(file, overrides=overrides or [])
        if config.is_dir():
            assert output_directory is not None, "set above"
            # Where there are checkpoints but none is whole, the run does not start again.
            goes_on = resume and bool(CheckpointStore(RunFolder(output_directory).checkpoints).steps())
            require_trust_said_again(model.config, overrides or [], file, begins=not goes_on)
        with resumable():
            result = model.train(dataset, output_directory=output_directory, resume=resume, replan=replan, say=screen)
    if not place.is_first:
        return
    if as_json:
        print(json.dumps(_as_json(result)))
        return
    print_result([*_result_lines(result)])


def _result_lines(result: TrainResult) -> Iterator[tuple[str, str]]:
    """Yield what a training, or an evaluation without one, has come to."""
    folder = result.output_directory
    if folder is None:
        yield from metric_lines(result.metrics)
        return
    yield "done", result.steps_in_words
    yield from metric_lines(result.metrics)
    yield "run", str(folder)
    yield "model", str(folder / "model")
    data = "" if "test" in result.metrics else " --dataset FILE"
    yield "next", f"brim evaluate {shlex.quote(str(folder))}{data} --against-base"


def _in_processes(gpus: str | None, num_workers: int | None, *, trains: bool) -> None:
    """Run this command in as many processes as are asked for, and exit as they did; return where that is one.

    trains: else num_workers, which is of training, has no effect, and --gpus is refused.
    """
    from brim.distributed import launch_processes, num_processes

    if (number := num_processes(gpus, num_workers if trains else None)) == 1:
        return
    if not trains:
        what = "trainer.type: none evaluates, in one process"
        raise InputError(what=what, where=f"--gpus {gpus}", fix="leave out --gpus, or set trainer.type: finetune")
    with resumable():
        ended = launch_processes([sys.executable, *sys.orig_argv[1:]], number)
    if ended.message:
        print(ended.message, file=sys.stdout if ended.message.startswith('{"error"') else sys.stderr)
    sys.exit(ended.code)


def _notes(place: Place, gpus: str | None, num_workers: int | None) -> Iterator[str]:
    """Yield what is worth knowing of the processes: that they share a CPU, and that another number was asked for."""
    from brim.notes import Note

    if place.local_world_size > 1:
        import torch

        if not torch.cuda.is_available():
            yield Note(f"no GPU: {place.local_world_size} processes divide the CPU and its memory")
    here = str(place.local_world_size)
    # Where nobody has launched this process, Python's `train` says so of num_workers.
    asked = {"--gpus": gpus} | ({"backend.trainer.num_workers": num_workers} if place.is_launched else {})
    for key, value in asked.items():
        if value not in (None, "all") and str(value) != here:
            wins = "--gpus" if key != "--gpus" and gpus in ("all", here) else "the launcher's LOCAL_WORLD_SIZE"
            yield Note(f"{key}: {value} has no effect: {wins} wins, {here}")


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
