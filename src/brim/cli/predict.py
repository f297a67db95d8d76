"""`brim predict`: one response for each row of a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides
from brim.cli.say import say


def predict(
    config_or_run: ConfigOrRun,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Where predictions go: .parquet, .jsonl or .csv.")
    ],
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--split", metavar="NAME", help="train, validation, test or full. Default: full (all rows)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate a response for each row and write them beside the input's columns, in the input's order."""
    from brim.cli.opening import open_model

    model = open_model(config_or_run, overrides or [])
    from brim.api.model import check_split
    from brim.cli.progress import RowProgress
    from brim.units import format_seconds

    rows = check_split(split) or "full"
    with RowProgress(sys.stderr) as progress:
        result = model.predict(dataset, output=output, split=rows, say=say, on_batch=progress.advance)
    frame = result.predictions
    num_stopped = int((frame["finish_reason"] == "stop").sum())
    num_tokens = int(frame["num_response_tokens"].sum())
    if as_json:
        told = {
            "output": str(result.output),
            "ledger": None if result.ledger is None else str(result.ledger),
            "num_rows": len(frame),
            "num_response_tokens": num_tokens,
            "num_stopped": num_stopped,
            "seconds": result.seconds,
        }
        print(json.dumps(told))
        return
    print(
        f"{len(frame):,} rows, {num_tokens:,} tokens in {format_seconds(result.seconds)}; "
        f"{num_stopped:,} ended by themselves, {len(frame) - num_stopped:,} at max_new_tokens"
    )
    print(f"predictions: {result.output}")
    if result.ledger is not None:
        print(f"cut or left out: {result.ledger}")
