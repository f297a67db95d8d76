"""Check the keys of the batch against each other: its arithmetic, and the keys that move it.

Batch arithmetic: micro-batch × accumulation × processes = effective batch, exactly, where the micro-batch is fixed. A
batch that moves has one key that moves it, durations that can be read, and sizes that fit together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from brim.config.findings import Finding
from brim.config.schedule_rules import (
    WAYS,
    has_beta2,
    implied_effective_rows,
    moves_batch,
    named_sizes,
    parse_batch_steps,
    unreadable_duration,
    ways_given,
)
from brim.config.schema import FinetuneTrainer
from brim.config.text import KeyPath, dotted

RAMPUP: KeyPath = ("trainer", "batch_rampup")


STEPS: KeyPath = ("trainer", "batch_schedule")


FUNCTION: KeyPath = ("trainer", "batch_increase_function")


ADAPTATION: KeyPath = ("trainer", "batch_adaptation")


INITIAL: KeyPath = ("trainer", "initial_effective_batch_size")


TRAIN_STEPS: KeyPath = ("trainer", "train_steps")


MOST_STAGES = 10_000  # each is a phase, which every checkpoint holds


def batch_rules(trainer: FinetuneTrainer) -> Iterator[Finding]:
    """Find contradictions between the keys that move the batch, the keys of its size and those of the run's length."""
    for rule in (
        _one_way,
        _ramp_is_whole,
        _stages_are_few,
        _table_is_readable,
        _function_has_a_start,
        _adaptation_fits,
        _accumulation_is_open,
        _sizes_are_allowed,
        _one_length,
        _beta2_is_there,
        _noise_can_be_measured,
    ):
        yield from rule(trainer)


def _one_way(trainer: FinetuneTrainer) -> Iterator[Finding]:
    ways = ways_given(trainer)
    if len(ways) > 1:
        yield Finding(
            paths=tuple(ways),
            what=f"{' and '.join(map(dotted, ways))} {'both' if len(ways) == 2 else 'all'} move the batch",
            expected=f"at most one of {', '.join(WAYS)}",
            fix="keep one of them",
        )


def _ramp_is_whole(trainer: FinetuneTrainer) -> Iterator[Finding]:
    ramp, first = trainer.batch_rampup, trainer.initial_effective_batch_size
    if ramp is None:
        if first is not None:
            yield Finding(
                paths=(INITIAL, RAMPUP),
                what="trainer.initial_effective_batch_size is where a ramp begins, and there is none",
                fix="add trainer.batch_rampup: 0.1dur, or remove it",
            )
        return
    yield from unreadable_duration((*RAMPUP, "length"), ramp.length)
    if trainer.effective_batch_size == "auto" and not is_sized_by_memory(trainer):
        yield _no_effective_batch(RAMPUP, "leads to")
    if ramp.initial is not None and first is not None:
        yield Finding(
            paths=((*RAMPUP, "from"), INITIAL),
            what=f"trainer.batch_rampup.from {ramp.initial} and trainer.initial_effective_batch_size {first} are both "
            "given",
            fix="keep one of them",
        )
    if ramp.increment is not None and ramp.shape != "linear":
        yield Finding(
            paths=((*RAMPUP, "increment"), (*RAMPUP, "shape")),
            what=f"trainer.batch_rampup.increment has no effect with shape: {ramp.shape}",
            fix="set trainer.batch_rampup.shape: linear, or remove increment",
        )


