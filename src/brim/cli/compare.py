"""`brim compare`: several configurations on equal tokens, with several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from brim.cli.options import DatasetOption, JsonOption

if TYPE_CHECKING:
    from brim.api.compare_results import CompareResult


def compare(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="A YAML file, or a run's folder: what the others are compared to."),
    ],
    others: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time, on Python 3.10 too)
        typer.Argument(
            metavar="CONFIG_OR_KEY=VALUE",
            help="The other ones; and dotted keys to override in all of them, such as trainer.epochs=1.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, metavar="N", help="Runs of each: random_seed, random_seed + 1, …")
    ] = 3,
    output_directory: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output-directory", metavar="DIR", help="Default: results/<A>-vs-<B>."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in that folder; finished runs are not repeated.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train configurations with several seeds on equal tokens, and compare their final losses, steps, time, memory."""
    from brim.api.compare import compare as compared

    files, overrides = _apart([config, *(others or [])])
    result = compared(
        files,
        dataset=dataset,
        seeds=seeds,
        output_directory=output_directory,
        resume=resume,
        overrides=overrides,
    )
    if as_json:
        print(json.dumps(result.as_json(with_curves=False)))
    elif as_markdown:
        print(result.markdown(), end="")
    else:
        _print(result)
    if result.failed:
        raise typer.Exit(1)


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Configurations and overrides: what has an equals sign and is no file is an override."""
    overrides = [each for each in arguments if "=" in each and not Path(each).exists()]
    return [each for each in arguments if each not in overrides], overrides


def _print(result: CompareResult) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    for shown in result.tables():
        console.print(Text(shown.caption, style="bold"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, head in enumerate(shown.heads):
            table.add_column(Text(head), justify="left" if number < shown.num_texts else "right")
        for row in shown.rows:
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
    for note in result.notes:
        print(f"- {note}")
    print(f"folder: {result.output_directory}")
