"""`brim predict`: one response for each row of a data set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, Overrides


def predict(
    config_or_run: ConfigOrRun,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Where predictions go: .parquet, .jsonl or .csv.")
    ],
    overrides: Overrides = None,
    dataset: DatasetOption = None,
) -> None:
    """Generate a response for each row and write them beside the input's columns, in the input's order."""
    from brim.cli.opening import open_model

    model = open_model(config_or_run, overrides or [])
    from brim.cli.progress import RowProgress
    from brim.units import format_seconds

    with RowProgress(sys.stderr) as progress:
        result = model.predict(
            dataset, output=output, say=lambda line: print(line, file=sys.stderr), on_batch=progress.advance
        )
    frame = result.predictions
    stopped = int((frame["finish_reason"] == "stop").sum())
    tokens = int(frame["num_response_tokens"].sum())
    print(
        f"{len(frame):,} rows, {tokens:,} tokens in {format_seconds(result.seconds)}; "
        f"{stopped:,} ended by themselves, {len(frame) - stopped:,} at max_new_tokens"
    )
    print(f"predictions: {result.output}")
