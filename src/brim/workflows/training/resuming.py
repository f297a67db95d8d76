"""Write what a run is begun with; find where a resumed run stands, and check that it may be resumed as asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias

from brim.config import Choice, moves_batch
from brim.config.schema import Config
from brim.config.text import dump
from brim.data import Prepared
from brim.data.tokens import TokenRows
from brim.errors import CheckpointError, ConfigError, OutputError, Problem
from brim.models import device_name
from brim.notes import Note, Say, warning
from brim.session import Session, with_choices
from brim.train import LearningRate, RunFolder, RunLength, stopping_of
from brim.train.checkpoints import Checkpoint, CheckpointStore, TrainState
from brim.units import format_count
from brim.workflows.runs import flat, read_json

# Choices that a plan or the model makes, in the order in which a run that is not resumed makes them.
_SIZES = ("trainer.epochs", "trainer.effective_batch_size")
_PLANNED = ("trainer.enable_gradient_checkpointing",)
_MODEL = ("model_parameters.attn_implementation", "model_parameters.kernels")
_KERNELS = (*_MODEL, "trainer.chunked_loss", "trainer.packing")
_WHERE_THEY_ARE = (("model_parameters.kernels", "liger"),)  # auto takes them again where they can be had


def write_head(
    run: RunFolder,
    session: Session,
    prepared: Prepared,
    length: RunLength,
    planned: Mapping[str, Any],
    *,
    checkpoint: Checkpoint | None,
) -> None:
    """Write what the folder holds from the start on: plan, configuration, environment and ledger."""
    rows = prepared.splits["train"]
    plan = {
        "total_steps": length.total_steps,
        "total_samples": length.total_samples,
        "batch_schedule": [asdict(phase) for phase in length.schedule.phases],
        "tokens_per_epoch": int(rows.lengths.sum()),
        "supervised_tokens_per_epoch": int(rows.num_supervised.sum()),
        "rows": prepared.num_rows,
        **planned,
        "choices": [{"key": c.key, "value": c.value, "reason": c.reason} for c in _in_order(session.choices)],
    }
    run.write(run.plan, json.dumps(plan, indent=1) + "\n")
    run.write(run.config, dump(session.config))
    if checkpoint is None or not run.environment.exists():
        run.write_environment(device=device_name(session.device))
    prepared.ledger.write(run.ledger)


def _in_order(choices: Sequence[Choice]) -> list[Choice]:
    """Order choices as a run makes them that is not resumed: those that take a plan or the model come last."""
    late = (*_SIZES, *_PLANNED, *_KERNELS)
    return sorted(choices, key=lambda choice: late.index(choice.key) if choice.key in late else -1)


def where_it_stands(
    run: RunFolder, session: Session, prepared: Prepared, *, resume: bool, say: Say
) -> tuple[Checkpoint | None, TrainState]:
    """Return the checkpoint to continue from and its state; a fresh state where there is none."""
    digest = _digest(prepared.splits["train"], prepared.splits["validation"])
    if not resume:
        return None, TrainState(rows_digest=digest)
    checkpoint, refused = CheckpointStore(run.checkpoints).load_newest()
    for line in refused:
        say(warning(line, topic="run"))
    if checkpoint is None:
        say(warning(f"nothing to continue in {run.path}: the run starts from the first step", topic="run"))
        return None, TrainState(rows_digest=digest)
    state = _state_of(checkpoint)
    as_before = with_plan_of(as_begun(session, checkpoint, run), checkpoint, run)
    # The sizes that are the run's own, and not what the configuration of today says.
    sizes = [str(choice) for choice in as_before.choices if choice.key in _SIZES and choice not in session.choices]
    for line in (*sizes, *_allowed_changes(as_before.config, checkpoint, run)):
        say(warning(line, topic="run"))
    if state.rows_digest != digest:
        raise OutputError(
            what="the training or validation rows are not those that this run was started with",
            where=str(run.path),
            expected="the same data, template, limits and tokenizer",
            fix="restore the data, or train into another folder",
        )
    checkpoint = _with_length_of(as_before.config, checkpoint, state, prepared.splits["train"], run)
    say(warning(_goes_on(as_before.config, checkpoint, state, prepared.splits["train"], run), topic="run"))
    return checkpoint, state


def _digest(*splits: TokenRows) -> str:
    """Return a digest of all that the loop sees of the rows, so that a run is not continued on other data."""
    digest = hashlib.sha256()
    for rows in splits:
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row.input_ids).to_bytes(8, "little"))
            digest.update(row.input_ids.tobytes())
            digest.update(row.supervised.tobytes())
    return digest.hexdigest()


def _goes_on(config: Config, checkpoint: Checkpoint, state: TrainState, rows: TokenRows, run: RunFolder) -> str:
    """Say where the run continues; or that it has ended, and how it is trained for longer."""
    trainer = config.finetune_trainer
    length = RunLength.of(trainer, rows, seed=config.random_seed, course=checkpoint.state["course"])
    stands = f"after step {state.step:,} ({format_count(state.consumed_samples, 'sample')})"
    if state.consumed_samples >= length.total_samples:
        asked = {key: getattr(trainer, key.partition(".")[2]) for key in reversed(_LENGTHS)}
        key, now = next((key, number) for key, number in asked.items() if number is not None)
        ended, more = "ended", f"{key}={2 * now}"
    elif stopping_of(trainer).is_over(state):
        ended, more = f"was ended early by trainer.early_stop: {trainer.early_stop},", "trainer.early_stop=-1"
    else:
        return f"continuing {stands}"
    return (
        f"nothing is left to train: the run {ended} {stands}, and its model and figures are written once more; "
        f"`brim train {run.path} --resume {more}` trains it for longer"
    )


def as_begun(session: Session, checkpoint: Checkpoint | None, run: RunFolder) -> Session:
    """Return the session with the choices that the run was begun with, where the configuration leaves them open.

    These are how loss and attention are computed, since no two kernels are equal to the bit, and the run's length and
    rows per update, which the memory or the defaults of another version may have decided. The reasons are those that
    the run's plan gives, so that plan.json stays as it was written.
    """
    return _as_before(session, checkpoint, run, (*_SIZES, *_KERNELS))


def begun_otherwise(session: Session, choices: Sequence[Choice], checkpoint: Checkpoint | None) -> Iterator[Note]:
    """Yield notes on kernels that the run was begun with and goes on without. choices: of what is open."""
    before = {} if checkpoint is None else _settings_of(checkpoint)
    now, chosen = flat(session.config.model_dump(mode="json")), {choice.key: choice for choice in choices}
    for key, old in _WHERE_THEY_ARE:
        choice = chosen.get(key)
        if before.get(key) == old and now[key] == "auto" and (choice is None or choice.value != old):
            reason = "the device is no GPU" if choice is None else choice.reason
            yield Note(f"{key}: the run was begun with {old}, and goes on without ({reason})")


def with_plan_of(session: Session, checkpoint: Checkpoint, run: RunFolder) -> Session:
    """Return the session with what the run's own plan chose, where the configuration leaves it open."""
    return _as_before(session, checkpoint, run, _PLANNED)


