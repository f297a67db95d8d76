"""Which keys move the effective batch while a run lasts, the sizes that they name, and whether a key says how long."""

from __future__ import annotations

from collections.abc import Iterator

from brim.config.batch_steps import parse_batch_steps
from brim.config.places import Path
from brim.config.schema import FinetuneTrainer, OptimizerConfig

WAYS = ("batch_rampup", "batch_schedule", "batch_increase_function", "batch_adaptation")


def ways_given(trainer: FinetuneTrainer) -> list[Path]:
    """The keys that are set; valid configurations have at most one."""
    return [("trainer", name) for name in WAYS if getattr(trainer, name) is not None]


def moves_batch(trainer: FinetuneTrainer) -> bool:
    """Whether the effective batch is asked to move."""
    return bool(ways_given(trainer))


def named_sizes(trainer: FinetuneTrainer) -> Iterator[tuple[Path, int]]:
    """The sizes that a run takes, but for `effective_batch_size` and what a function adds; each with its key.

    None of a `batch_schedule` that cannot be read.
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
    """What `effective_batch_size: auto` is where the batch moves, and why; None where the keys do not say."""
    if trainer.batch_schedule is not None:
        sizes = _sizes_of_table(trainer.batch_schedule)
        return (sizes[-1], "the last size of trainer.batch_schedule") if sizes else None
    if trainer.batch_adaptation is not None:
        return trainer.batch_adaptation.min, "trainer.batch_adaptation.min, with which training begins"
    return None


def takes_default_epochs(trainer: FinetuneTrainer) -> bool:
    """Whether no key says how long the run is."""
    return "epochs" not in trainer.model_fields_set and trainer.train_steps is None and trainer.train_samples is None


def has_beta2(optimizer: OptimizerConfig) -> bool:
    """Whether it divides by a running average of squared gradients, with a beta of its own and a bias correction."""
    return optimizer.type.removeprefix("paged_").removesuffix("_8bit") in ("adam", "adamw")


def _sizes_of_table(text: str) -> list[int]:
    """Empty where it cannot be read, which a rule tells."""
    try:
        return [size for _, size in parse_batch_steps(text)]
    except ValueError:
        return []
