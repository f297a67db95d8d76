"""`brim evaluate`: a model's figures on a data set."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides
from brim.cli.say import say


def evaluate(
    config_or_run: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--split",
            metavar="NAME",
            help="train, validation, test or full (all rows). Default: full of --dataset, else test.",
        ),
    ] = None,
    texts: Annotated[
        bool,
        typer.Option(
            "--texts",
            help="Generate answers too, for BLEU, ROUGE (Latin letters and digits only) and exact match.",
        ),
    ] = False,
    rows: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--rows", metavar="FILE", help="Also write the figures of each row: parquet, jsonl or csv."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print loss, perplexity, token and sequence accuracy of a model on a data set, with the loss's 95% interval."""
    from pathlib import Path

    from brim.cli.opening import open_model

    model = open_model(config_or_run, overrides or [])
    from brim.api.model import check_split
    from brim.api.prediction import check_output, write_predictions
    from brim.cli.tables import finite_or_null, print_metrics

    if rows is not None:
        check_output(Path(rows))
    result = model.evaluate(dataset, split=check_split(split), with_texts=texts, say=say)
    if rows is not None:
        write_predictions(result.rows, Path(rows))
    interval = result.loss_interval
    if as_json:
        figures = {name: finite_or_null(value) for name, value in result.metrics.items()}
        ends = [finite_or_null(interval.low), finite_or_null(interval.high)]
        print(json.dumps({"split": result.split, **figures, "loss_interval": ends}))
        return
    print_metrics({result.split: result.metrics})
    print(f"loss, 95% interval over rows: {interval.low:.4f} to {interval.high:.4f}")
    if not texts:
        print("BLEU, ROUGE and exact match need generated answers: add --texts")
