"""How long a run is: steps, samples, and after which steps it is evaluated and saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """A run in steps and samples. An epoch's last step takes the rows that are left, so it may be smaller."""

    num_rows: int
    effective_batch_size: int  # rows of a step
    total_steps: int
    checkpoint_every_steps: int

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
        return step % self.checkpoint_every_steps == 0 or step == self.total_steps


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
    every = steps_per_checkpoint or -(-steps_per_epoch // max(checkpoints_per_epoch, 1))
    return RunLength(
        num_rows=num_rows,
        effective_batch_size=effective_batch_size,
        total_steps=train_steps if train_steps is not None else epochs * steps_per_epoch,
        checkpoint_every_steps=every,
    )
