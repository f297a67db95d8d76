"""`brim plan`: how a configuration would train, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides, ReplanOption, config_file
from brim.memory.bounds import MOST_MADE_UP, MOST_TOKENS


def plan(
    config_or_run: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    rows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--rows", min=1, max=MOST_MADE_UP, metavar="N", help="Instead of data: rows to train on."),
    ] = None,
    sequence_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--sequence-length", min=2, max=MOST_TOKENS, metavar="N", help="Tokens of each of those rows."),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--device", metavar="NAME", help="Such as t4 or a100-80gb, or cpu. Default: the one at hand."),
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--memory", metavar="SIZE", help="Of any other GPU, such as 14GiB."),
    ] = None,
    replan: ReplanOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show how training would be cut, what it would take and how long, for each way that is left open.

    Reads the data, the tokenizer and the base model's config.json; needs no GPU and no weights. With --rows and
    --sequence-length it reads config.json alone.
    """
    from brim.cli.memory_request import check_device, collect_seldom, device_memory

    collect_seldom()
    memory_bytes = device_memory(memory)
    check_device(device, memory_bytes)
    from brim.cli.opening import open_config
    from brim.config import require_trust_said_again

    file = config_file(config_or_run)
    config = open_config(config_or_run, overrides or [], dataset).config
    if config_or_run.is_dir():
        require_trust_said_again(config, overrides or [], file, begins=True)
    from brim.api.plan import plan as make_plan

    made = make_plan(
        file,
        dataset,
        num_rows=rows,
        sequence_length=sequence_length,
        overrides=overrides or [],
        device=device,
        memory_bytes=memory_bytes,
        replan=replan,
    )
    if as_json:
        print(json.dumps(made.as_dict()))
        return
    from rich.console import Console

    from brim.report.plan_table import plan_table

    Console(highlight=False).print(plan_table(made, title=Path(config.base_model).name))
