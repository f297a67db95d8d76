"""Check how batch size and learning rate move: which keys move them, which sizes they name, what sets the run's length.

`trainer.batch_schedule`, a table of steps of the effective batch written as text, is parsed here. Warm-up and decay of
`trainer.learning_rate_scheduler` fit into the run and do not overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from brim.config.findings import Finding
from brim.config.schema import FinetuneTrainer, LearningRateScheduler, OptimizerConfig
from brim.config.text import KeyPath, dotted
from brim.units import Duration, DurationUnit, parse_duration

SCHEDULE: KeyPath = ("trainer", "learning_rate_scheduler")


_UNTOUCHED = LearningRateScheduler()


def learning_rate_rules(trainer: FinetuneTrainer) -> Iterator[Finding]:
    """Find contradictions between the keys of the learning rate's schedule."""
    schedule, rate = trainer.learning_rate_scheduler, trainer.learning_rate
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
            yield Finding.of_both((*SCHEDULE, length), (*SCHEDULE, share))
    if schedule.decay_length is not None and schedule.decay != "wsd":
        yield Finding(
            paths=((*SCHEDULE, "decay_length"), (*SCHEDULE, "decay")),
            what=f"learning_rate_scheduler.decay_length is how long wsd falls, and decay is {schedule.decay or 'null'}",
            fix="set trainer.learning_rate_scheduler.decay: wsd, or remove decay_length",
        )


def _overlap(schedule: LearningRateScheduler) -> Iterator[Finding]:
    """Find a warm-up and a decay that overlap; lengths that are not shares are compared once the run's is known."""
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
    """Return a stretch in words and as a share of the run; None if its length has another unit or cannot be read."""
    length, share = getattr(schedule, f"{stretch}_length"), getattr(schedule, f"{stretch}_fraction")
    if length is None:
        return f"{stretch}_fraction {share:g}", Fraction(repr(share))
    try:
        duration = parse_duration(length)
    except ValueError:
        return None
    return (f"{stretch}_length {duration}", duration.amount) if duration.unit == "dur" else None


def unreadable_duration(path: KeyPath, text: str | None) -> Iterator[Finding]:
    """Find a duration that cannot be read."""
    try:
        if text is not None:
            parse_duration(text)
    except ValueError as error:
        yield Finding(paths=(path,), what=f"{dotted(path)}: {error}")


WAYS = ("batch_rampup", "batch_schedule", "batch_increase_function", "batch_adaptation")


def ways_given(trainer: FinetuneTrainer) -> list[KeyPath]:
    """Return the keys that are set and move the batch; a valid configuration has at most one."""
    return [("trainer", name) for name in WAYS if getattr(trainer, name) is not None]


def moves_batch(trainer: FinetuneTrainer) -> bool:
    """Return whether the effective batch moves."""
    return bool(ways_given(trainer))


def named_sizes(trainer: FinetuneTrainer) -> Iterator[tuple[KeyPath, int]]:
    """Yield the sizes that keys name for a run, except `effective_batch_size` and what a function adds.

    A `batch_schedule` that cannot be read has none.
    """
    ramp, limits = trainer.batch_rampup, trainer.batch_adaptation
    if trainer.initial_effective_batch_size is not None:
        yield ("trainer", "initial_effective_batch_size"), trainer.initial_effective_batch_size
    if ramp is not None and ramp.initial is not None:
        yield ("trainer", "batch_rampup", "from"), ramp.initial
    if trainer.batch_schedule is not None:
        sizes = _sizes_of_table(trainer.batch_schedule)
        if sizes:
            yield ("trainer", "batch_schedule"), max(sizes)
    if limits is not None:
        yield ("trainer", "batch_adaptation", "max"), limits.max


def implied_effective_rows(trainer: FinetuneTrainer) -> tuple[int, str] | None:
    """Return what `effective_batch_size: auto` is if the batch moves, and why; None if the keys do not say."""
    if trainer.batch_schedule is not None:
        sizes = _sizes_of_table(trainer.batch_schedule)
        return (sizes[-1], "the last size of trainer.batch_schedule") if sizes else None
    if trainer.batch_adaptation is not None:
        return trainer.batch_adaptation.min, "trainer.batch_adaptation.min, with which training begins"
    return None


def takes_default_epochs(trainer: FinetuneTrainer) -> bool:
    """Return whether no key says how long the run is."""
    return "epochs" not in trainer.model_fields_set and trainer.train_steps is None and trainer.train_samples is None


def has_beta2(optimizer: OptimizerConfig) -> bool:
    """Return whether it is an Adam: a second beta averages squared gradients, with a bias correction."""
    return optimizer.type.removeprefix("paged_").removesuffix("_8bit") in ("adam", "adamw")


def _sizes_of_table(text: str) -> list[int]:
    """Return the sizes of a table; none if it cannot be read, which a rule reports."""
    try:
        return [size for _, size in parse_batch_steps(text)]
    except ValueError:
        return []


_EXAMPLE = "such as 0sp:1024 250000sp:2048 1e6sp:4096"


_LARGEST = 2**40  # rows; Ludwig's bound on a batch


def parse_batch_steps(text: str) -> tuple[tuple[Duration, int], ...]:
    """Parse '0sp:1024 250000sp:2048 1e6sp:4096': from when on, and how many rows; all times in one unit.

    The first begins at 0, which needs no unit; each later one after the one before. Raises ValueError.
    """
    if not text.strip():
        raise ValueError(f"it is empty: steps of the form DURATION:ROWS, {_EXAMPLE}")
    steps = [_step(part) for part in text.split()]
    first, later = steps[0], steps[1:]
    if first[0].amount != 0:
        raise ValueError(f"the first step begins at {first[0]}, and not at 0, {_EXAMPLE}")
    units = {start.unit for start, _ in later}
    if len(units) > 1:
        raise ValueError(f"steps in {' and '.join(sorted(units))}: a table has one unit")
    for (before, _), (after, _) in pairwise(steps):
        if after.amount <= before.amount:
            raise ValueError(f"{after} comes after {before}: each step begins later than the one before it")
    return ((Duration(Fraction(0), next(iter(units), first[0].unit)), first[1]), *later)


def _step(part: str) -> tuple[Duration, int]:
    start, colon, rows = part.partition(":")
    if not colon:
        raise ValueError(f"'{part}' is not a step: DURATION:ROWS, {_EXAMPLE}")
    return _start(start), _rows(rows, part)


def _start(text: str) -> Duration:
    duration = Duration(Fraction(0), _UNIT_OF_BARE_0) if re.fullmatch("0+", text) else parse_duration(text)
    if duration.unit == "dur" and duration.amount == 1:
        raise ValueError(f"'{text}' is the end of the run, where no step begins")
    return duration


def _rows(text: str, part: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or not 1 <= int(text) <= _LARGEST:
        raise ValueError(f"'{part}' has '{text}' rows: a whole number of at least 1, in digits")
    return int(text)


_UNIT_OF_BARE_0: DurationUnit = "sp"