def _stages_are_few(trainer: FinetuneTrainer) -> Iterator[Finding]:
    ramp, final = trainer.batch_rampup, trainer.effective_batch_size
    if ramp is None or ramp.shape != "linear" or final == "auto":
        return
    way = abs(final - (ramp.initial or trainer.initial_effective_batch_size or -(-final // 4)))
    num_stages = -(-way // (ramp.increment or 1))
    if num_stages > MOST_STAGES:
        yield Finding(
            paths=((*RAMPUP, "increment"), RAMPUP, EFFECTIVE),
            what=f"trainer.batch_rampup has {num_stages:,} stages, with an increment of {ramp.increment or 1:,}",
            expected=f"at most {MOST_STAGES:,} stages",
            fix=f"set trainer.batch_rampup.increment: {-(-way // MOST_STAGES)}, or more, or another shape",
        )


def _no_effective_batch(path: KeyPath, verb: str) -> Finding:
    return Finding(
        paths=(EFFECTIVE, path),
        what=f"{dotted(path)} {verb} trainer.effective_batch_size, which is not set",
        expected="trainer.effective_batch_size as a number: the rows of one update",
        fix="add trainer.effective_batch_size: 32, or as many rows as an update shall see",
    )


def _table_is_readable(trainer: FinetuneTrainer) -> Iterator[Finding]:
    if trainer.batch_schedule is None:
        return
    try:
        last = parse_batch_steps(trainer.batch_schedule)[-1][1]
    except ValueError as error:
        yield Finding(paths=(STEPS,), what=f"{dotted(STEPS)}: {error}")
        return
    if trainer.effective_batch_size not in ("auto", last):
        yield Finding(
            paths=(EFFECTIVE, STEPS),
            what=f"trainer.effective_batch_size is {trainer.effective_batch_size}, and trainer.batch_schedule ends "
            f"with {last}",
            expected="the last size of the schedule",
            fix=f"remove trainer.effective_batch_size, or set it to {last}",
        )


def _function_has_a_start(trainer: FinetuneTrainer) -> Iterator[Finding]:
    function = trainer.batch_increase_function
    if function is None:
        return
    if isinstance(function, str):
        module, _, name = function.partition(":")
        if not module.strip() or not name.strip() or ":" in name:
            yield Finding(
                paths=(FUNCTION,),
                what=f"{dotted(FUNCTION)} is '{function}'",
                expected="module:function, such as mymodule:increase for the function increase of mymodule.py",
            )
    if trainer.effective_batch_size == "auto":
        yield _no_effective_batch(FUNCTION, "adds to")


def _adaptation_fits(trainer: FinetuneTrainer) -> Iterator[Finding]:
    limits, effective = trainer.batch_adaptation, trainer.effective_batch_size
    if limits is None:
        return
    if limits.min > limits.max:
        yield Finding(
            paths=((*ADAPTATION, "min"), (*ADAPTATION, "max")),
            what=f"trainer.batch_adaptation.min {limits.min} is above max {limits.max}",
            fix="swap them",
        )
    elif effective != "auto" and not limits.min <= effective <= limits.max:
        yield Finding(
            paths=(EFFECTIVE, (*ADAPTATION, "min"), (*ADAPTATION, "max")),
            what=f"trainer.effective_batch_size {effective}, with which training begins, is not within "
            "trainer.batch_adaptation's bounds",
            expected=f"rows from {limits.min} to {limits.max}",
            fix=f"remove trainer.effective_batch_size to begin with {limits.min}",
        )
    if limits.min == 1:
        yield Finding(
            paths=((*ADAPTATION, "min"),),
            what="trainer.batch_adaptation.min is 1, and a batch of one row shows no noise to follow",
            expected="at least 2 rows",
        )
    if trainer.train_steps is not None:
        yield Finding(
            paths=(TRAIN_STEPS, ADAPTATION),
            what="trainer.train_steps does not say how many rows the run has, since trainer.batch_adaptation decides "
            "the batch in its course",
            fix="set trainer.train_samples or trainer.epochs instead",
        )


def _accumulation_is_open(trainer: FinetuneTrainer) -> Iterator[Finding]:
    ways, steps = ways_given(trainer), trainer.gradient_accumulation_steps
    if ways and steps != "auto":
        yield Finding(
            paths=(ACCUMULATION, *ways),
            what=f"trainer.gradient_accumulation_steps {steps} fixes the batch, and {dotted(ways[0])} moves it",
            fix="remove trainer.gradient_accumulation_steps",
        )


def _sizes_are_allowed(trainer: FinetuneTrainer) -> Iterator[Finding]:
    """Compare the sizes that the keys name with `max_batch_size`; `mismatch` does so for the final batch."""
    largest = trainer.max_batch_size
    for path, size in named_sizes(trainer):
        if largest is not None and size > largest:
            yield Finding(
                paths=(LARGEST, path),
                what=f"{dotted(path)} has a batch of {size} rows, above trainer.max_batch_size {largest}",
                fix=f"set trainer.max_batch_size: {size}, or a smaller batch",
            )


def _one_length(trainer: FinetuneTrainer) -> Iterator[Finding]:
    if trainer.train_samples is not None and trainer.train_steps is not None:
        yield Finding.of_both(("trainer", "train_samples"), TRAIN_STEPS)


def _beta2_is_there(trainer: FinetuneTrainer) -> Iterator[Finding]:
    if trainer.batch_beta2_scaling is True and not has_beta2(trainer.optimizer):
        yield Finding(
            paths=(("trainer", "batch_beta2_scaling"), ("trainer", "optimizer", "type"), ("trainer", "optimizer")),
            what=f"trainer.batch_beta2_scaling needs an Adam's second beta, and {trainer.optimizer.type} has none",
            fix="set trainer.optimizer.type: adamw, or trainer.batch_beta2_scaling: auto",
        )


def _noise_can_be_measured(trainer: FinetuneTrainer) -> Iterator[Finding]:
    """Ask for an update of at least two rows: in one row there is nothing to compare."""
    if trainer.noise_scale_every is None or trainer.batch_adaptation is not None:
        return
    sizes = [size for _, size in named_sizes(trainer)]
    effective = trainer.effective_batch_size
    if effective != "auto":
        sizes.append(effective)
    elif not sizes:
        rows = [n for n in (trainer.batch_size, trainer.gradient_accumulation_steps) if n != "auto"]
        sizes.append(max(rows, default=default_rows(trainer) or DEFAULT_ROWS))
    if max(sizes) == 1 and trainer.batch_increase_function is None:
        yield Finding(
            paths=(("trainer", "noise_scale_every"), EFFECTIVE),
            what="trainer.noise_scale_every measures how the gradients of an update's rows differ, and an update has "
            "one row",
            expected="at least 2 rows",
            fix="set trainer.effective_batch_size: 32, or remove trainer.noise_scale_every",
        )


BATCH: KeyPath = ("trainer", "batch_size")


ACCUMULATION: KeyPath = ("trainer", "gradient_accumulation_steps")


EFFECTIVE: KeyPath = ("trainer", "effective_batch_size")


LARGEST: KeyPath = ("trainer", "max_batch_size")


DEFAULT_ROWS = 16  # of an update, where no key decides them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Hold how many rows make an update, and how they are divided into micro-batches."""

    effective_rows: int | None  # None: as many as fit the memory; the plan decides
    micro_batch_rows: int | None  # None: by the rows' lengths, in each step
    accumulation_steps: int | None  # None: as many as the partition has


def batch_sizes(trainer: FinetuneTrainer) -> BatchSizes | Finding:
    """Return the sizes of a batch, of which two give the third; return a finding if they do not multiply up.

    If only the micro-batch or only the accumulation is given, the other is 1. If only the effective batch is known
    (given, the default, or the largest that fits), micro-batches have no fixed size, unless it is a single row. A batch
    that moves has no fixed number of micro-batches either.
    """
    batch, accumulation, effective = _given(trainer)
    fault = mismatch(trainer, exact=True)
    if fault is not None:
        return fault
    if is_sized_by_memory(trainer):
        return BatchSizes(effective_rows=None, micro_batch_rows=None, accumulation_steps=None)
    if effective is None:
        effective = default_rows(trainer)
    if moves_batch(trainer):
        assert effective is not None, "a rule asks for it"
        return BatchSizes(effective_rows=effective, micro_batch_rows=batch, accumulation_steps=None)
    if effective is None:
        batch, accumulation = batch or 1, accumulation or 1
    elif batch is not None:
        accumulation = effective // batch
    elif accumulation is not None:
        batch = effective // accumulation
    elif effective == 1:
        batch = accumulation = 1
    if batch is None or accumulation is None:
        assert effective is not None, "only an effective batch is partitioned by length"
        return BatchSizes(effective_rows=effective, micro_batch_rows=None, accumulation_steps=None)
    rows = batch * accumulation
    if trainer.max_batch_size is not None and rows > trainer.max_batch_size:
        return _too_large(rows, trainer.max_batch_size)
    return BatchSizes(effective_rows=rows, micro_batch_rows=batch, accumulation_steps=accumulation)


def is_sized_by_memory(trainer: FinetuneTrainer) -> bool:
    """Return whether an update takes as many rows as fit together, since no key says how many."""
    return trainer.use_maximum_batch_size and _names_no_size(trainer)


def default_rows(trainer: FinetuneTrainer) -> int | None:
    """Return the default rows of an update; None if a key decides them."""
    if not _names_no_size(trainer) or trainer.use_maximum_batch_size or moves_batch(trainer):
        return None
    return min(DEFAULT_ROWS, trainer.max_batch_size or DEFAULT_ROWS)


def _names_no_size(trainer: FinetuneTrainer) -> bool:
    return _given(trainer) == (None, None, None)


def fixes_the_cut(trainer: FinetuneTrainer) -> KeyPath | None:
    """Return the key that sets the rows of a micro-batch, if one does; otherwise the rows' lengths decide."""
    batch, accumulation, _ = _given(trainer)
    return BATCH if batch is not None else ACCUMULATION if accumulation is not None else None


def accumulates(trainer: FinetuneTrainer) -> bool:
    """Return whether a step can take several micro-batches, as far as the given sizes show."""
    batch, accumulation, effective = _given(trainer)
    if trainer.noise_scale_every is not None or trainer.batch_adaptation is not None:
        return True  # a measured step takes the batch in groups
    if accumulation is not None:
        return accumulation > 1
    effective = default_rows(trainer) if effective is None else effective
    if moves_batch(trainer):
        sizes = [effective or 1, *(size for _, size in named_sizes(trainer))]
        return trainer.batch_increase_function is not None or max(sizes) > (batch or 1)
    return effective is not None and effective > (batch or 1)


def mismatch(trainer: FinetuneTrainer, *, exact: bool) -> Finding | None:
    """Find sizes that do not multiply up: in the one process that brim has, or in any number of them (not exact)."""
    batch, accumulation, effective = _given(trainer)
    if trainer.max_batch_size is not None and effective is not None and effective > trainer.max_batch_size:
        return _too_large(effective, trainer.max_batch_size)
    if effective is None or moves_batch(trainer):  # a step's last micro-batch takes what is left
        return None
    unit = (batch or 1) * (accumulation or 1)
    all_given = exact and batch is not None and accumulation is not None
    if effective == unit or (effective % unit == 0 and not all_given):
        return None
    sizes = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
    formula = " × ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)
    return _finding(effective, unit, formula, exact=all_given)


def _given(trainer: FinetuneTrainer) -> tuple[int | None, int | None, int | None]:
    """Return micro-batch, accumulation and (final) effective batch, each None if it is not a number."""
    effective, implied = _number(trainer.effective_batch_size), implied_effective_rows(trainer)
    return (
        _number(trainer.batch_size),
        _number(trainer.gradient_accumulation_steps),
        implied[0] if effective is None and implied is not None else effective,
    )


def _finding(effective: int, unit: int, formula: str, *, exact: bool) -> Finding:
    below, above = effective // unit * unit, -(-effective // unit) * unit
    numbers = [unit] if exact else [number for number in (below, above) if number > 0]
    relation = "is not" if exact else "is not a multiple of"
    return Finding(
        paths=(EFFECTIVE, ACCUMULATION, BATCH),
        what=f"trainer.effective_batch_size {effective} {relation} {formula}{f' = {unit}' if '×' in formula else ''}",
        expected="effective_batch_size = batch_size × gradient_accumulation_steps × processes",
        fix=f"set trainer.effective_batch_size: {' or '.join(map(str, numbers))}"
        + (", or leave one of the other two out" if exact else ""),
    )


def _too_large(rows: int, largest: int) -> Finding:
    return Finding(
        paths=(LARGEST, EFFECTIVE, ACCUMULATION, BATCH),
        what=f"the effective batch of {rows} rows is above trainer.max_batch_size {largest}",
        fix=f"set trainer.max_batch_size: {rows}, or a smaller effective batch",
    )


def _number(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
