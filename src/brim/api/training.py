"""One training run, from data to the model folder."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Mapping
from pathlib import Path

from brim.api.evaluation import settings_of
from brim.api.results import TrainResult
from brim.api.session import Say, Session
from brim.config import Config, FinetuneTrainer, dump, load_config
from brim.data import Prepared, Source
from brim.errors import ConfigError, InputError, OutputError, Problem
from brim.files import write_text
from brim.infer.evaluate import score_rows
from brim.infer.metrics import summarize
from brim.models.device import device_name
from brim.models.llm import LLM, load_llm
from brim.train.card import CardFacts, model_card
from brim.train.checkpoint import Checkpoint, CheckpointStore
from brim.train.export import export_model
from brim.train.interrupt import stop_request
from brim.train.loop import Loop
from brim.train.metrics_log import MetricsLog
from brim.train.observer import Observer, Observers
from brim.train.run_folder import RunFolder, create_run_folder, write_environment
from brim.train.setup import build_job, length_of, rows_digest
from brim.train.state import TrainState
from brim.train.tensorboard_log import TensorBoardLog
from brim.train.tensors import restore_weights


def train(
    session: Session,
    source: Source,
    prepared: Prepared,
    *,
    output_directory: Path,
    resume: bool,
    observer: Observer,
    say: Say,
) -> tuple[LLM, TrainResult]:
    """Train as the session's configuration says; the trained model and the run's result.

    Raises OutputError when the folder is taken, ConfigError when another run is to be continued, Interrupted on Ctrl-C
    (after a checkpoint).
    """
    trainer = session.config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    if not len(prepared.splits["train"]):
        raise InputError(Problem(what="no row is left to train on", where=source.name, fix="look at the split's key"))
    run = create_run_folder(output_directory, resume=resume)
    checkpoint, state = _where_it_stands(run, session, prepared, resume=resume, say=say)
    # Loaded first: a base model that turns out to be unusable leaves no half-begun run behind.
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    _write_head(run, session, trainer, prepared, checkpoint=checkpoint)
    store = CheckpointStore(run.checkpoints)
    observers = Observers([MetricsLog(run.metrics), TensorBoardLog(run.tensorboard), observer])
    evaluated = _evaluated_splits(trainer, prepared)
    job = build_job(
        session.config,
        trainer,
        llm,
        prepared.splits["train"],
        pad_id=session.encoder.pad_id,
        evaluate=(lambda: _evaluate(llm, session, trainer, prepared, evaluated)) if evaluated else None,
        store=store,
        observer=observers,
    )
    loop = Loop(job, state)
    if checkpoint is not None:
        loop.restore(checkpoint)
    started = time.perf_counter()
    observers.start(first_step=state.step, total_steps=job.length.total_steps)
    try:
        with stop_request() as stop:
            loop.run(stop)
        seconds = time.perf_counter() - started
        llm.model.eval()
        _take_best(llm, store, loop.state, say)
        metrics = _evaluate(llm, session, trainer, prepared, _splits_of_the_card(trainer, prepared))
        if "test" in metrics:
            observers.write({"step": loop.state.step, "split": "test", **metrics["test"]})
    finally:
        observers.close()
    export_model(llm, run.model, generation=settings_of(llm, session))
    rows = {split: len(rows) for split, rows in prepared.splits.items()}
    facts = CardFacts(
        base_model=session.folder.name,
        dataset=Path(source.name).name,
        rows=rows,
        metrics=metrics,
        state=loop.state,
        version=importlib.metadata.version("brim"),
    )
    write_text(run.card, model_card(session.config, facts))
    return llm, TrainResult(
        output_directory=run.path,
        num_steps=loop.state.step,
        best_step=loop.state.best_step,
        metrics=metrics,
        num_rows=rows,
        seconds=seconds,
    )


def _where_it_stands(
    run: RunFolder, session: Session, prepared: Prepared, *, resume: bool, say: Say
) -> tuple[Checkpoint | None, TrainState]:
    """The checkpoint to continue from and its state; a fresh state where there is none."""
    digest = rows_digest(prepared.splits["train"])
    if not resume:
        return None, TrainState(rows_digest=digest)
    checkpoint, refused = CheckpointStore(run.checkpoints).load_newest()
    for line in refused:
        say(line)
    if checkpoint is None:
        say(f"nothing to continue in {run.path}: the run starts anew")
        return None, TrainState(rows_digest=digest)
    if run.config.exists():
        _require_same_config(session.config, run)
    state = TrainState(**checkpoint.state["train"])
    if state.rows_digest != digest:
        raise OutputError(
            Problem(
                what="the training rows are not those that this run was started with",
                where=str(run.path),
                expected="the same data, template, limits and tokenizer",
                fix="restore the data, or train anew into another folder",
            )
        )
    say(f"continuing after step {state.step:,} ({state.consumed_samples:,} samples)")
    return checkpoint, state


def _require_same_config(config: Config, run: RunFolder) -> None:
    before, now = _flat(load_config(run.config).config.model_dump()), _flat(config.model_dump())
    # The data may have moved: its rows are compared, not its path.
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key != "dataset"]
    if changed:
        raise ConfigError(
            *(
                Problem(
                    what=f"{key} is {_shown(now.get(key))}, but this run was started with {_shown(before.get(key))}",
                    where=str(run.config),
                    fix="set it back, or train anew into another folder",
                )
                for key in changed
            )
        )


def _shown(value: object) -> str:
    """A value as YAML writes it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _write_head(
    run: RunFolder, session: Session, trainer: FinetuneTrainer, prepared: Prepared, *, checkpoint: Checkpoint | None
) -> None:
    """What the folder holds from the start on."""
    rows = prepared.splits["train"]
    length = length_of(trainer, num_rows=len(rows))
    plan = {
        "total_steps": length.total_steps,
        "steps_per_epoch": length.steps_per_epoch,
        "total_samples": length.total_samples,
        "tokens_per_epoch": int(rows.lengths.sum()),
        "supervised_tokens_per_epoch": int(rows.num_supervised.sum()),
        "rows": {split: len(split_rows) for split, split_rows in prepared.splits.items()},
        "choices": [{"key": c.key, "value": c.value, "reason": c.reason} for c in session.choices],
    }
    write_text(run.plan, json.dumps(plan, indent=1) + "\n")
    prepared.ledger.write(run.ledger)
    if checkpoint is None:
        write_text(run.config, dump(session.config))
        write_environment(run, device=device_name(session.device))


