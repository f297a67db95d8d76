"""`brim verify-resume`: whether an interruption changes anything, tried on the user's own run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from brim.cli.options import DatasetOption, JsonOption, Overrides, require_exists


def verify_resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or not. It is only read.")],
    overrides: Overrides = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Steps that are made with and without interruptions.")
    ] = 4,
    from_step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--from-step",
            metavar="K",
            help="After which step, such as one before the batch size changes. Default: the newest checkpoint that "
            "leaves so many steps, else the first step.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave both runs in their temporary folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop, kill and resume copies of a run, and compare them with one that nobody disturbed."""
    require_exists(run, expected="the folder of a run")
    from brim.api.verify_resume import verify_resume as verify
    from brim.cli.resume_table import print_proof

    with _ends_as_ctrl_c():
        proof = verify(
            run,
            steps=steps,
            from_step=from_step,
            dataset=dataset,
            overrides=overrides or [],
            keep=keep,
        )
    if as_json:
        print(json.dumps(_finite(proof.as_dict())))
    else:
        print_proof(proof)
    if not proof.holds:
        raise typer.Exit(1)


@contextmanager
def _ends_as_ctrl_c() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed: the temporary folder and the process that trains go then, too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as with nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finite(value: Any) -> Any:
    """Infinity and NaN as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value - value != 0 else value
