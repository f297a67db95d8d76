"""Rules of a batch that moves: one way to move it, durations that can be read, sizes that fit together."""

from __future__ import annotations

from collections.abc import Iterator

from brim.config.batch import ACCUMULATION, DEFAULT_ROWS, EFFECTIVE, LARGEST, default_rows, is_sized_by_memory
from brim.config.batch_steps import parse_batch_steps
from brim.config.findings import Finding
from brim.config.moving_batch import WAYS, has_beta2, named_sizes, ways_given
from brim.config.places import Path, dotted
from brim.config.schema import Config, FinetuneTrainer
from brim.units import parse_duration

RAMPUP: Path = ("trainer", "batch_rampup")
STEPS: Path = ("trainer", "batch_schedule")
FUNCTION: Path = ("trainer", "batch_increase_function")
ADAPTATION: Path = ("trainer", "batch_adaptation")
INITIAL: Path = ("trainer", "initial_effective_batch_size")
TRAIN_STEPS: Path = ("trainer", "train_steps")
TRAIN_SAMPLES: Path = ("trainer", "train_samples")

MOST_STAGES = 10_000  # each is a phase, which every checkpoint holds


def batch_rules(config: Config) -> Iterator[Finding]:
    """Every contradiction between the keys that move the batch, and with those of the batch and the run's length."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        return
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


def unreadable_duration(path: Path, text: str | None) -> Iterator[Finding]:
    """A finding where a duration cannot be read."""
    try:
        if text is not None:
            parse_duration(text)
    except ValueError as error:
        yield Finding(paths=(path,), what=f"{dotted(path)}: {error}")


def _no_effective_batch(path: Path, verb: str) -> Finding:
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
    """But for the final batch, which has a rule of its own."""
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
        yield Finding(
            paths=(TRAIN_SAMPLES, TRAIN_STEPS),
            what="trainer.train_samples and train_steps are both given",
            fix="keep one of them",
        )


def _beta2_is_there(trainer: FinetuneTrainer) -> Iterator[Finding]:
    if trainer.batch_beta2_scaling is True and not has_beta2(trainer.optimizer):
        yield Finding(
            paths=(("trainer", "batch_beta2_scaling"), ("trainer", "optimizer", "type"), ("trainer", "optimizer")),
            what=f"trainer.batch_beta2_scaling needs an Adam's second beta, and {trainer.optimizer.type} has none",
            fix="set trainer.optimizer.type: adamw, or trainer.batch_beta2_scaling: auto",
        )


def _noise_can_be_measured(trainer: FinetuneTrainer) -> Iterator[Finding]:
    """With one row there is nothing to compare."""
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
