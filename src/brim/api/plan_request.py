"""What a plan is asked for: a configuration, a device and rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brim.config import Config, FinetuneTrainer
from brim.data import TokenRows
from brim.data.order import rows_of_step
from brim.memory.device import Device
from brim.models.folder import ModelFolder
from brim.planning.candidates import Task
from brim.planning.plan import Way
from brim.train.length import RunLength

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training run that is to be planned."""

    config: Config  # resolved for the device, but for what a plan decides
    folder: ModelFolder
    architecture: PretrainedConfig
    device: Device
    is_at_hand: bool  # the run will take place on this very device
    rows: TokenRows
    length: RunLength
    has_begun: bool = False  # it goes on as it was begun: nothing but its cuts is open
    is_sized_by_memory: bool = False  # its effective batch is the largest that fits, of those up to its own

    @property
    def trainer(self) -> FinetuneTrainer:
        assert isinstance(self.config.trainer, FinetuneTrainer), "there is no plan where nothing is trained"
        return self.config.trainer

    @property
    def is_bounded_by_memory(self) -> bool:
        """Whether the sizes that it asks for depend on how many rows fit together."""
        return self.is_sized_by_memory or (self.trainer.batch_increase_function is not None and not self.has_begun)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Positions of the rows as the first epoch takes them; each epoch has another order, of the same kind."""
        num_rows, seed = len(self.rows), self.config.random_seed
        return rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=0, size=num_rows)[1]

    @cached_property
    def task(self) -> Task:
        """What the run is to do, whichever way it goes."""
        batch_size = self.trainer.batch_size
        effective = min(self.length.largest_size, len(self.rows))
        return Task(
            lengths=self.rows.lengths[self.order],
            effective_batch_size=effective,
            fixed_rows=None if batch_size == "auto" else min(batch_size, effective),
            largest=self.trainer.use_maximum_batch_size,
        )

    def config_of(self, way: Way) -> Config:
        """The configuration that goes this way."""
        # Where chunks are not asked for, whether the architecture allows them shows once it is built.
        chunked = self.trainer.chunked_loss if way.chunked_loss else False
        update = {"enable_gradient_checkpointing": way.gradient_checkpointing, "chunked_loss": chunked}
        return self.config.model_copy(update={"trainer": self.trainer.model_copy(update=update)})
