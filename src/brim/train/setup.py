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
from brim.train.learning_rate import LearningRate, require_room
from brim.train.length import RunLength
from brim.train.observer import Observer
from brim.train.optimizer import build_optimizer
from brim.train.run_clock import RunClock
from brim.train.update_rates import update_rates
from brim.units import parse_duration

# A measured step takes about 1.6 times another (benchmarks/noise_scale.py); once in ten steps that is 6%.
MEASURED_EVERY = 10


def build_job(
    config: Config,
    trainer: FinetuneTrainer,
    llm: LLM,
    rows: TokenRows,
    *,
    length: RunLength,
    cutter: Cutter,
    pad_id: int,
    evaluate: Evaluate | None,
    store: CheckpointStore,
    observer: Observer,
    sync_logs: SyncLogs = dict,
) -> TrainJob:
    """The job that a resolved configuration asks for."""
    optimizer = build_optimizer(trainer.optimizer, (p for p in llm.model.parameters() if p.requires_grad))
    return TrainJob(
        model=llm.model,
        head=llm.head,
        rows=rows,
        pad_id=pad_id,
        device=llm.device,
        precision=llm.precision,
        optimizer=optimizer,
        rates=update_rates(trainer, optimizer, final_size=length.schedule.final_size),
        learning_rate=learning_rate_of(trainer, rows, length, seed=config.random_seed),
        length=length,
        measure_every=measure_every(trainer),
        cutter=cutter,
        clipping=trainer.gradient_clipping,
        on_nonfinite=trainer.on_nonfinite,
        seed=config.random_seed,
        evaluate=evaluate,
        stopping=stopping_of(trainer),
        store=store,
        observer=observer,
        sync_logs=sync_logs,
        row_dropout=llm.row_dropout,
        settings=config.model_dump(mode="json"),
    )


def stopping_of(trainer: FinetuneTrainer) -> Stopping:
    """When evaluations end the run."""
    return Stopping(
        metric=trainer.validation_metric or "loss",
        higher_is_better=(trainer.validation_metric or "loss").endswith("accuracy"),
        patience=trainer.early_stop,
    )


def measure_every(trainer: FinetuneTrainer) -> int | None:
    """Steps between measurements of the gradient's noise; None: it is not asked for."""
    if trainer.noise_scale_every is not None or trainer.batch_adaptation is None:
        return trainer.noise_scale_every
    return MEASURED_EVERY


def learning_rate_of(trainer: FinetuneTrainer, rows: TokenRows, length: RunLength, *, seed: int) -> LearningRate:
    """The learning rate's course over a run of this length; fractions are of the run's samples.

    seed: of the rows' order. Raises ConfigError where warm-up and decay are longer than the run.
    """
    assert isinstance(trainer.learning_rate, float), "resolved before"
    schedule, total, final_size = trainer.learning_rate_scheduler, length.total_samples, length.schedule.final_size
    clock = RunClock(lengths=rows.lengths, seed=seed, total_samples=total, final_size=final_size)

    def samples(duration: str | None, fraction: float) -> int:
        return round(fraction * total) if duration is None else clock.samples(parse_duration(duration))

    warmup_samples = samples(schedule.warmup_length, schedule.warmup_fraction)
    decay_samples = samples(schedule.decay_length, schedule.decay_fraction)
    is_wsd = schedule.decay == "wsd"
    require_room(warmup_samples=warmup_samples, decay_samples=decay_samples if is_wsd else 0, total_samples=total)
    return LearningRate(
        peak=trainer.learning_rate,
        floor=schedule.eta_min,
        decay=schedule.decay or "constant",
        warmup_samples=warmup_samples,
        decay_samples=decay_samples,
        total_samples=total,
        scaling=trainer.batch_lr_scaling,
        final_size=final_size,
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
