"""From a resolved configuration, a model and its rows to a job for the loop."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from brim.batching.cutter import Cutter
from brim.config import Config, FinetuneTrainer
from brim.data import TokenRows
from brim.models.llm import LLM
from brim.train.checkpoint import CheckpointStore
from brim.train.job import Evaluate, Stopping, SyncLogs, TrainJob
from brim.train.learning_rate import LearningRate
from brim.train.length import RunLength, run_length
from brim.train.observer import Observer
from brim.train.optimizer import build_optimizer


def build_job(
    config: Config,
    trainer: FinetuneTrainer,
    llm: LLM,
    rows: TokenRows,
    *,
    cutter: Cutter,
    pad_id: int,
    evaluate: Evaluate | None,
    store: CheckpointStore,
    observer: Observer,
    sync_logs: SyncLogs = dict,
) -> TrainJob:
    """The job that a resolved configuration asks for."""
    length = length_of(trainer, num_rows=len(rows))
    return TrainJob(
        model=llm.model,
        head=llm.head,
        rows=rows,
        pad_id=pad_id,
        device=llm.device,
        precision=llm.precision,
        optimizer=build_optimizer(trainer.optimizer, (p for p in llm.model.parameters() if p.requires_grad)),
        learning_rate=learning_rate_of(trainer, length),
        length=length,
        cutter=cutter,
        clipping=trainer.gradient_clipping,
        on_nonfinite=trainer.on_nonfinite,
        seed=config.random_seed,
        evaluate=evaluate,
        stopping=Stopping(
            metric=trainer.validation_metric or "loss",
            higher_is_better=(trainer.validation_metric or "loss").endswith("accuracy"),
            patience=trainer.early_stop,
        ),
        store=store,
        observer=observer,
        sync_logs=sync_logs,
        row_dropout=llm.row_dropout,
        settings=config.model_dump(mode="json"),
    )


def length_of(trainer: FinetuneTrainer, *, num_rows: int) -> RunLength:
    """Steps and checkpoints of a run over this many rows."""
    assert isinstance(trainer.effective_batch_size, int), "resolved before"
    return run_length(
        num_rows=num_rows,
        effective_batch_size=trainer.effective_batch_size,
        epochs=trainer.epochs,
        train_steps=trainer.train_steps,
        steps_per_checkpoint=trainer.steps_per_checkpoint,
        checkpoints_per_epoch=trainer.checkpoints_per_epoch,
    )


def learning_rate_of(trainer: FinetuneTrainer, length: RunLength) -> LearningRate:
    """The learning rate's course; fractions are of the run's samples."""
    assert isinstance(trainer.learning_rate, float), "resolved before"
    schedule, total = trainer.learning_rate_scheduler, length.total_samples
    return LearningRate(
        peak=trainer.learning_rate,
        floor=schedule.eta_min,
        decay=schedule.decay or "constant",
        warmup_samples=round(schedule.warmup_fraction * total),
        decay_samples=round(schedule.decay_fraction * total),
        total_samples=total,
    )


def rows_digest(splits: Iterable[TokenRows]) -> str:
    """A digest of all that the loop sees of the rows, so that a run is not continued on other data."""
    digest = hashlib.sha256()
    for rows in splits:
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row.input_ids).to_bytes(8, "little"))
            digest.update(row.input_ids.tobytes())
            digest.update(row.supervised.tobytes())
    return digest.hexdigest()