def _as_before(session: Session, checkpoint: Checkpoint | None, run: RunFolder, chosen: tuple[str, ...]) -> Session:
    if checkpoint is None:
        return session
    before, now = _settings_of(checkpoint), flat(session.config.model_dump(mode="json"))
    unset = tuple(_unset_sizes(session))
    kept = {
        key: before[key]
        for key in chosen
        if before.get(key, "auto") != "auto"
        and (now[key] == "auto" or (key in unset and now[key] != before[key]))
        and (key, before[key]) not in _WHERE_THEY_ARE
    }
    reasons = _reasons(run) if kept else {}
    began = "as the run was started"
    choices = [Choice(key=key, value=old, reason=reasons.get((key, old), began)) for key, old in kept.items()]
    return with_choices(session, choices)


def _settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings that the run was begun with; keys that came later have the value of before."""
    return {"trainer.packing": False, "model_parameters.kernels": "torch", **flat(checkpoint.state["settings"])}


def _unset_sizes(session: Session) -> Iterator[str]:
    """Yield those of the run's sizes that no key of the configuration decides."""
    trainer = session.config.finetune_trainer
    if "epochs" not in trainer.model_fields_set:
        yield "trainer.epochs"
    was_chosen = any(choice.key == "trainer.effective_batch_size" for choice in session.choices)
    if was_chosen and trainer.batch_size == "auto" and not moves_batch(trainer):
        yield "trainer.effective_batch_size"


