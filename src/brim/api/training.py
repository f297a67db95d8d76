"""One training run, from data to the model folder."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from brim.api.chat import template_texts
from brim.api.forward_planning import batches_for
from brim.api.inference import settings_of
from brim.api.results import TrainResult
from brim.api.resuming import in_order, where_it_stands, with_kernels_of
from brim.api.run_plan import plan_of_run
from brim.api.session import Say, Session, with_choices
from brim.api.trial import counted_state_bytes
from brim.config import Config, FinetuneTrainer, dump
from brim.data import Prepared, Source, TokenRows
from brim.errors import CheckpointError, InputError, Problem
from brim.files import write_text, writing
from brim.infer.evaluate import score_rows
from brim.infer.metrics import summarize
from brim.infer.rows_at_once import Batches, RowsAtOnce, Smaller
from brim.models.device import device_name
from brim.models.llm import LLM, load_llm
from brim.models.quantization import unquantised_experts
from brim.train.card import CardFacts, model_card
from brim.train.checkpoint import Checkpoint, CheckpointStore
from brim.train.export import export_model
from brim.train.interrupt import stop_request
from brim.train.length import RunLength
from brim.train.loop import Loop
from brim.train.metrics_log import MetricsLog
from brim.train.observer import Observer, Observers
from brim.train.optimizer import states_in_32_bits
from brim.train.run_folder import RunFolder, create_run_folder, held, write_environment
from brim.train.setup import build_job
from brim.train.state import TrainState
from brim.train.tensorboard_log import TensorBoardLog
from brim.train.tensors import restore_weights

Weights: TypeAlias = Literal["best", "last"]


def train(
    session: Session,
    source: Source,
    prepared: Prepared,
    *,
    output_directory: Path,
    resume: bool,
    replan: bool,
    observer: Observer,
    say: Say,
    weights: Weights = "best",
) -> tuple[LLM, TrainResult]:
    """Train as the session's configuration says; the trained model and the run's result.

    weights: those that are exported and evaluated in the end: of the best evaluation, if there was any, or the last.
    Raises OutputError when the folder is taken, ConfigError when another run is to be continued, Interrupted on Ctrl-C
    (after a checkpoint).
    """
    trainer = session.config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    if not len(prepared.splits["train"]):
        raise InputError(Problem(what="no row is left to train on", where=source.name, fix="look at the split's key"))
    existed = output_directory.exists()
    run = create_run_folder(output_directory, resume=resume)
    try:
        with held(run, resume=resume):
            return _train_in(
                run,
                session,
                trainer,
                source,
                prepared,
                resume=resume,
                replan=replan,
                observer=observer,
                say=say,
                weights=weights,
            )
    except BaseException:
        if not existed:
            with suppress(OSError):  # it holds what was begun
                run.path.rmdir()
        raise


def _train_in(
    run: RunFolder,
    session: Session,
    trainer: FinetuneTrainer,
    source: Source,
    prepared: Prepared,
    *,
    resume: bool,
    replan: bool,
    observer: Observer,
    say: Say,
    weights: Weights,
) -> tuple[LLM, TrainResult]:
    """The run itself, in a folder that no other process touches meanwhile."""
    checkpoint, state = where_it_stands(run, session, prepared, resume=resume, say=say)
    # Planned and loaded first: what turns out not to fit, or to be unusable, leaves no half-begun run behind.
    session = with_kernels_of(session, checkpoint, run)
    planned = plan_of_run(session, prepared, run, checkpoint, replan=replan, say=say)
    session = planned.session
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    session = with_choices(session, llm.choices)
    for choice in llm.choices:
        say(str(choice))
    launched = planned.launched(llm, say=say)
    _write_head(run, session, prepared, planned.request.length, launched.record, checkpoint=checkpoint)
    store = CheckpointStore(run.checkpoints)
    metrics_log = MetricsLog(run.metrics, mark=checkpoint.state["logs"]["metrics"] if checkpoint else None)
    tensorboard_log = TensorBoardLog(run.tensorboard)
    observers = Observers([metrics_log, tensorboard_log, observer])
    evaluated = _evaluated_splits(trainer, prepared)
    at_once = _batches(
        llm,
        session,
        trainer,
        [prepared.splits[split] for split in dict.fromkeys((*evaluated, *_splits_of_the_card(trainer, prepared)))],
        say=say,
        on_smaller=lambda smaller: observers.write({"step": state.step, **smaller.record()}),
    )
    job = build_job(
        session.config,
        trainer,
        llm,
        prepared.splits["train"],
        length=planned.request.length,
        cutter=launched.cutter,
        pad_id=session.encoder.pad_id,
        evaluate=(lambda: _evaluate(llm, session, at_once, prepared, evaluated)) if evaluated else None,
        store=store,
        observer=observers,
        sync_logs=lambda: _synced(metrics_log, tensorboard_log),
    )
    for line in _left_wide(session.config, trainer, llm):
        say(line)
    loop = Loop(job, state)
    torch.manual_seed(session.config.random_seed)  # a model can have dropout of its own
    if checkpoint is not None:
        store.tidy(state.step, best_step=state.best_step)
        loop.restore(checkpoint, keep_cutter=planned.goes_on)
        checkpoint = None  # its tensors would stay in memory for the whole run
    started = time.perf_counter()
    try:
        observers.start(
            first_step=state.step, total_steps=job.length.total_steps, total_samples=job.length.total_samples
        )
        if metrics_log.was_damaged:
            say(f"{run.metrics.name} is not what it was when the checkpoint was written: lines were changed or lost")
        with stop_request() as stop:
            loop.run(stop)
        seconds = time.perf_counter() - started
        launched.remember(loop.peaks, llm.device)
        llm.model.eval()
        if weights == "best":
            _take_best(llm, store, loop.state, say)
        elif loop.state.best_step is not None:
            loop.state.best_step = loop.state.step
        metrics = _evaluate(llm, session, at_once, prepared, _splits_of_the_card(trainer, prepared))
        if "test" in metrics:
            observers.write({"step": loop.state.step, "split": "test", **metrics["test"]})
    finally:
        observers.close()
    _tell_skipped(loop.state, run, say)
    _tell_out_of_memory(loop.num_out_of_memory, run, say)
    export_model(llm, run.model, generation=settings_of(llm, session), chat=template_texts(session))
    rows = {split: len(rows) for split, rows in prepared.splits.items()}
    _write_card(run, session, source, rows=rows, metrics=metrics, state=loop.state)
    return llm, TrainResult(
        output_directory=run.path,
        num_steps=loop.state.step,
        best_step=loop.state.best_step,
        metrics=metrics,
        num_rows=rows,
        seconds=seconds,
    )


def _synced(metrics_log: MetricsLog, tensorboard_log: TensorBoardLog) -> dict[str, Any]:
    """Bring the logs to the disk; what a checkpoint keeps of them, to know them again."""
    tensorboard_log.sync()
    return {"metrics": metrics_log.sync()}


def _tell_out_of_memory(num_times: int, run: RunFolder, say: Say) -> None:
    if num_times:
        say(
            f"memory ran out {num_times:,} {'time' if num_times == 1 else 'times'} in training, which was made up for: "
            f"each step was made once, on all of its rows. Look for `oom` in {run.metrics.name}"
        )


def _left_wide(config: Config, trainer: FinetuneTrainer, llm: LLM) -> Iterator[str]:
    """A line for each kind of weights or states that stay in more bits than were asked for."""
    experts = unquantised_experts(llm.model) if config.quantization is not None else None
    small = states_in_32_bits(trainer.optimizer, [p for p in llm.model.parameters() if p.requires_grad])
    yield from filter(None, (experts, small))


def _tell_skipped(state: TrainState, run: RunFolder, say: Say) -> None:
    if state.num_skipped:
        say(
            f"{state.num_skipped:,} of {state.step:,} steps were left out, since their loss or gradient was "
            f"not finite: look for `skipped` in {run.metrics.name}"
        )


def _write_head(
    run: RunFolder,
    session: Session,
    prepared: Prepared,
    length: RunLength,
    planned: Mapping[str, Any],
    *,
    checkpoint: Checkpoint | None,
) -> None:
    """What the folder holds from the start on."""
    rows = prepared.splits["train"]
    plan = {
        "total_steps": length.total_steps,
        "total_samples": length.total_samples,
        "batch_schedule": [asdict(phase) for phase in length.schedule.phases],
        "tokens_per_epoch": int(rows.lengths.sum()),
        "supervised_tokens_per_epoch": int(rows.num_supervised.sum()),
        "rows": {split: len(split_rows) for split, split_rows in prepared.splits.items()},
        **planned,
        "choices": [{"key": c.key, "value": c.value, "reason": c.reason} for c in in_order(session.choices)],
    }
    _write(run.plan, json.dumps(plan, indent=1) + "\n")
    _write(run.config, dump(session.config))
    if checkpoint is None or not run.environment.exists():
        with writing(run.environment.name, run.environment):
            write_environment(run, device=device_name(session.device))
    prepared.ledger.write(run.ledger)


def _write_card(
    run: RunFolder,
    session: Session,
    source: Source,
    *,
    rows: Mapping[str, int],
    metrics: Mapping[str, Mapping[str, float]],
    state: TrainState,
) -> None:
    facts = CardFacts(
        base_model=session.folder.name,
        dataset=Path(source.name).name,
        rows=rows,
        metrics=metrics,
        state=state,
        version=importlib.metadata.version("brim"),
    )
    _write(run.card, model_card(session.config, facts))


def _write(path: Path, text: str) -> None:
    with writing(path.name, path):
        write_text(path, text)


def _evaluated_splits(trainer: FinetuneTrainer, prepared: Prepared) -> tuple[str, ...]:
    if trainer.skip_all_evaluation:
        return ()
    wanted = ("train", "validation") if trainer.evaluate_training_set else ("validation",)
    return tuple(split for split in wanted if len(prepared.splits[split]))


def _splits_of_the_card(trainer: FinetuneTrainer, prepared: Prepared) -> tuple[str, ...]:
    if trainer.skip_all_evaluation:
        return ()
    return tuple(split for split in ("validation", "test") if len(prepared.splits[split]))


def _batches(
    llm: LLM,
    session: Session,
    trainer: FinetuneTrainer,
    splits: Sequence[TokenRows],
    *,
    say: Say,
    on_smaller: Callable[[Smaller], None],
) -> Batches:
    """One limit for all evaluations of the run, planned with the optimizer's state; training has a limit of its own."""
    if not splits:
        return RowsAtOnce(1)  # nothing is evaluated
    state_bytes = counted_state_bytes(trainer, llm.model)
    return batches_for(session, splits, llm=llm, beside_bytes=state_bytes, say=say, on_smaller=on_smaller)


def _evaluate(
    llm: LLM, session: Session, at_once: Batches, prepared: Prepared, splits: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    return {
        split: summarize(
            score_rows(
                llm.model,
                prepared.splits[split],
                pad_id=session.encoder.pad_id,
                batch_rows=at_once,
                device=llm.device,
                precision=llm.precision,
                head=llm.head,
            )
        )
        for split in splits
    }


def _take_best(llm: LLM, store: CheckpointStore, state: TrainState, say: Say) -> None:
    """Put the weights of the best evaluation into the model, where they are not the last ones."""
    if state.best_step is None or state.best_step == state.step:
        return
    try:
        best = store.load_tensors(state.best_step, "model")
    except CheckpointError as error:
        say(f"{error.problems[0].what}: the weights of the last step, {state.step:,}, are kept instead of the best")
        state.best_step = state.step
        return
    restore_weights(llm.model, best)
    say(f"kept the weights of step {state.best_step:,}, the best on the validation rows")
