"""Run `brim predict`, `brim embed` and `brim evaluate`: responses, vectors or metrics of a data set's rows.

`brim predict --plan` prints only the plan. `brim embed` writes a vector for each row, or for each of its tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli.memory import check_device, device_memory
from brim.cli.options import (
    ConfigOrRun,
    DatasetOption,
    JsonOption,
    Overrides,
    SplitOption,
    VerboseOption,
    finite_or_null,
    open_model,
    print_plan,
    print_result,
    require_exists,
    resumable,
)
from brim.errors import InputError
from brim.units import format_count, format_seconds

if TYPE_CHECKING:
    from brim.infer.metrics import Interval
    from brim.workflows.runs import EvaluateResult, PredictResult

_COLUMN = "embedding"


_Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N|all", help="Use so many GPUs, a process each; without a GPU, so many processes."),
]


def embed(
    config_or_run: ConfigOrRun,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="A new .parquet file for the vectors.")],
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    split: SplitOption = None,
    layer: Annotated[
        str, typer.Option("--layer", metavar="NAME", help="last, the number of a decoder layer, or a module's name.")
    ] = "last",
    pooling: Annotated[
        str, typer.Option("--pooling", metavar="NAME", help="mean or last (token) of a row, or none: a vector a token.")
    ] = "mean",
    normalize: Annotated[bool, typer.Option("--normalize", help="Vectors of length 1.")] = False,
    gpus: _Gpus = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the vectors that a layer computes from each row's prompt, in the input's order."""
    model = open_model(config_or_run, overrides or [], dataset, with_answers=False)
    from brim.data import check_split
    from brim.report import Screen
    from brim.workflows.prediction import check_pooling

    how = check_pooling(pooling)
    with Screen(is_short=not verbose, hint="--verbose") as screen, redirect_stdout(sys.stderr):  # see predict
        result = model.collect_activations(
            layer,
            dataset,
            split=check_split(split) or "full",
            pooling=how,
            normalize=normalize,
            output=output,
            columns=[_COLUMN],
            gpus=gpus,
            say=screen,
        )
    (width,) = result.widths.values()
    num_rows, num_tokens = len(result.rows), int(result.num_tokens.sum())
    if as_json:
        fields = {"layer": layer, "pooling": how, "normalized": normalize, "width": width}
        counts = {"num_rows": num_rows, "num_tokens": num_tokens, "seconds": result.seconds}
        print(json.dumps({**_files(result.output, result.ledger), **fields, **counts}))
        return
    rows, tokens = format_count(num_rows, "row"), format_count(num_tokens, "token")
    line = f"{rows}, {tokens}, {format_count(width, 'number')} a vector, in {format_seconds(result.seconds)}"
    print_result([("done", line), ("written", str(result.output)), *_left_out(result.ledger)])


_Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="COLUMN", help="The column that identifies a row. Default: rows are identified by their order."
    ),
]


_OnError = Annotated[
    str | None,
    typer.Option(
        "--on-error", metavar="WHAT", help="Rows that cannot be used: stop, or skip and name them in the ledger."
    ),
]


_OnOverlong = Annotated[
    str | None,
    typer.Option(
        "--on-overlong",
        metavar="WHAT",
        help="Prompts that are too long: error, truncate_left (keeps their ends), or skip.",
    ),
]


_Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="With --plan: a device, such as t4 or cpu. Default: this machine's."),
]


_Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="With --plan: the memory of any other GPU, such as 14GiB."),
]


_SHOWN = 10  # labels


_Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Where the predictions go: .parquet, .jsonl or .csv.")
]


_Resume = Annotated[
    bool, typer.Option("--resume", help="Continue what was begun for this output, also with rows added since.")
]


_Plan = Annotated[
    bool, typer.Option("--plan", help="Show how many rows would run together, memory and time; load no weights.")
]


