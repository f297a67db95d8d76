"""`brim upload`: a run's model, or an exported folder, on the Hub."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer

from brim.cli.options import JsonOption, require_exists
from brim.units import format_count


def upload(
    run_or_export: Annotated[
        Path, typer.Argument(metavar="RUN_OR_EXPORT", help="A run's folder, or one that `brim export` wrote.")
    ],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; made if there is none.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make it private; a public one of this name is refused.")
    ] = False,
    revision: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--revision", metavar="NAME", help="A branch; made if there is none. Default: main."),
    ] = None,
    commit_message: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--commit-message", metavar="TEXT", help="Default: Upload … by brim."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send the model and its card to the Hub, with the token in HF_TOKEN. Nothing else of the run is sent."""
    require_exists(run_or_export, expected="a run's folder, or one that `brim export` wrote")
    from brim.api.upload import upload as send

    result = send(run_or_export, repository, private=private, revision=revision, commit_message=commit_message)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    files = format_count(len(result.files), "file")
    seen_by = "private" if result.private else "public"
    print(f"{files}, {result.num_bytes:,} bytes, {seen_by}: {', '.join(result.files)}")
    print(f"commit: {result.url}")
