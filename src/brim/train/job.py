"""All that a training run is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from brim.batching.cutter import Cutter
from brim.config import GradientClippingConfig
from brim.data import TokenRows
from brim.models.logit_head import LogitHead
from brim.models.precision import Precision
from brim.models.row_dropout import RowDropout
from brim.train.checkpoint import CheckpointStore
from brim.train.learning_rate import LearningRate
from brim.train.length import RunLength
from brim.train.observer import Observer
from brim.train.state import TrainState
from brim.train.update_rates import UpdateRates

Metrics: TypeAlias = Mapping[str, float]
Evaluate: TypeAlias = Callable[[], Mapping[str, Metrics]]  # split -> its metrics
SyncLogs: TypeAlias = Callable[[], Mapping[str, Any]]  # what is to be known of the logs, as JSON, once on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Which validation metric counts, and how many evaluations without improvement end the run."""

    metric: str = "loss"
    higher_is_better: bool = False
    patience: int = -1  # evaluations; -1: never

    def is_over(self, state: TrainState) -> bool:
        return 0 <= self.patience <= state.evaluations_without_improvement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What the loop runs. Model, optimizer, rates and cutter change as it goes; their state is in its checkpoints."""

    model: nn.Module
    head: LogitHead | None  # the loss is computed in chunks; None: all logits stand at once
    rows: TokenRows
    pad_id: int
    device: torch.device
    precision: Precision
    optimizer: Optimizer
    rates: UpdateRates  # of the optimizer
    learning_rate: LearningRate
    length: RunLength
    measure_every: int | None = None  # steps between measurements of the gradient's noise; None: never
    cutter: Cutter
    clipping: GradientClippingConfig | None
    on_nonfinite: Literal["stop", "skip"]
    seed: int
    evaluate: Evaluate | None
    stopping: Stopping
    store: CheckpointStore
    observer: Observer
    sync_logs: SyncLogs = dict  # before a checkpoint is written, which a resumed run goes by
    row_dropout: RowDropout | None = None  # to be told which rows a pass is for
    settings: Mapping[str, Any] = field(default_factory=dict)  # kept with each checkpoint, as JSON
