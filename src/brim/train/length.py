"""How long a run is: steps, samples, and after which steps it is evaluated and saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """A run in steps and samples. An epoch's last step takes the rows that are left, so it may be smaller."""

    num_rows: int
    effective_batch_size: int  # rows of a step
    total_steps: int
    steps_per_checkpoint: int  # 0: by checkpoints_per_epoch
    checkpoints_per_epoch: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.effective_batch_size)

    @property
    def total_samples(self) -> int:
        """Rows that the whole run consumes, counted with repetition."""
        epochs, steps = divmod(self.total_steps, self.steps_per_epoch)
        return epochs * self.num_rows + steps * self.effective_batch_size

    def is_checkpoint(self, step: int) -> bool:
        """Whether the run is evaluated and saved after this step, counted from 1."""
        if step == self.total_steps:
            return True
        if self.steps_per_checkpoint:
            return step % self.steps_per_checkpoint == 0
        return self._due_by(step) > self._due_by(step - 1)

    def _due_by(self, step: int) -> int:
        """Checkpoints until this step, of which each epoch has its number, evenly spread, the last at its end."""
        return step * min(self.checkpoints_per_epoch, self.steps_per_epoch) // self.steps_per_epoch


def run_length(
    *,
    num_rows: int,
    effective_batch_size: int,
    epochs: int,
    train_steps: int | None,
    steps_per_checkpoint: int = 0,
    checkpoints_per_epoch: int = 0,
) -> RunLength:
    """The length that the trainer's keys ask for. `train_steps` wins over `epochs`, as in Ludwig.

    Without a checkpoint key, there is one at each epoch's end. 0 means "not set".
    """
    steps_per_epoch = -(-num_rows // effective_batch_size)
    return RunLength(
        num_rows=num_rows,
        effective_batch_size=effective_batch_size,
        total_steps=train_steps if train_steps is not None else epochs * steps_per_epoch,
        steps_per_checkpoint=steps_per_checkpoint,
        checkpoints_per_epoch=max(checkpoints_per_epoch, 1),
    )
