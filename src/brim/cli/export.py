"""`brim export`: what a run has learned in a folder of its own, merged into its base where that is asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from brim.cli.options import DatasetOption, JsonOption, Overrides

if TYPE_CHECKING:
    from brim.api.results import ExportResult

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


def export(
    run: Run,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="A new or an empty folder.")],
    overrides: Overrides = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the base: a model for plain transformers.")
    ] = False,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dtype", metavar="NAME", help="Of merged weights: bf16, fp16 or fp32. Default: bf16."),
    ] = None,
    max_divergence: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--max-divergence",
            metavar="X",
            help="Refuse a merge that moves predictions by more nats a token. Default: a tenth of what the adapter "
            "does, from 0.001 to 0.01.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="There is no other than safetensors.")
    ] = "safetensors",
    as_json: JsonOption = False,
) -> None:
    """Write the adapter, the whole model, or with --merge both in one, with tokenizer, chat template and card."""
    from brim.cli.opening import open_model

    model = open_model(run, overrides or [])
    given: dict[str, Any] = {"dtype": dtype, "max_divergence": max_divergence, "dataset": dataset}
    result = model.export(output, merge=merge, format=output_format, **given)
    if as_json:
        print(json.dumps(_as_dict(result)))
        return
    print("\n".join(result.lines()))


def _as_dict(result: ExportResult) -> dict[str, Any]:
    return {
        "output": str(result.path),
        "kind": result.kind,
        "num_bytes": result.num_bytes,
        "divergence": asdict(result.divergence) if result.divergence is not None else None,
        "tokens_of": result.probe,
    }
