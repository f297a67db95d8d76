"""Compute a run's length and its effective batch from step to step, as the trainer's keys ask for them.

The length is in samples and steps, with the steps after which the run is evaluated and saved. Durations are converted
to samples: what an epoch, a token or a share of the run comes to, row by row. `BatchCourse` says how large the batch
is at each step, what is measured of it, and the points of its curve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.batching import Adaptation, BatchSchedule, NoiseMeasurement, NoiseScale, Phase
from brim.config import parse_batch_steps
from brim.config.schema import FinetuneTrainer
from brim.data.tokens import TokenRows, rows_of_step
from brim.train.increase_function import Increases, expand, load_increase_function
from brim.units import Duration, format_count, parse_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Sum the steps since the last point of the curve."""

    since_sample: int = 0  # consumed at the last point
    loss_sum: float = 0.0  # over supervised tokens
    num_supervised_tokens: int = 0
    num_steps: int = 0

    def with_step(self, loss: float, num_supervised_tokens: int) -> _Point:
        """Add a step. loss: mean over its supervised tokens."""
        return replace(
            self,
            loss_sum=self.loss_sum + loss * num_supervised_tokens,
            num_supervised_tokens=self.num_supervised_tokens + num_supervised_tokens,
            num_steps=self.num_steps + 1,
        )


