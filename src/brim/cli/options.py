"""Share what several verbs need: their arguments and options, their error messages, their notes and tables.

A verb's first argument is a configuration, or the folder of a run or a model; all that is wrong with it and its data is
reported together. The problems of a failed verb are printed plain and without secrets, as lines or, with --json, as
JSON. Results go to stdout; everything else that a person should read goes to stderr.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.config.text import mask_text, misspelt, yaml_files
from brim.errors import ConfigError, DataError, InputError, Problem
from brim.notes import wrapped

if TYPE_CHECKING:
    from brim.config import LoadedConfig
    from brim.config.schema import Config
    from brim.config.text import KeyPath
    from brim.model import Model
    from brim.planning import GenerationPlan, TrainingPlan
    from brim.report import Screen


_LONGEST_LINE = 1_000  # characters


def message(problems: Iterable[Problem]) -> str:
    """Write problems as lines."""
    return "\n".join(plain(str(problem)) for problem in problems)


@contextmanager
def resumable() -> Iterator[None]:
    """Name the command that continues what Ctrl-C stops in this context: the one that was typed, with --resume."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        typed = [each for each in sys.argv[1:] if each != "--resume"]
        end = typed.index("--") if "--" in typed else len(typed)
        fix = f"continue with `{shlex.join(['brim', *typed[:end], '--resume', *typed[end:]])}`"
        raise KeyboardInterrupt(
            *(replace(each, fix=fix) if isinstance(each, Problem) else each for each in stopped.args)
        ) from None


def json_message(kind: str, problems: Iterable[Problem], exit_code: int) -> str:
    """Write problems as one JSON object, on one line. kind: the error's class."""
    masked = [{name: mask_text(text) for name, text in asdict(problem).items()} for problem in problems]
    return json.dumps({"error": {"kind": kind, "exit_code": exit_code, "problems": masked}})


def plain(text: str) -> str:
    """Return a text without secrets, control characters and endless lines."""
    return "\n".join(_shortened(printable(line)) for line in mask_text(text).split("\n"))


def printable(text: str, *, kept: str = "") -> str:
    """Spell out a text's control characters, except those in `kept`."""
    if text.isprintable():
        return text
    plain = ((each.isprintable() or each in kept, each) for each in text)
    return "".join(each if is_plain else each.encode("unicode_escape").decode() for is_plain, each in plain)


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def open_model(
    config_or_run: Path,
    overrides: Sequence[str],
    dataset: str | Sequence[str] | None = None,
    *,
    with_answers: bool = True,
) -> Model:
    """Return the model of a configuration file, a run or a base model. dataset, with_answers: see `open_config`."""
    require_exists(config_or_run)
    if not is_run(config_or_run):
        open_config(config_or_run, overrides, dataset, with_answers=with_answers)
    from brim.model import Model

    return (Model.load if is_run(config_or_run) else Model)(config_or_run, overrides=overrides)


def open_config(
    config_or_run: Path, overrides: Sequence[str], dataset: str | Sequence[str] | None, *, with_answers: bool = True
) -> LoadedConfig:
    """Load the configuration of a file, or of a run.

    with_answers: whether the verb reads the data's answers, too.
    Raises ConfigError; or InputError if something is wrong with the data as well, as far as that can be known.
    """
    from brim.config import examine_config

    examined = examine_config(config_file(config_or_run), overrides)
    if not examined.problems:
        return examined.loaded()
    others = []
    if examined.config is not None:
        own = None if ("dataset",) in examined.faulty else examined.config.dataset
        data = own if dataset is None else dataset
        others = problems_with_data(examined.config, data, with_answers=with_answers, faulty=examined.faulty)
    raise (InputError if others else ConfigError)(*examined.problems, *others)


def problems_with_data(
    config: Config, dataset: str | Sequence[str] | None, *, with_answers: bool = True, faulty: Sequence[KeyPath] = ()
) -> list[Problem]:
    """Return what is wrong with the data, when something else keeps a verb from using it.

    faulty: keys of the configuration that are wrong and were replaced by their defaults.
    """
    if dataset is None:
        return []
    from brim.data import data_problems
    from brim.data.read import read

    trains = config.trainer.type != "none" or ("trainer", "type") in faulty
    try:
        source = read(dataset)
    except DataError as error:
        return list(error.problems)
    return data_problems(
        config,
        source,
        with_answers=with_answers and trains,  # an untrained base model needs no answers
        only=None if trains else "full",
        faulty=faulty,
    )