def _evaluated_splits(trainer: FinetuneTrainer, prepared: Prepared) -> tuple[str, ...]:
    if trainer.skip_all_evaluation:
        return ()
    wanted = ("train", "validation") if trainer.evaluate_training_set else ("validation",)
    return tuple(split for split in wanted if len(prepared.splits[split]))


def _splits_of_the_card(trainer: FinetuneTrainer, prepared: Prepared) -> tuple[str, ...]:
    if trainer.skip_all_evaluation:
        return ()
    return tuple(split for split in ("validation", "test") if len(prepared.splits[split]))


def _evaluate(
    llm: LLM, session: Session, trainer: FinetuneTrainer, prepared: Prepared, splits: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    return {
        split: summarize(
            score_rows(
                llm.model,
                prepared.splits[split],
                pad_id=session.encoder.pad_id,
                batch_rows=trainer.eval_batch_size,
                device=llm.device,
                precision=llm.precision,
            )
        )
        for split in splits
    }


def _take_best(llm: LLM, store: CheckpointStore, state: TrainState, say: Say) -> None:
    """Put the weights of the best evaluation into the model, where they are not the last ones."""
    if state.best_step is None or state.best_step == state.step:
        return
    restore_weights(llm.model, store.load(state.best_step).tensors["model"])
    say(f"kept the weights of step {state.best_step:,}, the best on the validation rows")