class BatchCourse:
    """Sizes are those of the schedule; where they follow the gradient's noise, those that it has led to so far.

    measure_every: steps between measurements of the gradient's noise; None: none.
    saved: what `state` gave at the checkpoint that a run goes on from; empty for a new run.
    """

    def __init__(self, length: RunLength, *, measure_every: int | None, saved: Mapping[str, Any]) -> None:
        self._length = length
        self._measure_every = measure_every
        self._last_size: int = saved.get("last_size", 0)  # of the step before; 0: there was none
        self._point = _Point(**saved.get("point", {}))
        self._noise = NoiseScale(**saved["noise"]) if "noise" in saved else NoiseScale()
        self._adaptation = length.adaptation
        if length.adaptation is not None and "adaptation" in saved:
            self._adaptation = Adaptation(**saved["adaptation"])

    def size(self, consumed_samples: int) -> int:
        """Return the rows of the step that begins there; the end of an epoch or of the run may cut it."""
        return self._length.schedule.size_at(consumed_samples) if self._adaptation is None else self._adaptation.size

    def switch(self, size: int) -> Mapping[str, Any] | None:
        """Return the event, without its step, where the next step has another size than the one before."""
        before = self._last_size
        if before in (0, size):
            return None
        reason = "schedule" if self._adaptation is None else self._noise.in_words()
        return {"event": "schedule", "before": before, "effective_batch_size": size, "reason": reason}

    def stepped(self, size: int) -> None:
        """Note that a step of this size is over, whether or not it updated the weights."""
        self._last_size = size

    def measures(self, step: int) -> bool:
        """Say whether the noise is measured in the step after so many."""
        return self._measure_every is not None and step % self._measure_every == 0

    def take_noise(self, measurement: NoiseMeasurement | None) -> Mapping[str, Any]:
        """Add a step's measurement to the averages, which may move the batch; return fields for the step's record."""
        if measurement is None:
            return {}
        self._noise = self._noise.after(measurement)
        if self._adaptation is not None:
            self._adaptation = self._adaptation.after(self._noise)
        return {
            "noise_scale": self._noise.rows,
            "gradient_variance": measurement.gradient_variance,
            "squared_gradient": measurement.squared_gradient,
        }

    def take_loss(self, *, loss: float, num_supervised_tokens: int, consumed_samples: int) -> Mapping[str, Any] | None:
        """Add a step that updated the weights; return a point of the curve, without its step, once it is complete.

        loss: mean over the step's supervised tokens. consumed_samples: with those of the step.

        A point stands for as many rows as the final batch has, so that curves compare with those of a run that does
        not ramp. None where the batch does not move: each step is a point then.
        """
        if not self._length.batch_moves:
            return None
        self._point = self._point.with_step(loss, num_supervised_tokens)
        return self._point_at(consumed_samples)

    def left_out(self, consumed_samples: int) -> Mapping[str, Any] | None:
        """Leave a step out of the curve, since it was not an update. After the run's last one, the curve ends there."""
        is_over = consumed_samples >= self._length.total_samples
        return self._point_at(consumed_samples) if is_over and self._point.num_steps else None

    def _point_at(self, consumed: int) -> Mapping[str, Any] | None:
        size, is_over = self._length.schedule.final_size, consumed >= self._length.total_samples
        if consumed // size == self._point.since_sample // size and not is_over:
            return None
        point, self._point = self._point, _Point(since_sample=consumed)
        return {
            "event": "point",
            "loss": point.loss_sum / point.num_supervised_tokens,
            "num_steps": point.num_steps,
        }

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on, as JSON."""
        state: dict[str, Any] = {"last_size": self._last_size, "point": asdict(self._point)}
        if self._measure_every is not None:
            state["noise"] = asdict(self._noise)
        if self._adaptation is not None:
            state["adaptation"] = asdict(self._adaptation)
        return state


_ScheduleFor = Callable[[int], BatchSchedule]  # of a run of so many samples


def _with_schedule(length: RunLength, trainer: FinetuneTrainer, schedule_for: _ScheduleFor) -> RunLength:
    """Return the length with its schedule; `train_steps` wins over `epochs`, as in Ludwig."""
    num_rows, num_steps = length.num_rows, trainer.train_steps
    if num_steps is None:
        total_samples = _samples(trainer, num_rows)
        return replace(length, schedule=schedule_for(total_samples), total_samples=total_samples)
    schedule = schedule_for(total_of_steps(schedule_for, num_rows=num_rows, num_steps=num_steps))
    total_samples = schedule.samples_of_steps(num_rows=num_rows, num_steps=num_steps)
    return replace(length, schedule=schedule, total_samples=total_samples)


def total_of_steps(schedule_for: _ScheduleFor, *, num_rows: int, num_steps: int) -> int:
    """Return the samples of a run of so many steps whose schedule depends on how many samples it has.

    schedule_for: gives the schedule of a run of a number of samples. The result is at least what its own schedule
    consumes, while one less would not be; where batches do not shrink, it is the least such number. Shares of it are
    shares of the run but for a few batches: there need not be a number that its schedule consumes exactly.
    """
    low, high = 1, num_steps * num_rows
    while low < high:
        middle = (low + high) // 2
        if schedule_for(middle).samples_of_steps(num_rows=num_rows, num_steps=num_steps) <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def _samples(trainer: FinetuneTrainer, num_rows: int) -> int:
    return trainer.train_samples or trainer.epochs * num_rows


def _with_increases(
    length: RunLength, trainer: FinetuneTrainer, bound: int | None, known: Mapping[tuple[int, int], int] | None
) -> RunLength:
    """Return the length with the sizes that the user's function gives, and a note on what the bound did not allow."""
    num_rows, num_steps = length.num_rows, trainer.train_steps
    assert isinstance(trainer.effective_batch_size, int), "resolved before"
    assert trainer.batch_increase_function is not None, "asked where there is one"
    limits = [limit for limit in (bound, trainer.max_batch_size) if limit is not None]
    increases = expand(
        load_increase_function(trainer.batch_increase_function),
        first_size=trainer.effective_batch_size,
        num_rows=num_rows,
        num_samples=None if num_steps is not None else _samples(trainer, num_rows),
        num_steps=num_steps,
        bound=min(limits, default=None),
        known=known,
    )
    notes = [*_refusals(increases, bound, trainer.max_batch_size), *_idle(increases, trainer.effective_batch_size)]
    length = replace(length, notes=tuple(notes), increases=increases.answers)
    return _with_schedule(length, trainer, lambda samples: increases.schedule)


def _refusals(increases: Increases, bound: int | None, largest: int | None) -> Iterator[str]:
    fits = f"{bound or 0:,} of the longest fit at once"
    is_key = largest is not None and (bound is None or largest <= bound)
    reason = f"trainer.max_batch_size is {largest:,}" if is_key else fits
    for refused in increases.refused[:1]:
        num_more = len(increases.refused) - 1
        more = f", nor {'was' if num_more == 1 else 'were'} {num_more:,} later" if num_more else ""
        when = f"after epoch {refused.num_epochs:,}" if refused.num_epochs else "for the first epoch"
        yield (
            f"trainer.batch_increase_function asked for {format_count(refused.size, 'row')} {when}, and {reason}: it "
            f"was not followed{more}"
        )