def predict(
    config_or_run: ConfigOrRun,
    output: _Output = None,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    split: SplitOption = None,
    resume: _Resume = False,
    scores: Annotated[bool, typer.Option("--scores", help="Add the log-probability of each response.")] = False,
    key: _Key = None,
    on_error: _OnError = None,
    on_overlong: _OnOverlong = None,
    gpus: _Gpus = None,
    plan: _Plan = False,
    device: _Device = None,
    memory: _Memory = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate a response for each row and write them beside the input's columns, in the input's order."""
    _check_flags(output, plan=plan, device=device, memory=memory)
    model = open_model(config_or_run, overrides or [], dataset, with_answers=False)
    from brim.data import check_split
    from brim.report import Screen
    from brim.workflows.prediction import Wanted, check_policies, num_members, plan_prediction

    how: dict[str, Any] = {"split": check_split(split) or "full", "scores": scores, "key": key}
    how["on_error"], how["on_overlong"] = check_policies(on_error, on_overlong)
    if plan:
        memory_bytes = device_memory(memory)
        check_device(device, memory_bytes)
        members = num_members(model.config, gpus, is_here=device is None and memory_bytes is None)
        wanted = Wanted(output=None, num_members=members, is_unnamed=dataset is None, **how)
        with Screen(is_short=not (verbose or as_json), hint="--verbose") as screen:
            made = plan_prediction(
                model.config, dataset, wanted, device=device, memory_bytes=memory_bytes, notes=model.notes, say=screen
            )
            print_plan(made, screen, title=Path(model.config.base_model).name, verbose=verbose, as_json=as_json)
        return
    # Ray prints there when a worker of its own dies.
    with Screen(is_short=not verbose, hint="--verbose") as screen, resumable(), redirect_stdout(sys.stderr):
        result = model.predict(dataset, output=output, resume=resume, keep_weights=False, gpus=gpus, say=screen, **how)
    if as_json:
        print(json.dumps(_as_json(result)))
    else:
        print_result(_lines(result))


def _check_flags(output: Path | None, *, plan: bool, device: str | None, memory: str | None) -> None:
    """Refuse flags that contradict each other, or lack one another, before anything slow is imported."""
    if not plan and output is None:
        raise InputError(
            what="no output is named",
            where="command line",
            fix="say where predictions go with --output FILE, or see what they need with --plan",
        )
    if not plan and (device is not None or memory is not None):
        raise InputError(
            what="--device and --memory are for --plan: predictions run on this machine's device",
            where="command line",
            fix="leave them out, or add --plan",
        )


def _as_json(result: PredictResult) -> dict[str, object]:
    from brim.workflows.prediction import summary_path

    return {
        **_files(result.output, result.ledger),
        "summary": None if result.output is None else str(summary_path(result.output)),
        "num_rows": result.summary["num_rows"],
        "num_new_rows": result.num_new_rows,
        "num_response_tokens": result.summary["num_response_tokens"],
        "num_stopped": result.summary["finish_reasons"].get("stop", 0),
        "seconds": result.seconds,
    }


def _files(output: Path | None, ledger: Path | None) -> dict[str, object]:
    return {"output": str(output), "ledger": None if ledger is None else str(ledger)}


def _lines(result: PredictResult) -> list[tuple[str, str]]:
    summary = result.summary
    num_rows, num_stopped = summary["num_rows"], summary["finish_reasons"].get("stop", 0)
    rows = f"{format_count(num_rows, 'row')}, {format_count(summary['num_response_tokens'], 'token')}"
    ended = f"{num_stopped:,} ended by themselves, {num_rows - num_stopped:,} at max_new_tokens"
    done = f"{rows} in {format_seconds(result.seconds)}; {ended}"
    if result.num_new_rows < num_rows:
        new, before = format_count(result.num_new_rows, "row"), num_rows - result.num_new_rows
        done = f"{new} in {format_seconds(result.seconds)}, {before:,} were there before; {rows} in all: {ended}"
    labels = [("labels", _counted(summary["category"]["labels"]))] if "category" in summary else []
    return [("done", done), *labels, ("written", str(result.output)), *_left_out(result.ledger)]


def _left_out(ledger: Path | None) -> list[tuple[str, str]]:
    return [] if ledger is None else [("ledger", f"{ledger} (rows that were cut or left out)")]


def _counted(labels: Mapping[str, int]) -> str:
    """Name the most frequent labels with their numbers."""
    shown = [f"{label} {count:,}" for label, count in list(labels.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else "")


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
    gpus: _Gpus = None,
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
    with Screen(is_short=not verbose, hint="--verbose") as screen, redirect_stdout(sys.stderr):  # see predict
        how: dict[str, Any] = {"with_texts": texts, "against": other, "gpus": gpus, "say": screen}
        result = model.evaluate(dataset, split=check_split(split), **how)
    if rows is not None:
        write_predictions(result.rows, Path(rows))
    if as_json:
        print(json.dumps(finite_or_null(_metrics_as_json(result))))
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


def _metrics_as_json(result: EvaluateResult) -> dict[str, Any]:
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
