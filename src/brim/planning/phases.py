"""The phases of a run before it begins: those that cannot be gone through as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from brim.batching.schedule import BatchSchedule
from brim.errors import Problem


def faults(schedule: BatchSchedule, *, num_rows: int, total_samples: int, where: str = "") -> list[Problem]:
    """Why a run cannot go through all of its phases; nothing where it can.

    num_rows: of an epoch, whose end no step crosses. where: the key that asks for the phases.
    One size for the whole run is never at fault: a batch that is larger than the data is all of it.
    """
    if schedule.is_constant:
        return []
    return [*_too_large(schedule, num_rows, where), *_never_begun(schedule, total_samples, where)]


def larger_than_an_epoch(who: str, size: int, *, num_rows: int, where: str) -> Problem:
    """A size that no step could have. who: asks for it."""
    return Problem(
        what=f"{who} asks for {size:,} rows a step, and there are {num_rows:,} to train on: a step ends with its "
        "epoch, so none would be that large",
        where=where,
        expected=f"at most {num_rows:,} rows a step",
        fix=f"lower it to {num_rows:,} or less, or train on more rows",
    )


def _too_large(schedule: BatchSchedule, num_rows: int, where: str) -> Iterator[Problem]:
    phases = enumerate(schedule.phases, start=1)
    found = [(number, phase.size) for number, phase in phases if phase.size > num_rows]
    if found:
        number, size = max(found, key=lambda each: each[1])
        who = f"phase {number:,} of {len(schedule.phases):,}"
        yield larger_than_an_epoch(who, size, num_rows=num_rows, where=where)


def _never_begun(schedule: BatchSchedule, total_samples: int, where: str) -> Iterator[Problem]:
    late = [number for number, phase in enumerate(schedule.phases, start=1) if phase.first_sample >= total_samples]
    if late:
        phase, after = schedule.phases[late[0] - 1], len(late) - 1
        more = f", nor are the {after:,} after it" if after > 1 else ", nor is the one after it" if after else ""
        yield Problem(
            what=f"phase {late[0]:,} of {len(schedule.phases):,}, {phase.size:,} rows a step after "
            f"{phase.first_sample:,} samples, is never reached, since the run ends after {total_samples:,}{more}",
            where=where,
            expected="phases that begin before the run ends",
            fix="let the batch move earlier, or train longer: trainer.epochs, train_steps or train_samples"
            + (f"; for a short trial, leave it out: {where}=null" if where else ""),
        )