def _idle(increases: Increases, first_size: int) -> Iterator[str]:
    """Note a function that never asked for another batch: perhaps it waits for an epoch that never comes."""
    schedule, last = increases.schedule, increases.num_epochs - 1
    if schedule.is_constant and schedule.final_size == first_size and not increases.refused:
        epochs = f"each epoch from 0 to {last:,}" if last else "epoch 0, the only one"
        yield (
            f"trainer.batch_increase_function changes nothing: it returned 0 for {epochs}, so every update is of "
            f"{format_count(first_size, 'row')}"
        )


def _schedule_for(trainer: FinetuneTrainer, rows: TokenRows, seed: int) -> _ScheduleFor:
    final_size = trainer.effective_batch_size
    assert isinstance(final_size, int), "resolved before"

    def at(duration: Duration, total_samples: int) -> int:
        clock = RunClock(lengths=rows.lengths, seed=seed, total_samples=total_samples, final_size=final_size)
        return clock.samples(duration)

    known: dict[Duration, int] = {}  # tokens take a look at each row, and many lengths of the run are tried

    def samples(duration: Duration, total_samples: int) -> int:
        if duration.unit == "dur":
            return at(duration, total_samples)
        if duration not in known:
            known[duration] = at(duration, total_samples)
        return known[duration]

    if trainer.batch_schedule is not None:
        steps = parse_batch_steps(trainer.batch_schedule)
        return lambda total: BatchSchedule.of([(samples(start, total), size) for start, size in steps])
    if trainer.batch_rampup is None:
        return lambda total: BatchSchedule.constant(final_size)
    length = parse_duration(trainer.batch_rampup.length)
    ramp = cache(partial(_ramp, trainer, final_size))  # that of a length in samples is the same in every run
    return lambda total: ramp(samples(length, total))


def _ramp(trainer: FinetuneTrainer, final_size: int, length_samples: int) -> BatchSchedule:
    ramp = trainer.batch_rampup
    assert ramp is not None, "asked of ramps"
    initial = ramp.initial or trainer.initial_effective_batch_size or first_size(final_size)
    if ramp.shape == "linear":
        return BatchSchedule.linear(
            initial=initial, final=final_size, length_samples=length_samples, increment=ramp.increment or 1
        )
    shape = BatchSchedule.doubling if ramp.shape == "doubling" else BatchSchedule.equal_steps
    return shape(initial=initial, final=final_size, length_samples=length_samples)


