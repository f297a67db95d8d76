"""Rules of `trainer.learning_rate_scheduler`: warm-up and decay that fit into the run and do not overlap."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from brim.config.batch_rules import unreadable_duration
from brim.config.findings import Finding
from brim.config.places import Path
from brim.config.schema import Config, FinetuneTrainer, LearningRateScheduler
from brim.units import parse_duration

SCHEDULE: Path = ("trainer", "learning_rate_scheduler")
_UNTOUCHED = LearningRateScheduler()


def learning_rate_rules(config: Config) -> Iterator[Finding]:
    """Every contradiction between the keys of the learning rate's course."""
    if not isinstance(config.trainer, FinetuneTrainer):
        return
    schedule, rate = config.trainer.learning_rate_scheduler, config.trainer.learning_rate
    yield from _lengths(schedule)
    yield from _overlap(schedule)
    if rate != "auto" and schedule.eta_min > rate:
        yield Finding(
            paths=((*SCHEDULE, "eta_min"), ("trainer", "learning_rate")),
            what=f"learning_rate_scheduler.eta_min {schedule.eta_min:g} is above trainer.learning_rate {rate:g}",
            expected="a lower end for the decay than its start",
        )


def _lengths(schedule: LearningRateScheduler) -> Iterator[Finding]:
    for stretch in ("warmup", "decay"):
        length, share = f"{stretch}_length", f"{stretch}_fraction"
        given = getattr(schedule, length)
        if given is None:
            continue
        yield from unreadable_duration((*SCHEDULE, length), given)
        if getattr(schedule, share) != getattr(_UNTOUCHED, share):
            yield Finding(
                paths=((*SCHEDULE, length), (*SCHEDULE, share)),
                what=f"learning_rate_scheduler.{length} and {share} are both given",
                fix="keep one of them",
            )
    if schedule.decay_length is not None and schedule.decay != "wsd":
        yield Finding(
            paths=((*SCHEDULE, "decay_length"), (*SCHEDULE, "decay")),
            what=f"learning_rate_scheduler.decay_length is how long wsd falls, and decay is {schedule.decay or 'null'}",
            fix="set trainer.learning_rate_scheduler.decay: wsd, or remove decay_length",
        )


def _overlap(schedule: LearningRateScheduler) -> Iterator[Finding]:
    """Lengths in other units than shares are compared once the run's length is known."""
    if schedule.decay != "wsd":
        return
    warmup, decay = _share(schedule, "warmup"), _share(schedule, "decay")
    if warmup is not None and decay is not None and warmup[1] + decay[1] > 1:
        keys = [f"{stretch}_{kind}" for stretch in ("warmup", "decay") for kind in ("length", "fraction")]
        yield Finding(
            paths=(*((*SCHEDULE, name) for name in keys), (*SCHEDULE, "decay")),
            what=f"{warmup[0]} and {decay[0]} overlap",
            expected="a sum of at most 1",
        )


def _share(schedule: LearningRateScheduler, stretch: str) -> tuple[str, Fraction] | None:
    """A stretch in words and as a share of the run; None where its length is in another unit, or cannot be read."""
    length, share = getattr(schedule, f"{stretch}_length"), getattr(schedule, f"{stretch}_fraction")
    if length is None:
        return f"{stretch}_fraction {share:g}", Fraction(repr(share))
    try:
        duration = parse_duration(length)
    except ValueError:
        return None
    return (f"{stretch}_length {duration}", duration.amount) if duration.unit == "dur" else None
