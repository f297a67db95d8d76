"""Run `brim export` and `brim upload`: put a trained model into a folder of its own, or on the Hub.

`export` writes what a run has learned, merged into its base model if asked; `upload` sends a run's
model, or an exported folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from brim.cli.options import DatasetOption, JsonOption, Overrides, open_model, require_exists
from brim.units import format_count

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


def export(
    run: Run,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="A new or an empty folder.")],
    overrides: Overrides = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the base: a model for plain transformers.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="NAME", help="Data type of the merged weights: bf16, fp16 or fp32. Default: bf16."
        ),
    ] = None,
    max_divergence: Annotated[
        float | None,
        typer.Option(
            "--max-divergence",
            metavar="X",
            help="Refuse a merge that moves predictions by more nats a token than this. Default: a tenth of what the "
            "adapter moves them, at least 0.001 and at most 0.01.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    output_format: Annotated[str, typer.Option("--format", metavar="NAME", help="Only safetensors.")] = "safetensors",
    as_json: JsonOption = False,
) -> None:
    """Write the adapter, the whole model, or with --merge both in one, with tokenizer, chat template and card."""
    model = open_model(run, overrides or [])
    result = model.export(
        output, merge=merge, format=output_format, dtype=dtype, max_divergence=max_divergence, dataset=dataset
    )
    if not as_json:
        print("\n".join(result.lines()))
        return
    divergence = None if result.divergence is None else asdict(result.divergence)
    written = {"output": str(result.path), "kind": result.kind, "num_bytes": result.num_bytes}
    print(json.dumps({**written, "divergence": divergence, "tokens_of": result.probe}))


def upload(
    run_or_export: Annotated[
        Path, typer.Argument(metavar="RUN_OR_EXPORT", help="A run's folder, or one that `brim export` wrote.")
    ],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; created if there is none.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; an existing public one is refused.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="NAME", help="A branch; created if there is none. Default: main."),
    ] = None,
    commit_message: Annotated[
        str | None, typer.Option("--commit-message", metavar="TEXT", help="Default: Upload … by brim.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send the model and its card to the Hub, with the token in HF_TOKEN. Nothing else of the run is sent."""
    require_exists(run_or_export, expected="a run's folder, or one that `brim export` wrote")
    from brim.workflows.export import upload as send

    result = send(run_or_export, repository, private=private, revision=revision, commit_message=commit_message)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    files = format_count(len(result.files), "file")
    seen_by = "private" if result.private else "public"
    print(f"{files}, {result.num_bytes:,} bytes, {seen_by}: {', '.join(result.files)}")
    print(f"commit: {result.url}")
