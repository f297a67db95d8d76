"""Train one run, from data to the model folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from brim.config import load_config
from brim.config.schema import OptimizerConfig
from brim.data import Prepared, prepare, slip_notes
from brim.data.read import Data, Source, read
from brim.data.tokens import TokenRows
from brim.distributed import ALONE, Place, Ranks, Sharded, group_of_one, joined
from brim.errors import CheckpointError
from brim.models import LLM, model_note, no_library_warnings, require_trainable, unquantised_experts
from brim.notes import Note, Say, status, warning
from brim.session import Session, choice_notes, open_session, with_choices, with_dataset, with_labels, with_rows
from brim.train import Loop, Observer, RunFolder, RunLogs, build_job, export_model, stop_request
from brim.train.checkpoints import CheckpointStore, TrainState, restore_weights
from brim.units import format_count
from brim.workflows.prediction import scorer
from brim.workflows.runs import (
    RunNotes,
    TrainOrder,
    TrainResult,
    model_card,
    settings_of,
    template_texts,
    with_day_of_run,
)
from brim.workflows.training.following import (
    Evaluations,
    among,
    begin_together,
    follow,
    prepared_by_one,
    sent,
    sent_launch,
    step_seconds,
    with_least_memory,
)
from brim.workflows.training.launch import Launched, room_for_copy, saving_note
from brim.workflows.training.planning import plan_of_run, rows_note
from brim.workflows.training.resuming import as_begun, where_it_stands, write_head
from brim.workflows.training.sharding import (
    Loaded,
    is_sharded_run,
    loaded_for,
    lower_by_notes,
    sharding_note,
    whole_weights,
)

Weights: TypeAlias = Literal["best", "last"]
Evaluate: TypeAlias = Callable[[], dict[str, dict[str, float]]]  # metrics of each split


def prepared_for(
    session: Session,
    dataset: Data,
    *,
    resumed: RunFolder | None,
    notes: Sequence[str],
    say: Say,
    ranks: Ranks = ALONE,
) -> tuple[Session, Source | None, Prepared]:
    """Read and split the data set of a run, with notes on what was chosen for it and what happened to its rows.

    resumed: the run that is continued. notes: on the configuration, which come first. ranks: of which one on each
    machine does it, for all that are there.
    """
    if ranks.are_several:
        return prepared_by_one(
            ranks, session, lambda: prepared_for(session, dataset, resumed=resumed, notes=notes, say=say)
        )
    session = with_dataset(session, dataset)
    if resumed is not None:
        session = with_day_of_run(session, resumed)
    require_trainable(session.config, session.folder)
    say(status("reading the data"))
    source = read(dataset)
    session, slips = with_labels(session, source), slip_notes(session.config, source)
    prepared = prepare(source, session.config, session.encoder, context_length=session.folder.context_length)
    session = with_rows(session, prepared.num_rows["train"])
    say(rows_note(prepared))
    for line in [*notes, *choice_notes(session.choices), *slips, *prepared.notes, *prepared.ledger.summary()]:
        say(line)
    return session, source, prepared


def train_configuration(order: TrainOrder, *, observer: Observer, say: Say, weights: Weights = "best") -> Prepared:
    """Carry out an order, in a process that was started for it, one of several or not. Return the prepared rows.

    Raises what `train` raises, and errors of the configuration and the data.
    """
    loaded, output = load_config(order.config, order.overrides), Path(order.output_directory)
    data = loaded.config.dataset if order.dataset is None else order.dataset
    assert data is not None, "the process that started this one has checked it"
    resume, notes = order.resume and output.exists(), RunNotes(say)
    resumed = RunFolder(output) if resume else None
    place = Place.of_environment() if order.num_processes > 1 else Place()
    with joined(place, offloads=loaded.config.memory.offload == "weights") as ranks:
        if ranks.is_first:
            RunFolder(output).check(resume=resume)
        opened = open_session(loaded.config, is_one_of_several=ranks.are_several)
        session, source, prepared = prepared_for(
            among(ranks, loaded.config, opened), data, resumed=resumed, notes=loaded.notes, say=notes, ranks=ranks
        )
        train(
            session,
            source,
            prepared,
            output_directory=output,
            resume=resume,
            observer=observer,
            say=notes,
            weights=weights,
            ranks=ranks,
        )
    return prepared


@no_library_warnings()
def train(
    session: Session,
    source: Source | None,
    prepared: Prepared,
    *,
    output_directory: Path,
    resume: bool,
    replan: bool = False,
    observer: Observer,
    say: RunNotes,
    weights: Weights = "best",
    ranks: Ranks = ALONE,
) -> tuple[LLM, TrainResult]:
    """Train as the session's configuration says. Return the trained model and the run's result.

    weights: which are exported and evaluated at the end: of the best evaluation, if there was any, or the last.
    ranks: that train together; the first plans and writes, and the others follow it.
    Raises OutputError when the folder is taken, ConfigError when another run is to be continued, and
    KeyboardInterrupt on Ctrl-C (after a checkpoint).
    """
    session = with_least_memory(ranks, session)
    if not ranks.is_first:
        return follow(session, prepared, RunFolder(output_directory), ranks)
    assert source is not None, "the first rank has read it"
    with ExitStack() as stack:
        if is_sharded_run(session.config, ranks.size):
            stack.enter_context(group_of_one(ranks, is_cuda=session.device.type == "cuda"))
        run = stack.enter_context(_folder(output_directory, resume=resume))
        checkpoint, state = where_it_stands(run, session, prepared, resume=resume, say=say)
        first_step = state.step
        # Planned and loaded first: what turns out not to fit, or to be unusable, leaves no half-begun run behind.
        planned = plan_of_run(as_begun(session, checkpoint, run), prepared, run, checkpoint, replan=replan, say=say)
        ranks.told("planned", lambda: sent(planned.session))
        session, loaded = _loaded(planned.session, ranks, say)
        llm, sharded = loaded.llm, loaded.sharded
        session, launched = planned.launched(llm, session, say=say, tries=sharded is None)
        is_lowered = lower_by_notes(run, launched.cutter, say)
        ranks.told("launched", lambda: sent_launch(session, launched, state, checkpoint))
        begin_together(ranks, session, prepared, loaded, step_s=step_seconds(launched.plan_in_force))
        write_head(run, session, prepared, launched.request.length, launched.record, checkpoint=checkpoint)
        say.keep_in(run, step=state.step)
        room_bytes, copy_bytes = (0, 0) if sharded else _room_for_copy(launched, say, session.num_processes)
        logs = RunLogs(run, observer, mark=checkpoint.state["logs"]["metrics"] if checkpoint else None)
        beside_bytes = loaded.beside_bytes + copy_bytes
        evaluate, evaluate_last = _evaluations(
            llm, session, prepared, state, logs, ranks, sharded, beside_bytes=beside_bytes, say=say
        )
        store, rows = CheckpointStore(run.checkpoints), prepared.splits["train"]
        loop = _loop(session, launched, llm, rows, state, evaluate, store, logs, room_bytes, ranks, sharded)
        for line in _with_more_bits(llm, session):
            say(line)
        torch.manual_seed(session.config.random_seed)  # a model can have dropout of its own
        if checkpoint is not None:
            store.tidy(state.step, best_step=state.best_step)
            loop.restore(checkpoint, keep_cutter=planned.cutter is not None and not is_lowered)
            checkpoint = None  # its tensors would stay in memory for the whole run
        with logs.open(launched.request.length, first_step=first_step):
            for line in _on_logs(logs, run):
                say(line)
            seconds = _ran(loop)
            launched.remember(loop.peaks, llm.device)
            ranks.told("weights", lambda: _settle_weights(weights, llm, store, state, say))
            metrics = evaluate_last()
        for line in _what_went_wrong(loop, run):
            say(line)
        whole = whole_weights(ranks, llm, sharded)
        result = _exported(run, session, source, prepared, llm, state, whole, metrics=metrics, seconds=seconds)
        ranks.told("exported", lambda: result.best_step)
        return llm, replace(result, num_new_steps=state.step - first_step)


def _room_for_copy(launched: Launched, say: Say, num_processes: int) -> tuple[int, int]:
    """Return the bytes that a copy of a checkpoint may take, and those that it takes where the run itself does."""
    plan, is_cpu = launched.plan_in_force, launched.request.device.is_cpu
    room_bytes = room_for_copy(plan, is_cpu=is_cpu, num_processes=num_processes)
    say(saving_note(plan, room_bytes))
    return room_bytes, plan.saved_bytes if plan is not None and is_cpu and plan.saved_bytes <= room_bytes else 0


def _evaluations(
    llm: LLM,
    session: Session,
    prepared: Prepared,
    state: TrainState,
    logs: RunLogs,
    ranks: Ranks,
    sharded: Sharded | None,
    *,
    beside_bytes: int,
    say: Say,
) -> tuple[Evaluate | None, Evaluate]:
    """Return what evaluates in training, None where nothing does, and what evaluates in the end.

    All share one limit on rows, with the optimizer's state beside them, and on a CPU the copy that a checkpoint is
    written from; training has another.
    """
    evaluations = Evaluations.of(session.config.finetune_trainer, prepared)
    score = scorer(
        llm,
        session,
        evaluations.splits,
        beside_bytes=beside_bytes,
        say=say,
        on_smaller=lambda smaller: logs.observers.write({"step": state.step, **smaller.record()}),
        ranks=ranks,
        sharded=sharded,
    )

    def evaluate_last() -> dict[str, dict[str, float]]:
        metrics = score(evaluations.in_the_end)
        if "test" in metrics:
            logs.observers.write({"step": state.step, "split": "test", **metrics["test"]})
        return metrics

    return (lambda: score(evaluations.during)) if evaluations.during else None, evaluate_last


def _ran(loop: Loop) -> float:
    """Train to the end, or until Ctrl-C. Return the seconds."""
    started = time.perf_counter()
    with stop_request() as stop:
        loop.run(stop)
    return time.perf_counter() - started


def _loop(
    session: Session,
    launched: Launched,
    llm: LLM,
    rows: TokenRows,
    state: TrainState,
    evaluate: Evaluate | None,
    store: CheckpointStore,
    logs: RunLogs,
    room_bytes: int,
    ranks: Ranks,
    sharded: Sharded | None,
) -> Loop:
    """Build the loop over these rows as it was planned."""
    job = build_job(
        session.config,
        launched.request.trainer,
        llm,
        rows,
        length=launched.request.length,
        cutter=launched.cutter,
        pad_id=session.encoder.pad_id,
        evaluate=evaluate,
        store=store,
        observer=logs.observers,
        sync_logs=logs.sync,
        copy_room_bytes=room_bytes,
        ranks=ranks,
        sharded=sharded,
    )
    return Loop(job, state)


@contextmanager
def _folder(path: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Yield the run's folder, locked against other processes; one that was made and stays empty is removed."""
    existed = path.exists()
    run = RunFolder.create(path, resume=resume)
    try:
        with run.held(resume=resume):
            yield run
    except BaseException:
        if not existed:
            with suppress(OSError):  # it is not empty
                run.path.rmdir()
        raise


