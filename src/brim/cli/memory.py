"""`brim memory`: what a configuration takes on a GPU, without the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.cli.options import ConfigOrRun, JsonOption, Overrides, config_file
from brim.memory.bounds import MOST_GPUS, MOST_ROWS, MOST_TOKENS


def memory(
    config_or_run: ConfigOrRun,
    overrides: Overrides = None,
    batch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--batch-size", min=1, max=MOST_ROWS, metavar="N", help="Rows at once. Default: the configuration's."
        ),
    ] = None,
    sequence_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--sequence-length",
            min=2,
            max=MOST_TOKENS,
            metavar="N",
            help="Tokens of each row; of each prompt with --phase generate.",
        ),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--device", metavar="NAME", help="Such as t4 or a100-80gb. Default: the GPU at hand."),
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--memory", metavar="SIZE", help="Of any other GPU, such as 14GiB."),
    ] = None,
    phase: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--phase", metavar="NAME", help="load, train, evaluate or generate. Default: train, if it trains."
        ),
    ] = None,
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, max=MOST_GPUS, metavar="N", help="GPUs that share the model (FSDP).")
    ] = 1,
    offload: Annotated[
        str, typer.Option("--offload", metavar="NAME", help="Kept on the CPU: none, optimizer or weights.")
    ] = "none",
    compare: Annotated[
        bool, typer.Option("--compare", help="Full, 16-bit, LoRA, 8-bit and 4-bit training side by side.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also by hand: each part as a worked sum.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run it on the device at hand, on random rows.")
    ] = False,
    layers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--layers", min=1, metavar="N", help="Measure N and 2 N layers, and extrapolate to all."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--steps", min=1, metavar="N", help="Measure N steps over time; five or more show a leak."),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", metavar="FILE", help="Draw it: .png, or .html with the numbers."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the GPU memory of a run from its base model's config.json. Needs no GPU, no weights and no data."""
    from brim.cli.memory_request import (
        MemoryRequest,
        check_request,
        collect_seldom,
        device_memory,
        named_offload,
        named_phase,
    )

    if not measure:
        collect_seldom()
    request = MemoryRequest(
        batch_size=batch_size,
        sequence_length=sequence_length,
        device=device,
        memory_bytes=device_memory(memory),
        phase=named_phase(phase),
        world_size=world_size,
        offload=named_offload(offload),
        compare=compare,
        explain=explain,
        measure=measure,
        layers=layers,
        steps=steps,
        plot=plot,
        as_json=as_json,
    )
    check_request(request)
    from brim.cli.memory_run import run
    from brim.config import load_config, require_trust_said_again

    loaded = load_config(config_file(config_or_run), overrides or [])
    if config_or_run.is_dir():
        require_trust_said_again(loaded.config, overrides or [], config_or_run / "config.yaml")
    run(request, loaded)