def first_size(final_size: int) -> int:
    """Return where a ramp begins by default: at a quarter of the final batch, whatever the card is."""
    return -(-final_size // 4)


def _adaptation(trainer: FinetuneTrainer) -> Adaptation | None:
    limits = trainer.batch_adaptation
    if limits is None:
        return None
    assert isinstance(trainer.effective_batch_size, int), "resolved before"
    return Adaptation(size=trainer.effective_batch_size, smallest=limits.min, largest=limits.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Hold a run in samples and steps. An epoch's last step takes the rows that are left, so it may be smaller."""

    num_rows: int  # of an epoch
    schedule: BatchSchedule  # where sizes follow what is measured: the first one
    total_samples: int  # rows that the whole run consumes, counted with repetition
    steps_per_checkpoint: int = 0  # 0: by checkpoints_per_epoch
    checkpoints_per_epoch: int = 1
    adaptation: Adaptation | None = None  # where sizes begin that follow what is measured
    notes: tuple[str, ...] = ()  # for people: how it came about
    # What batch_increase_function answered, by epochs done and present size, so that it is asked nothing twice.
    increases: Mapping[tuple[int, int], int] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        trainer: FinetuneTrainer,
        rows: TokenRows,
        *,
        seed: int,
        bound: int | None = None,
        course: Mapping[str, Any] | None = None,
        known: Mapping[tuple[int, int], int] | None = None,
    ) -> RunLength:
        """Compute samples, phases and checkpoints of a run over these rows; O(phases), however long it is.

        seed: of the rows' order. bound: rows that trainer.batch_increase_function may not exceed; None: any number.
        course: what RunLength.course gave when the run began; then neither that function nor the memory is asked again.
        known: what that function answered already (RunLength.increases).
        Raises InputError where that function cannot be used.
        """
        length = cls(
            num_rows=len(rows),
            schedule=BatchSchedule.constant(1),
            total_samples=len(rows),
            steps_per_checkpoint=trainer.steps_per_checkpoint,
            checkpoints_per_epoch=max(trainer.checkpoints_per_epoch, 1),
            adaptation=_adaptation(trainer),
        )
        if course is not None:
            return length.with_course(course)
        if trainer.batch_increase_function is not None:
            return _with_increases(length, trainer, bound, known)
        return _with_schedule(length, trainer, _schedule_for(trainer, rows, seed))

    @property
    def total_steps(self) -> int | None:
        """Count the steps; None where that depends on what will be measured."""
        if self.adaptation is not None:
            return None
        return self.schedule.num_steps(num_rows=self.num_rows, total_samples=self.total_samples)

    @property
    def sizes(self) -> tuple[int, ...]:
        """List all sizes that a step's batch can have, smallest first."""
        measured = () if self.adaptation is None else self.adaptation.ladder
        return tuple(sorted({*measured, *(phase.size for phase in self.schedule.phases)}))

    @property
    def largest_size(self) -> int:
        return self.sizes[-1]

    @property
    def batch_moves(self) -> bool:
        return self.adaptation is not None or not self.schedule.is_constant

    def is_checkpoint(self, step: int, *, samples_before: int, samples_after: int) -> bool:
        """Say whether the run is evaluated and saved after this step, counted from 1, which consumes these samples."""
        if samples_after >= self.total_samples:
            return True
        if self.steps_per_checkpoint:
            return step % self.steps_per_checkpoint == 0
        return self._due_by(samples_after) > self._due_by(samples_before)

    def course(self) -> dict[str, Any]:
        """Return, as JSON for checkpoints, what a function of the user's, or the memory, may have decided."""
        phases = [[phase.first_sample, phase.size] for phase in self.schedule.phases]
        return {"phases": phases, "total_samples": self.total_samples}

    def with_course(self, saved: Mapping[str, Any]) -> RunLength:
        """Return the length with the course that a checkpoint holds."""
        phases = tuple(Phase(first_sample=first, size=size) for first, size in saved["phases"])
        return replace(self, schedule=BatchSchedule(phases=phases), total_samples=saved["total_samples"])

    def steps_until(self, samples: int) -> Iterator[tuple[int, int, int]]:
        """Yield each step until so many samples are consumed: the samples before it, its rows, and those of its phase.

        For a batch that does not follow what is measured.
        """
        consumed = 0
        while consumed < min(samples, self.total_samples):
            size = self.schedule.size_at(consumed)
            rows = min(size, self.num_rows - consumed % self.num_rows, self.total_samples - consumed)
            yield consumed, rows, size
            consumed += rows

    def _due_by(self, samples: int) -> int:
        """Count the checkpoints until then; those of an epoch are evenly spread, the last at its end."""
        return samples * self.checkpoints_per_epoch // self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClock:
    """Convert durations to samples of a run."""

    lengths: NDArray[np.int64]  # real tokens of each row, in the order of the source
    seed: int  # of the rows' order
    total_samples: int  # of the whole run
    final_size: int  # rows of a step of the last phase, which `ba` counts

    def samples(self, duration: Duration) -> int:
        """Return the fewest samples after which the duration is over: 5 for 1.5ep of 3 rows.

        Tokens are counted in the very order in which the run takes its rows.
        """
        if duration.unit == "tok":
            return self._samples_of_tokens(int(duration.amount))
        unit_samples = {
            "sp": 1,
            "ba": self.final_size,
            "ep": len(self.lengths),
            "dur": self.total_samples,
        }[duration.unit]
        product = duration.amount * unit_samples
        return -(-product.numerator // product.denominator)

    def _samples_of_tokens(self, num_tokens: int) -> int:
        num_rows = len(self.lengths)
        epochs, rest = divmod(num_tokens, int(self.lengths.sum()))
        if not rest:
            return epochs * num_rows
        _, order = rows_of_step(num_rows=num_rows, seed=self.seed, consumed_samples=epochs * num_rows, size=num_rows)
        return epochs * num_rows + int(np.searchsorted(np.cumsum(self.lengths[order]), rest)) + 1
