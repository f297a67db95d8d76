"""`brim embed`: a vector for each row of a data set, or for each of its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides, SplitOption

_COLUMN = "embedding"


def embed(
    config_or_run: ConfigOrRun,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="A new .parquet file for the vectors.")],
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    split: SplitOption = None,
    layer: Annotated[
        str,
        typer.Option("--layer", metavar="NAME", help="last, the number of a decoder layer, or a module's name."),
    ] = "last",
    pooling: Annotated[
        str,
        typer.Option("--pooling", metavar="NAME", help="mean or last (token) of a row, or none: a vector a token."),
    ] = "mean",
    normalize: Annotated[bool, typer.Option("--normalize", help="Vectors of length 1.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what a layer makes of each row's prompt, in the input's order."""
    from brim.cli.opening import open_model

    model = open_model(config_or_run, overrides or [], dataset, with_answers=False)
    from brim.api.activations import check_pooling
    from brim.data.split import check_split
    from brim.units import format_count, format_seconds

    how = check_pooling(pooling)
    result = model.collect_activations(
        layer,
        dataset,
        split=check_split(split) or "full",
        pooling=how,
        normalize=normalize,
        output=output,
        columns=[_COLUMN],
    )
    (width,) = result.widths.values()
    num_rows, num_tokens = len(result.rows), int(result.num_tokens.sum())
    if as_json:
        told = {
            "output": str(result.output),
            "ledger": None if result.ledger is None else str(result.ledger),
            "layer": layer,
            "pooling": how,
            "normalized": normalize,
            "width": width,
            "num_rows": num_rows,
            "num_tokens": num_tokens,
            "seconds": result.seconds,
        }
        print(json.dumps(told))
        return
    rows, tokens = format_count(num_rows, "row"), format_count(num_tokens, "token")
    print(f"{rows}, {tokens}, {width:,} numbers a vector, in {format_seconds(result.seconds)}")
    print(f"embeddings: {result.output}")
    if result.ledger is not None:
        print(f"cut or left out: {result.ledger}")
