"""What is said where a training run ends for want of memory, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from brim.batching.second_try import first_line
from brim.errors import OutOfMemoryError, Problem
from brim.train.memory_advice import Settings, for_a_row, for_an_update
from brim.units import format_bytes, format_count


def failure_event(where: str, message: str) -> dict[str, Any]:
    """The line in metrics.jsonl of an allocation that failed, and was tried once more."""
    return {"event": "oom", "where": where, "message": message}


def of_a_row(
    error: OutOfMemoryError, *, step: int, predicted_bytes: int | None, cap_bytes: int | None, settings: Settings
) -> OutOfMemoryError:
    """The error that names a row which runs out of memory by itself, with its place and what would help."""
    problem = error.problems[0]
    predicted = "" if predicted_bytes is None else f"; predicted: {format_bytes(predicted_bytes)}"
    cap = "" if cap_bytes is None else f"; limit of a micro-batch: {format_bytes(cap_bytes)}"
    return OutOfMemoryError(
        replace(problem, what=f"{problem.what}{predicted}{cap}", where=f"step {step:,}", fix=for_a_row(settings))
    )


def at_the_norm(error: Exception, *, step: int, settings: Settings) -> OutOfMemoryError:
    """The gradient was there, and its norm, or clipping it, ran out of memory: the update had not begun."""
    return OutOfMemoryError(
        Problem(
            what=f"memory ran out when the gradient was clipped: {first_line(error)}",
            where=f"step {step:,}",
            fix=for_an_update(settings),
        )
    )


def in_the_update(error: Exception, *, step: int, saved_step: int | None, settings: Settings) -> OutOfMemoryError:
    """The optimizer's own step. saved_step: of the newest checkpoint; None: there is none."""
    return OutOfMemoryError(
        Problem(
            what="memory ran out in the optimizer's own step; the weights, which may be half updated, are not saved: "
            + first_line(error),
            where=f"step {step:,}",
            fix=f"{for_an_update(settings)}. {_left(step - 1, saved_step)}",
        )
    )


def while_saving(error: Exception, *, step: int, saved_step: int | None) -> OutOfMemoryError:
    """The checkpoint after this step. saved_step: of the newest one that was there before."""
    return OutOfMemoryError(
        Problem(
            what=f"memory ran out twice when the checkpoint of step {step:,} was written: {first_line(error)}",
            fix=f"free memory on this machine. {_left(step, saved_step)}",
        )
    )


def with_checkpoint(error: OutOfMemoryError, *, step: int) -> OutOfMemoryError:
    """The error, saying that all that had been learned is saved."""
    kept = f"the checkpoint of step {step:,} holds all that was learned" if step else "nothing had been learned yet"
    first, *others = error.problems
    return OutOfMemoryError(replace(first, fix=f"{first.fix}. {kept[0].upper()}{kept[1:]}"), *others)


def _left(done: int, saved_step: int | None) -> str:
    """What is left of a number of steps that were done."""
    if not done:
        return "Nothing had been learned yet"
    if saved_step is None:
        return f"There is no checkpoint yet: what was learned in {format_count(done, 'step')} is lost"
    if saved_step == done:
        return f"The checkpoint of step {saved_step:,} holds all that was learned before; --resume continues from it"
    again = format_count(done - saved_step, "step")
    return f"--resume continues from the checkpoint of step {saved_step:,}, and does {again} again"