def export_trained(
    llm: LLM, session: Session, run: RunFolder, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the model of a run, with how it generates and the template of its chats. weights: as in `export_model`."""
    generation, chat = settings_of(session, llm.model.generation_config), template_texts(session)
    export_model(llm, run.model, generation=generation, chat=chat, weights=weights)


def _exported(
    run: RunFolder,
    session: Session,
    source: Source,
    prepared: Prepared,
    llm: LLM,
    state: TrainState,
    weights: Mapping[str, torch.Tensor] | None,
    *,
    metrics: dict[str, dict[str, float]],
    seconds: float,
) -> TrainResult:
    """Write the model and its card."""
    export_trained(llm, session, run, weights)
    base, dataset = session.folder.name, Path(source.name).name
    card = model_card(session.config, base, dataset, rows=prepared.num_rows, metrics=metrics, state=state)
    run.write(run.card, card)
    return TrainResult(
        output_directory=run.path,
        num_steps=state.step,
        best_step=state.best_step,
        metrics=metrics,
        num_rows=prepared.num_rows,
        seconds=seconds,
        num_left_out=prepared.ledger.num_left_out(),
    )


def _loaded(session: Session, ranks: Ranks, say: Say) -> tuple[Session, Loaded]:
    """Load the model to train. Return the session, too, with what was chosen when the model was built."""
    say(status("loading the model"))
    loaded = loaded_for(ranks, session)
    llm, sharding = loaded.llm, sharding_note(ranks, session, loaded)
    for line in (model_note(session.config, llm, trains=True), *filter(None, [sharding]), *choice_notes(llm.choices)):
        say(line)
    return with_choices(session, llm.choices), loaded


def _with_more_bits(llm: LLM, session: Session) -> Iterator[str]:
    """Yield warnings of weights, and of states, that keep more bits than were asked for."""
    optimizer, weights = session.config.finetune_trainer.optimizer, llm.model.parameters()
    experts = unquantised_experts(llm.model) if session.config.quantization is not None else None
    states = states_in_32_bits(optimizer, [weight for weight in weights if weight.requires_grad])
    yield from (warning(line, topic="run") for line in (experts, states) if line)


def states_in_32_bits(settings: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]) -> str | None:
    """Return a line on the weights that are too small for 8-bit states; None where there are none."""
    least = settings.model_dump().get("min_8bit_size", 0)
    small = [parameter for parameter in parameters if parameter.numel() < least]
    if not small:
        return None
    elements = sum(parameter.numel() for parameter in small)
    return (
        f"{settings.type}: {len(small):,} of {len(parameters):,} trained weights, {elements:,} elements in all, have "
        f"fewer than {least:,} elements and keep 32-bit states (trainer.optimizer.min_8bit_size)"
    )


def _on_logs(logs: RunLogs, run: RunFolder) -> Iterator[Note]:
    """Yield lines on a log that is not written, and on one that is not what it was."""
    if not logs.tensorboard.is_there:
        yield Note("no TensorBoard files are written: pip install 'brim[tensorboard]'", kind="detail")
    if logs.metrics.was_damaged:
        damaged = f"{run.metrics.name} is not what it was when the checkpoint was written"
        yield warning(f"{damaged}: lines were changed or lost", topic="run")


def _settle_weights(weights: Weights, llm: LLM, store: CheckpointStore, state: TrainState, say: Say) -> int | None:
    """Put the weights into the model that are to be evaluated; return whose they are, where not the last ones."""
    llm.model.eval()
    if state.best_step is None or state.best_step == state.step:
        return None
    if weights == "last":
        state.best_step = state.step
        return None
    try:
        best = store.load_tensors(state.best_step, "model")
    except CheckpointError as error:
        say(f"{error.problems[0].what}: the weights of the last step, {state.step:,}, are kept instead of the best")
        state.best_step = state.step
        return None
    restore_weights(llm.model, best)
    say(f"kept the weights of step {state.best_step:,}, the best on the validation rows")
    return state.best_step


def _what_went_wrong(loop: Loop, run: RunFolder) -> Iterator[str]:
    """Yield a line on steps that were left out, and one on memory that ran out."""
    state, num_times = loop.state, loop.num_out_of_memory
    if state.num_skipped:
        were, their = ("was", "its") if state.num_skipped == 1 else ("were", "their")
        yield (
            f"{state.num_skipped:,} of {format_count(state.step, 'step')} {were} left out, since {their} loss or "
            f"gradient was not finite: look for `skipped` in {run.metrics.name}"
        )
    if num_times:
        yield (
            f"memory ran out {format_count(num_times, 'time')} in training, and the steps were repeated in smaller "
            f"micro-batches: each was made once, on all of its rows. Look for `oom` in {run.metrics.name}"
        )
