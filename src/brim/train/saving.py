"""Save the state of a run: when it is copied or written by whom, and what is told of it.

The first rank writes what all have alike, beside training where there is room for a copy. Of sharded weights and states
each rank writes its part into the same folder, while training stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from brim.batching.memory import or_explain, random_states, second_try
from brim.train.checkpoints import CheckpointWriter, TrainState, optimizer_state, trained_weights, write_parts
from brim.train.job import TrainJob
from brim.train.schedule import BatchCourse
from brim.train.update import failure_event, while_saving

T = TypeVar("T")


class Saving:
    """Write checkpoints of a job's state.

    hear: is called with each allocation that failed and was tried once more, and the step that was being saved.
    """

    def __init__(
        self,
        job: TrainJob,
        state: TrainState,
        scaler: torch.amp.GradScaler,
        course: BatchCourse,
        hear: Callable[[Mapping[str, Any], int], None],
    ) -> None:
        self._job, self._state, self._scaler, self._course, self._hear = job, state, scaler, course, hear
        self.saved_step = state.step if state.step else None
        self.owes_evaluation = False  # the last one ran out of memory
        self._writer = CheckpointWriter(job.store)
        self._begun_step: int | None = None  # of the checkpoint that is being written
        self._stood_s = 0.0  # for that one

    def save(self, *, beside: bool = False) -> None:
        """Save the state, unless it is saved. beside: return once it is copied, where there is room for a copy."""
        self.settle()
        step = self._state.step
        if self.saved_step == step:
            return
        if self._job.sharded is not None and not self._job.ranks.is_first:
            self._write_part(Path(self._job.ranks.heard("folder")))
        self._job.ranks.first_does("checkpoint", lambda: self._write_checkpoint(step, beside=beside))
        if not self._job.ranks.is_first:
            self.saved_step = step

    def settle(self) -> None:
        """Return once the checkpoint that has begun is written. Raises CheckpointError and OutOfMemoryError."""
        step, started = self._begun_step, time.perf_counter()
        if step is None:
            return
        try:
            self._tried_twice(self._writer.finish, step=step)
        finally:
            self._begun_step = None
        self.saved_step = step
        seconds = round(self._stood_s + time.perf_counter() - started, 6)
        self._job.observer.write({"step": step, "seconds": seconds, "event": "checkpoint"})

    @property
    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, also of one that is being written; None: there is none."""
        return self.saved_step if self._begun_step is None else self._begun_step

    @property
    def is_done(self) -> bool:
        """Return whether a checkpoint that was written beside training is there, so that `settle` will not wait."""
        return self._writer.is_done

    def close(self) -> None:
        """Wait for what is being written, however the run has ended."""
        self._writer.close()

    def _have_parts_written(self, folder: Path) -> None:
        """Have all ranks write into the folder of a checkpoint what they have of its tensors."""
        self._job.ranks.told("folder", lambda: str(folder))
        self._write_part(folder)

    def _write_part(self, folder: Path) -> None:
        """Write this rank's part, and return once all are written. Raises CheckpointError; PeerError for another's."""
        job = self._job
        tensors = {"model": trained_weights(job.llm.model), "optimizer": optimizer_state(job.optimizer)[0]}
        job.ranks.exchanged("parts", lambda: write_parts(folder, tensors, rank=job.ranks.rank, ranks=job.ranks.size))

    def _write_checkpoint(self, step: int, *, beside: bool) -> None:
        started, ways = time.perf_counter(), iter((beside, False))  # the second is taken where a copy finds no memory
        is_beside = self._tried_twice(lambda: self._begin_checkpoint(beside=next(ways)), step=step)
        self._begun_step, self._stood_s = step, time.perf_counter() - started
        if not is_beside:
            self.settle()

    def _tried_twice(self, action: Callable[[], T], *, step: int) -> T:
        """Return what a part of saving this step gives. Raises OutOfMemoryError where memory runs out twice."""
        return or_explain(
            lambda: second_try(
                action, on_failure=lambda message: self._hear(failure_event("checkpoint", message), step)
            ),
            lambda message: while_saving(message, step=step, done=self._state.step, saved_step=self.saved_step),
        )

    def _begin_checkpoint(self, *, beside: bool) -> bool:
        """Return whether it is written beside training; else `settle` writes it."""
        job, state = self._job, self._state
        state.loss_scaler = self._scaler.state_dict()
        state.batch_course = self._course.state()
        weights = trained_weights(job.llm.model)
        tensors, numbers = optimizer_state(job.optimizer)
        num_bytes = sum(tensor.nbytes for tensor in (*weights.values(), *tensors.values()))
        parts = {"model": weights, "optimizer": tensors} if job.sharded is None else {}
        beside = beside and bool(parts) and num_bytes <= job.copy_room_bytes
        logs = job.sync_logs()
        self._writer.begin(
            state.step,
            tensors={**parts, "random": random_states()},
            state={
                "train": asdict(state),
                "optimizer": numbers,
                "rates": job.rates.state(),
                "cutter": job.cutter.state(),
                "course": job.length.course(),
                "owes_evaluation": self.owes_evaluation,
                "row_masks": None if job.llm.row_dropout is None else job.llm.row_dropout.masks,
                "settings": job.settings,
                "logs": logs,
            },
            best_step=state.best_step,
            beside=beside,
            others=None if job.sharded is None else self._have_parts_written,
        )
        return beside