def _reasons(run: RunFolder) -> dict[tuple[str, Any], str]:
    """Return the reason of each choice in the run's plan, by key and value; none where the plan is damaged."""
    try:
        return {(choice["key"], choice["value"]): choice["reason"] for choice in read_json(run.plan)["choices"]}
    except (KeyError, TypeError):
        return {}


def _state_of(checkpoint: Checkpoint) -> TrainState:
    saved = checkpoint.state["train"]
    if saved.keys() != {field.name for field in fields(TrainState)}:
        raise CheckpointError(
            what=f"the checkpoint of step {checkpoint.step} was written by another version of brim",
            expected="the version in the run's environment.json",
            fix="install that version, or train into another folder",
        )
    return TrainState(**saved)


# Keys that may change when a run is continued: they change how a batch is partitioned, the time that something takes or
# what is done after training, not what a step learns.
_MAY_CHANGE = (
    "dataset",  # the data may have moved: its rows are compared, not its path
    "backend.",
    "memory.",
    "generation.",
    "model_parameters.kernels",
    "preprocessing.on_bad_row",  # what is left of the rows is compared, not why
    "preprocessing.on_overlong",
    "preprocessing.drop_unlearnable",
    "preprocessing.max_dropped_fraction",
    "trainer.batch_size",
    "trainer.use_maximum_batch_size",
    "trainer.batch_search",
    "trainer.gradient_accumulation_steps",
    "trainer.eval_batch_size",
    "trainer.enable_gradient_checkpointing",
    "trainer.chunked_loss",
    "trainer.packing",
    "trainer.early_stop",
    "trainer.on_nonfinite",
)


# Keys of a feature: here, too, the rows that are left are compared, and a later version's defaults may differ.
_OF_ROWS = (".missing_value_strategy", ".fill_value")


def _allowed_changes(config: Config, checkpoint: Checkpoint, run: RunFolder) -> list[str]:
    """List what has changed since the checkpoint was written. Raises ConfigError for what must not change.

    The checkpoint's own settings count, which its digests guard: config.yaml may have been edited, or damaged.
    """
    before, now = _settings_of(checkpoint), flat(config.model_dump(mode="json"))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    refused = [key for key in changed if not key.startswith((*_MAY_CHANGE, *_LENGTHS)) and not key.endswith(_OF_ROWS)]
    if refused:
        raise ConfigError(
            *(
                Problem(
                    what=f"{key} is {_shown(now.get(key))}, but this run was started with {_shown(before.get(key))}",
                    where=str(run.config),
                    fix="set it back, or train into another folder",
                )
                for key in refused
            )
        )
    return [f"{key} is now {_shown(now.get(key))}; it was {_shown(before.get(key))}" for key in changed]


_LENGTHS = ("trainer.epochs", "trainer.train_steps", "trainer.train_samples")


_Settings: TypeAlias = Mapping[str, object]  # by dotted keys


