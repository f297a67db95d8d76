"""Batch arithmetic: micro-batch × accumulation × processes = effective batch, exactly, where the cut is fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brim.config.findings import Finding
from brim.config.moving_batch import implied_effective_rows, moves_batch, named_sizes
from brim.config.places import Path
from brim.config.schema import FinetuneTrainer

BATCH: Path = ("trainer", "batch_size")
ACCUMULATION: Path = ("trainer", "gradient_accumulation_steps")
EFFECTIVE: Path = ("trainer", "effective_batch_size")
LARGEST: Path = ("trainer", "max_batch_size")

DEFAULT_ROWS = 16  # of an update, where no key decides them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """How many rows make an update, and how they are cut up."""

    effective_rows: int | None  # None: as many as fit the memory, which the plan tells
    micro_batch_rows: int | None  # None: cut by length, step by step
    accumulation_steps: int | None  # None: as many as the cut has


def batch_sizes(trainer: FinetuneTrainer, *, num_processes: int) -> BatchSizes | Finding:
    """Any two sizes give the third. A finding where they do not multiply up.

    With a micro-batch or an accumulation alone, the other one is 1. With an effective batch alone (given, the default,
    or the largest that fits) there is no fixed cut, unless a process has only one row to take. A batch that moves has
    no fixed number of micro-batches either.
    """
    batch, accumulation, effective = _given(trainer)
    fault = mismatch(trainer, num_processes=num_processes)
    if fault is not None:
        return fault
    if is_sized_by_memory(trainer):
        return BatchSizes(effective_rows=None, micro_batch_rows=None, accumulation_steps=None)
    if effective is None:
        effective = default_rows(trainer, num_processes=num_processes)
    if moves_batch(trainer):
        assert effective is not None, "a rule asks for it"
        return BatchSizes(effective_rows=effective, micro_batch_rows=batch, accumulation_steps=None)
    if effective is None:
        batch, accumulation = batch or 1, accumulation or 1
    elif batch is not None:
        accumulation = effective // (batch * num_processes)
    elif accumulation is not None:
        batch = effective // (accumulation * num_processes)
    elif effective == num_processes:
        batch = accumulation = 1
    if batch is None or accumulation is None:
        assert effective is not None, "only an effective batch is cut by length"
        return BatchSizes(effective_rows=effective, micro_batch_rows=None, accumulation_steps=None)
    rows = batch * accumulation * num_processes
    if trainer.max_batch_size is not None and rows > trainer.max_batch_size:
        return _too_large(rows, trainer.max_batch_size)
    return BatchSizes(effective_rows=rows, micro_batch_rows=batch, accumulation_steps=accumulation)


def is_sized_by_memory(trainer: FinetuneTrainer) -> bool:
    """Whether an update is to take as many rows as fit together, since no key says how many."""
    return trainer.use_maximum_batch_size and _names_no_size(trainer)


def default_rows(trainer: FinetuneTrainer, *, num_processes: int = 1) -> int | None:
    """The rows of an update where no key decides them, the same number for each process; else None."""
    if not _names_no_size(trainer) or trainer.use_maximum_batch_size or moves_batch(trainer):
        return None
    rows = min(DEFAULT_ROWS, trainer.max_batch_size or DEFAULT_ROWS)
    return max(rows // num_processes, 1) * num_processes


def _names_no_size(trainer: FinetuneTrainer) -> bool:
    return _given(trainer) == (None, None, None)


def fixes_the_cut(trainer: FinetuneTrainer) -> Path | None:
    """The key that sets the rows of a micro-batch, so that nothing is left to search; None: they go by length."""
    batch, accumulation, _ = _given(trainer)
    return BATCH if batch is not None else ACCUMULATION if accumulation is not None else None


def accumulates(trainer: FinetuneTrainer) -> bool:
    """Whether a step can take several micro-batches, as far as the given sizes tell."""
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


def mismatch(trainer: FinetuneTrainer, *, num_processes: int | None) -> Finding | None:
    """What cannot multiply up: for a number of processes, or (None) for any."""
    batch, accumulation, effective = _given(trainer)
    if trainer.max_batch_size is not None and effective is not None and effective > trainer.max_batch_size:
        return _too_large(effective, trainer.max_batch_size)
    if effective is None or moves_batch(trainer):  # a step's last micro-batch takes what is left
        return None
    unit = (batch or 1) * (accumulation or 1) * (num_processes or 1)
    all_given = batch is not None and accumulation is not None and num_processes is not None
    if effective == unit or (effective % unit == 0 and not all_given):
        return None
    return _finding(effective, unit, _formula(batch, accumulation, num_processes), exact=all_given)


def _given(trainer: FinetuneTrainer) -> tuple[int | None, int | None, int | None]:
    """Micro-batch, accumulation and (final) effective batch, where they are numbers."""
    effective, implied = _number(trainer.effective_batch_size), implied_effective_rows(trainer)
    return (
        _number(trainer.batch_size),
        _number(trainer.gradient_accumulation_steps),
        implied[0] if effective is None and implied is not None else effective,
    )


def _finding(effective: int, unit: int, formula: str, *, exact: bool) -> Finding:
    below, above = effective // unit * unit, -(-effective // unit) * unit
    numbers = [unit] if exact else [number for number in (below, above) if number > 0]
    relation = "is not" if exact else "is no multiple of"
    return Finding(
        paths=(EFFECTIVE, ACCUMULATION, BATCH),
        what=f"trainer.effective_batch_size {effective} {relation} {formula}{f' = {unit}' if '×' in formula else ''}",
        expected="effective_batch_size = batch_size × gradient_accumulation_steps × processes",
        fix=f"set trainer.effective_batch_size: {' or '.join(map(str, numbers))}"
        + (", or leave one of the other two out" if exact else ""),
    )


def _formula(batch: int | None, accumulation: int | None, num_processes: int | None) -> str:
    parts = []
    if batch is not None:
        parts.append(f"batch_size {batch}")
    if accumulation is not None:
        parts.append(f"gradient_accumulation_steps {accumulation}")
    if num_processes is not None and (num_processes > 1 or not parts):
        parts.append(f"{num_processes} process{'es' if num_processes > 1 else ''}")
    return " × ".join(parts)


def _too_large(rows: int, largest: int) -> Finding:
    return Finding(
        paths=(LARGEST, EFFECTIVE, ACCUMULATION, BATCH),
        what=f"the effective batch of {rows} rows is above trainer.max_batch_size {largest}",
        fix=f"set trainer.max_batch_size: {rows}, or a smaller effective batch",
    )


def _number(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
