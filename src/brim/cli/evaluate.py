"""Run `brim evaluate`: print a model's metrics on a data set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli.options import (
    ConfigOrRun,
    DatasetOption,
    JsonOption,
    Overrides,
    VerboseOption,
    finite_or_null,
    open_model,
    require_exists,
)
from brim.errors import InputError

if TYPE_CHECKING:
    from brim.infer.metrics import Interval
    from brim.workflows.runs import EvaluateResult


def evaluate(
    config_or_run: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    split: Annotated[
        str | None,
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
            help="Also generate answers, for BLEU, ROUGE (Latin letters and digits only) and exact match. A category's "
            "answers are always generated, for the accuracy of its labels.",
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN_OR_CONFIG", help="Evaluate this model, too, and compare the two."),
    ] = None,
    against_base: Annotated[
        bool, typer.Option("--against-base", help="The same, with the base model that the run was trained from.")
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="FILE", help="Also write the figures of each row: parquet, jsonl or csv."),
    ] = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print loss, perplexity, accuracies and, with --texts, text metrics of a model, each with its 95% interval."""
    other = _other(against, against_base=against_base)
    model = open_model(config_or_run, overrides or [], dataset)
    from brim.data import check_split
    from brim.report import Screen
    from brim.workflows.prediction import check_output, write_predictions

    if rows is not None:
        check_output(Path(rows))
    with Screen(is_short=not verbose, hint="--verbose") as screen:
        result = model.evaluate(dataset, split=check_split(split), with_texts=texts, against=other, say=screen)
    if rows is not None:
        write_predictions(result.rows, Path(rows))
    if as_json:
        print(json.dumps(finite_or_null(_as_json(result))))
        return
    if result.comparison is not None:
        print(f"{result.split}: ", end="")
    print("\n".join(result.lines(other="base" if against_base else "other")))
    if "exact_match" not in result.metrics:
        print("BLEU, ROUGE and exact match need generated answers: add --texts")


def _other(against: Path | None, *, against_base: bool) -> Path | str | None:
    if against is None:
        return "base" if against_base else None
    if against_base:
        raise InputError(what="--against and --against-base name two models", fix="leave out one of them")
    require_exists(against)
    return against if str(against) != "base" else against.resolve()


def _as_json(result: EvaluateResult) -> dict[str, Any]:
    comparison = result.comparison
    figures = {
        "split": result.split,
        **result.metrics,
        "loss_interval": _ends(result.intervals)["loss"],
        "intervals": _ends(result.intervals),
    }
    if comparison is None:
        return figures
    return figures | {
        "against": {
            "model": comparison.other,
            "num_rows": comparison.num_rows,
            "metrics": comparison.other_metrics,
            "intervals": _ends(comparison.other_intervals),
            "differences": comparison.differences,
            "difference_intervals": _ends(comparison.difference_intervals),
            "notes": list(comparison.notes),
        }
    }


def _ends(intervals: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: [each.low, each.high] for name, each in intervals.items()}