def _with_length_of(
    config: Config, checkpoint: Checkpoint, state: TrainState, rows: TokenRows, run: RunFolder
) -> Checkpoint:
    """Return the checkpoint of a run that is as long as the configuration says now.

    Raises ConfigError where a run that had been started so long would not stand where this one does.
    """
    trainer, seed = config.finetune_trainer, config.random_seed
    before, now = _settings_of(checkpoint), flat(config.model_dump(mode="json"))
    changed = [key for key in _LENGTHS if before.get(key) != now[key]]
    if not changed:
        return checkpoint
    if trainer.batch_increase_function is not None:
        why: str | None = (
            "trainer.batch_increase_function was called for the first epochs alone, and is not called again"
        )
    else:
        started = RunLength.of(trainer, rows, seed=seed, course=checkpoint.state["course"])
        length = RunLength.of(trainer, rows, seed=seed)
        why = _why_not(
            state.consumed_samples,
            (started, LearningRate.of(trainer, rows, started, seed=seed)),
            (length, LearningRate.of(trainer, rows, length, seed=seed)),
            final_size_counts=trainer.batch_beta2_scaling is True,
        )
    if why is not None:
        raise ConfigError(_other_length(changed, before, now, why, config, run))
    return replace(checkpoint, state={**checkpoint.state, "course": length.course()})


def _why_not(
    consumed: int, was: tuple[RunLength, LearningRate], now: tuple[RunLength, LearningRate], *, final_size_counts: bool
) -> str | None:
    """Say why a run of another length would not stand where this one does; None where it would, to the bit.

    Every step so far must have had the same rows and the same learning rate.
    """
    (started, rate), (length, new_rate) = was, now
    if length.total_samples < consumed:
        return f"a run of that length ends after {length.total_samples:,} samples, and {consumed:,} are consumed"
    if final_size_counts and started.schedule.final_size != length.schedule.final_size:
        return "Adam's second beta depends on the batch with which the run ends (batch_beta2_scaling)"
    if length.adaptation is not None:
        is_alike = rate.decay == "constant" and replace(rate, total_samples=length.total_samples) == new_rate
        ended_early = consumed == started.total_samples and consumed % started.num_rows != 0
        return None if is_alike and not ended_early else "what it did so far depends on how long it is"
    steps = zip(started.steps_until(consumed), length.steps_until(consumed), strict=False)
    for step, (old, new) in enumerate(steps, start=1):
        if old != new:
            return (
                f"update {step:,} took {format_count(old[1], 'row')}, and in a run of that length it takes {new[1]:,}"
            )
        samples, num_rows, size = old
        ours, others = (each(consumed_samples=samples, batch_samples=num_rows, size=size) for each in (rate, new_rate))
        if ours != others:
            return (
                "its learning rate depends on how long it is: that of update "
                f"{step:,} was {ours:.6g}, and in a run of that length it is {others:.6g}"
            )
    return None


def _other_length(
    changed: Sequence[str], before: _Settings, now: _Settings, why: str, config: Config, run: RunFolder
) -> Problem:
    """Say why the run does not continue with another length, and which command trains its weights for longer."""
    what = " and ".join(
        f"{key} is {_shown(now[key])}, but this run was started with {_shown(before.get(key))}" for key in changed
    )
    is_adapted = config.adapter is not None
    weights = f"{'adapter.pretrained_adapter_weights' if is_adapted else 'base_model'}={run.model}"
    more = _more(before, now)
    command = f"brim train {run.config} --output-directory {run.path}-more {weights} {more}"
    first = "" if run.model.is_dir() else "finish it first, and "
    return Problem(
        what=f"{what}; it cannot continue so, since {why}",
        where=str(run.config),
        fix=f"set it back; or {first}train its weights further as a run of its own: {command}",
    )


def _more(before: _Settings, now: _Settings) -> str:
    """Return the override that asks for what was to be added."""
    for key in reversed(_LENGTHS):
        old, new = before.get(key), now[key]
        if isinstance(old, int) and isinstance(new, int) and old != new:
            return f"{key}={max(new - old, 1)}"
    return "trainer.epochs=1"


def _shown(value: object) -> str:
    """Return a value as YAML writes it."""
    return json.dumps(value, ensure_ascii=False, default=str)