ConfigOrRun = Annotated[
    Path, typer.Argument(metavar="CONFIG_OR_RUN", help="A YAML file, or the folder of a run or of a base model.")
]


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted keys to override, such as trainer.epochs=1.")
]


DatasetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="csv, tsv, json, jsonl, parquet, or a saved datasets folder; a glob in quotes. May be repeated.",
    ),
]


SplitOption = Annotated[
    str | None,
    typer.Option("--split", metavar="NAME", help="train, validation, test or full. Default: full (all rows)."),
]


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show every note and table, not a card of eight lines.")
]


GpusOption = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N|all", help="Train on so many GPUs at once; without a GPU, in so many processes."),
]


ReplanOption = Annotated[bool, typer.Option("--replan", help="Plan again, ignoring what earlier runs found out.")]


MemoryOption = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="The memory of any other GPU, such as 14GiB.")
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def config_file(config_or_run: Path, *, trains: bool = False) -> Path:
    """Return the configuration that a verb was given: a file, the one of a run's folder, or a base model's folder.

    trains: a base model alone is not enough, since it does not say how to train.
    Raises InputError when there is none. Loading a configuration refuses a folder that is neither.
    """
    require_exists(config_or_run)
    if trains and config_or_run.is_dir() and not is_run(config_or_run):
        files = yaml_files(config_or_run)
        raise InputError(
            what="this folder is not a run: it has no config.yaml",
            where=str(config_or_run),
            expected="a YAML configuration, or the folder of a run",
            fix=f"write a configuration with base_model: {config_or_run} and trainer: {{type: finetune}}"
            if (config_or_run / "config.json").is_file()
            else f"name the run's folder, or the YAML file{', such as ' + str(files[0]) if files else ''}",
        )
    return config_or_run / "config.yaml" if is_run(config_or_run) else config_or_run


def is_run(path: Path) -> bool:
    """Return whether this is a folder with a configuration in it."""
    return path.is_dir() and (path / "config.yaml").is_file()


def require_exists(path: Path, *, expected: str = "a YAML configuration, or the folder of a run or of a model") -> None:
    """Refuse a configuration or run that is not there."""
    try:
        exists = path.exists()
    except OSError:  # a name that no file can have
        exists = False
    if not exists:
        there = {file.name: file for file in yaml_files(path.parent)}
        meant = misspelt(path.name, there) or misspelt(f"{path.name}.yaml", there)
        fix = f"did you mean {there[meant]}?" if meant else "check the path; it is relative to the current folder"
        raise InputError(what=f"no such file or folder: {path}", expected=expected, fix=fix)


def say(line: str) -> None:
    """Show a note, at once."""
    print(line, file=sys.stderr, flush=True)


def print_result(lines: Iterable[tuple[str, str]]) -> None:
    """Print a command's result: labels and texts. A text is never wrapped, since programs read it, too."""
    for label, text in lines:
        print(f"{label:<8}{text}")


def print_card(lines: Iterable[tuple[str, str]]) -> None:
    """Print a result that is a card: labels and texts, as wide as the screen."""
    width = shutil.get_terminal_size().columns
    for label, text in lines:
        print(wrapped(label, text, width=width))


def print_plan(
    plan: TrainingPlan | GenerationPlan, screen: Screen, *, title: str, verbose: bool, as_json: bool
) -> None:
    """Print a plan as a card, as tables, or as JSON. screen: has the notes that came before it, for the card."""
    if as_json:
        print(json.dumps(plan.as_dict()))
    elif verbose:
        from rich.console import Console

        from brim.report import plan_table

        Console(highlight=False).print(plan_table(plan, title=title))
    else:
        from brim.planning import short_plan

        for line in short_plan(plan):
            screen(line)
        print_card(screen.take_card())


def metric_lines(by_split: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Yield a line of figures for each split, the first of them with a label."""
    for number, (split, metrics) in enumerate(by_split.items()):
        shown = [(name, digits) for name, digits in _FIGURES.items() if name in metrics]
        figures = ", ".join(f"{name.replace('_', ' ')} {metrics[name]:.{digits}f}" for name, digits in shown)
        yield "" if number else "figures", f"{split}: {figures}"


_FIGURES = {"loss": 4, "perplexity": 3, "token_accuracy": 4, "category_accuracy": 4}


def finite_or_null(value: Any) -> Any:
    """Replace infinity and NaN by null in what becomes JSON, which has no word for them."""
    if isinstance(value, Mapping):
        return {name: finite_or_null(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
