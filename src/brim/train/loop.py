"""Run the training loop: for each step, take an effective batch, sum its gradient, update once.

Ctrl-C is heard between two steps. A checkpoint is written while the next steps are made. Where several processes train
together, each runs this loop over the same steps: what one of them has met, the others learn with the step's sums.
"""

from __future__ import annotations

import importlib
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from brim.batching import ByLength, StepOutcome
from brim.batching.memory import restore_random_states
from brim.data.tokens import rows_of_step
from brim.distributed import PeerError, Place
from brim.errors import BrimError, OutOfMemoryError, Problem
from brim.train.checkpoints import Checkpoint, TrainState, require_masks, restore_optimizer, restore_weights
from brim.train.gradient import Gradient
from brim.train.job import TrainJob
from brim.train.logs import Peak, Peaks
from brim.train.run_folder import RunFolder
from brim.train.saving import Saving
from brim.train.schedule import BatchCourse
from brim.train.together import Together
from brim.train.update import WeightUpdate, for_a_row, of_a_row, with_checkpoint

BrimErrorT = TypeVar("BrimErrorT", bound=BrimError)


class Loop:
    """Run a job, from a state on."""

    def __init__(self, job: TrainJob, state: TrainState) -> None:
        self._job = job
        self.state = state
        self._num_out_of_memory = 0
        self._scaler = _scaler_of(job)
        self._gradient = Gradient(job, self._scaler, self._hear)
        self._update = WeightUpdate(job, state, self._gradient, self._scaler, self._hear)
        self._course = BatchCourse(job.length, measure_every=job.measure_every, saved=state.batch_course)
        self._peaks = Peaks(job.llm.device)
        self._together = Together(job, state, self._gradient, self._peaks)
        self._saving = Saving(job, state, self._scaler, self._course, self._hear)
        self._last_event: Mapping[str, Any] = {}  # of an allocation that failed

    @property
    def num_out_of_memory(self) -> int:
        """Return how many allocations failed, on any rank, since this object was made, and were retried."""
        return self._num_out_of_memory + self._together.num_out_of_memory

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """Return what steps that went well took, by the shape of their largest micro-batch."""
        return self._peaks.by_shape()

    def restore(self, checkpoint: Checkpoint, *, keep_cutter: bool = True) -> None:
        """Put weights, optimizer, random states and loss scale back to where the checkpoint left them.

        keep_cutter: the cutter's limits, too. A checkpoint of a version that had none leaves them as they are.
        Returns once all ranks have done so.
        Raises CheckpointError when the checkpoint holds other weights, or the run drops other elements of its rows.
        """
        job, saved = self._job, checkpoint.state
        require_masks(job.llm, saved.get("row_masks"), step=checkpoint.step)
        restore_weights(job.llm.model, checkpoint.tensors["model"])
        restore_optimizer(job.optimizer, checkpoint.tensors.get("optimizer", {}), saved["optimizer"])
        job.rates.restore(saved["rates"])
        restore_random_states(checkpoint.tensors["random"])
        if keep_cutter and "cutter" in saved:
            job.cutter.restore(saved["cutter"])
        if job.llm.precision.scales_loss:
            self._scaler.load_state_dict(self.state.loss_scaler)
        self._saving.owes_evaluation = bool(saved.get("owes_evaluation", False))
        job.ranks.exchanged("restored", lambda: True)  # to read it may take longer than a collective waits

    def run(self, stop: threading.Event) -> None:
        """Train to the run's end, and return once the last checkpoint is written.

        Raises KeyboardInterrupt of a Problem, with the state saved, once `stop` is set.
        """
        try:
            with self._job.ranks.awaited():
                self._run(stop)
            self._saving.settle()
            if stop.is_set():  # since the ranks asked one another; one that has left the loop already has ended by now
                raise self._stopped()
        except BrimError as error:
            with _both_told(error):
                self._saving.settle()
            if isinstance(error, PeerError) and stop.is_set():  # all were asked, and another one has not waited
                stopped = Problem(what=f"stopped amid step {self.state.step + 1}, which is not saved")
                raise interruption(stopped, *error.problems) from None
            raise
        finally:
            self._saving.close()

    def _run(self, stop: threading.Event) -> None:
        job, state = self._job, self.state
        self._peaks.most_bytes()  # what loading took counts, too
        if self._saving.owes_evaluation:
            self._end_stretch()
        while self._goes_on:
            samples_before = state.consumed_samples
            for record in self._step(stop):
                job.observer.write(record)
            if self._saving.is_done:
                self._saving.settle()
            if job.length.is_checkpoint(
                state.step, samples_before=samples_before, samples_after=state.consumed_samples
            ):
                self._end_stretch()
            if self._together.stops(stop):
                self._stop()
        if any(job.ranks.exchanged("stopping", stop.is_set)):  # since the last sum
            self._stop()
        self._together.end()

    def _stop(self) -> NoReturn:
        self._saving.save()
        with suppress(PeerError):  # the state is saved
            self._together.end()
        raise self._stopped()

    def _stopped(self) -> KeyboardInterrupt:
        return interruption(
            Problem(
                what=f"stopped after step {self.state.step}",
                where=str(self._job.store.folder.parent),
                fix="continue with --resume, in Python with resume=True",
            )
        )

    @property
    def _goes_on(self) -> bool:
        job, state = self._job, self.state
        return state.consumed_samples < job.length.total_samples and not job.stopping.is_over(state)

    def _step(self, stop: threading.Event) -> list[Mapping[str, Any]]:
        """Do one update on one effective batch; return its records, to be written once its tensors are freed."""
        job, state = self._job, self.state
        started = time.perf_counter()
        size = self._begin()
        indices = self._next_rows(size)
        learning_rate = job.learning_rate(
            consumed_samples=state.consumed_samples, batch_samples=len(indices), size=size
        )
        # Added up by Python: between passes of the model numpy's own sums take twice as long as this.
        num_tokens = sum(job.rows.lengths[indices].tolist())
        num_supervised = sum(job.rows.num_supervised[indices].tolist())
        outcome = self._accumulate(indices, num_supervised)
        failure = outcome if isinstance(outcome, OutOfMemoryError) else None
        if failure is not None and not job.ranks.are_several:
            raise self._saved_first(failure)
        if isinstance(outcome, OutOfMemoryError):
            outcome = StepOutcome.nothing(job.llm.device)
        busy_s = time.perf_counter() - started
        try:
            share = self._together.share(stop, busy_s, has_failed=failure is not None)
            loss, norm = self._update.clipped(outcome, share)
        except OutOfMemoryError as error:
            self._gradient.drop()
            restore_random_states(outcome.random_before)
            if not job.ranks.is_first:  # which alone can save, and does not know of it
                raise
            raise self._saved_first(error) from None
        failed = self._together.hear()
        if failed:
            self._gradient.drop()
            restore_random_states(outcome.random_before)
            raise self._saved_first(failure or job.ranks.peer_failed(failed))
        self._gradient.measure_noise(outcome, num_rows=len(indices))
        not_finite = self._update(
            outcome, loss=loss, norm=norm, size=size, learning_rate=learning_rate, saved_step=self._saving.newest_step
        )
        state.step += 1
        state.consumed_samples += len(indices)
        state.num_tokens += num_tokens
        state.num_supervised_tokens += num_supervised
        self._course.stepped(size)
        peak_bytes = self._peaks.most_bytes()  # 130 microseconds on a GPU, so not asked again as the next step begins
        if not_finite is not None:
            left_out = {**not_finite.record(), **state.counts()}
            return [left_out, *self._points(self._course.left_out(state.consumed_samples))]
        noise = self._course.take_noise(self._gradient.noise)
        point = self._course.take_loss(
            loss=loss, num_supervised_tokens=num_supervised, consumed_samples=state.consumed_samples
        )
        record = {
            "step": state.step,
            "split": "train",
            "loss": loss,
            "learning_rate": learning_rate,
            "effective_batch_size": len(indices),
            "num_micro_batches": len(outcome.parts),
            **state.counts(),
            "seconds": round(time.perf_counter() - started, 6),
            "peak_bytes": peak_bytes,
            **noise,
            **self._together.fields(peak_bytes),
        }
        return [record, *self._points(point)]

    def _points(self, point: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
        return [] if point is None else [{"step": self.state.step, **point, **self.state.counts()}]

    def _begin(self) -> int:
        """Return the rows of the next step, of which an epoch's end may cut some; a change is an event."""
        size = self._course.size(self.state.consumed_samples)
        event = self._course.switch(size)
        if event is not None:
            self._job.observer.write({"step": self.state.step + 1, **event})
        return size

    def _next_rows(self, size: int) -> NDArray[np.intp]:
        job, consumed = self._job, self.state.consumed_samples
        left = job.length.total_samples - consumed
        return rows_of_step(num_rows=len(job.rows), seed=job.seed, consumed_samples=consumed, size=min(size, left))[1]

    def _accumulate(self, indices: NDArray[np.intp], num_supervised: int) -> StepOutcome | OutOfMemoryError:
        """Sum the gradient of the mean loss over supervised tokens; or return the error that names a row."""
        job = self._job
        if job.ranks.are_several and job.llm.row_dropout is None:
            # Not by row, masks are drawn by each rank for itself; a resumed run draws the same.
            torch.manual_seed(zlib.crc32(f"{job.seed} {self.state.step} {job.ranks.rank}".encode()))
        self._peaks.begin()
        try:
            outcome = self._gradient.sum(
                indices,
                num_supervised,
                step=self.state.step,
                measures_noise=self._course.measures(self.state.step),
            )
        except OutOfMemoryError as error:
            cutter = self._job.cutter
            if self._job.in_lockstep:
                raise self._noted(error) from None
            return of_a_row(
                error,
                step=self.state.step + 1,
                predicted_bytes=self._last_event.get("predicted_bytes"),
                cap_bytes=cutter.cap_bytes if isinstance(cutter, ByLength) else None,
                settings=self._job.settings,
            )
        # The optimizer's state is born in the first update, and the prediction counts it.
        if self.state.step and not outcome.num_out_of_memory:
            self._peaks.end(part.micro_batch for part in outcome.parts)
        return outcome

    def _noted(self, error: OutOfMemoryError) -> OutOfMemoryError:
        """Leave a note for the next start, which then cuts smaller: here the other ranks wait for this one already."""
        job, step, failed = self._job, self.state.step + 1, self._gradient.failed()
        change = None if failed is None else job.cutter.lower(failed[0])
        batch = "a pass of no rows" if failed is None else f"rows {', '.join(map(str, failed[1]))} (numbered from 0)"
        fix = f"{error.problems[0].fix}; or {for_a_row(job.settings)}"
        if change is not None:
            fix = f"continue with --resume: micro-batches then get at most {change.after:,} {change.unit}"
            folder = RunFolder(job.store.folder.parent)
            folder.note_cap(job.ranks.rank, {**job.cutter.state(), "unit": change.unit, "step": step})
        return OutOfMemoryError(replace(error.problems[0], where=f"step {step:,}, {batch}", fix=fix))

    def _saved_first(self, error: BrimErrorT) -> BrimErrorT:
        """Save what has been learned before the run ends; return what to raise then."""
        if self._job.in_lockstep:
            return error  # the other ranks, which would have to write their parts, are elsewhere
        step = self.state.step
        with _both_told(error):
            if step:
                self._saving.save()
        return with_checkpoint(error, step=step)

    def _end_stretch(self) -> None:
        """Evaluate and save. Where evaluation runs out of memory, save; the resumed run then evaluates first."""
        self._saving.settle()
        try:
            self._evaluate()
        except (OutOfMemoryError, PeerError) as error:
            self._saving.owes_evaluation = True
            raise self._saved_first(error) from None
        if self._saving.owes_evaluation:
            self._saving.owes_evaluation, self._saving.saved_step = False, None
        self._saving.save(beside=self._goes_on)
        self._peaks.most_bytes()  # as does what evaluation took

    def _evaluate(self) -> None:
        job, state = self._job, self.state
        if job.evaluate is None:
            return
        job.sync_logs()  # an evaluation takes long, and lines that wait for others would wait for it
        started = time.perf_counter()
        by_split = job.evaluate()
        seconds = round(time.perf_counter() - started, 6)
        for split, metrics in by_split.items():
            record = {"step": state.step, "split": split, **metrics, "seconds": seconds}
            # A step has a line with this split, too.
            job.observer.write({**record, "event": "evaluation"} if split == "train" else record)
        if "validation" in by_split:
            state.improve(by_split["validation"][job.stopping.metric], higher_is_better=job.stopping.higher_is_better)

    def _hear(self, event: Mapping[str, Any], step: int | None = None) -> None:
        """Write an event of a step; None: the step that is being made."""
        if event["event"] == "oom":
            self._num_out_of_memory += 1
            self._last_event = event
        self._together.write({"step": self.state.step + 1 if step is None else step, **event})


def _scaler_of(job: TrainJob) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(job.llm.device.type, enabled=job.llm.precision.scales_loss)
    if job.ranks.are_several:  # it makes its scale with the first loss, and a rank may have no row yet
        scaler.scale(torch.zeros((), device=job.llm.device))
    return scaler


@contextmanager
def _both_told(error: BrimError) -> Iterator[None]:
    """Raise an error of this one's class that tells both, where the block raises one, too."""
    try:
        yield
    except BrimError as other:
        raise type(error)(*dict.fromkeys((*error.problems, *other.problems))) from other


_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_TOGETHER_S = 2.0


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C (or SIGTERM) sets: the step ends and is saved. A second one ends at once.

    Where several processes train, those that come together count as one: a scheduler signals a launcher and its
    processes, and the launcher passes that on. Outside the main thread, where signals cannot be caught, the event is
    never set.
    """
    event, together_s = threading.Event(), _TOGETHER_S if Place.of_environment().world_size > 1 else 0.0
    asked_at = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if not event.is_set():
            asked_at = time.monotonic()
        elif time.monotonic() - asked_at >= together_s:
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, request) for number in _SIGNALS}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interruption(*problems: Problem) -> KeyboardInterrupt:
    """Return Python's own exception for Ctrl-C, which tells what was saved and how to go on.

    When Python exits, torch._dynamo imports tabulate, whose `eval` makes Python forget that it was interrupted: it
    would leave with 1 instead of 130. So that is imported before.
    """
    with suppress(ImportError):
        importlib.import_module("tabulate")
    return KeyboardInterrupt(*problems)
