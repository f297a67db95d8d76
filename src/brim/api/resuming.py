"""Where a run stands that is to be continued, and whether it may be continued as it is asked for now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from brim.api.session import Say, Session, with_choices
from brim.config import Choice, Config
from brim.data import Prepared
from brim.errors import CheckpointError, ConfigError, OutputError, Problem
from brim.train.checkpoint import Checkpoint, CheckpointStore
from brim.train.run_folder import RunFolder
from brim.train.setup import rows_digest
from brim.train.state import TrainState


def where_it_stands(
    run: RunFolder, session: Session, prepared: Prepared, *, resume: bool, say: Say
) -> tuple[Checkpoint | None, TrainState]:
    """The checkpoint to continue from and its state; a fresh state where there is none."""
    digest = rows_digest(prepared.splits[split] for split in ("train", "validation"))
    if not resume:
        return None, TrainState(rows_digest=digest)
    checkpoint, refused = CheckpointStore(run.checkpoints).load_newest()
    for line in refused:
        say(line)
    if checkpoint is None:
        say(f"nothing to continue in {run.path}: the run starts anew")
        return None, TrainState(rows_digest=digest)
    state = _state_of(checkpoint)
    as_before = with_plan_of(with_kernels_of(session, checkpoint, run), checkpoint, run)
    for line in _allowed_changes(as_before.config, checkpoint, run):
        say(line)
    if state.rows_digest != digest:
        raise OutputError(
            Problem(
                what="the training or validation rows are not those that this run was started with",
                where=str(run.path),
                expected="the same data, template, limits and tokenizer",
                fix="restore the data, or train anew into another folder",
            )
        )
    say(f"continuing after step {state.step:,} ({state.consumed_samples:,} samples)")
    return checkpoint, state


_KERNELS = ("model_parameters.attn_implementation", "trainer.chunked_loss")  # as they are chosen, one after the other
_PLANNED = ("trainer.enable_gradient_checkpointing",)


def with_kernels_of(session: Session, checkpoint: Checkpoint | None, run: RunFolder) -> Session:
    """The session with the checkpoint's way to compute loss and attention where none is asked for.

    No other is bit-equal. The reasons are those that the run's plan gives, so that it stays as it was written.
    """
    return _as_before(session, checkpoint, run, _KERNELS)


def with_plan_of(session: Session, checkpoint: Checkpoint, run: RunFolder) -> Session:
    """The session with what the run's own plan chose, where the configuration leaves it open."""
    return _as_before(session, checkpoint, run, _PLANNED)


def in_order(choices: Sequence[Choice]) -> list[Choice]:
    """As a run makes them that is not stopped: those that only a plan or the model could make come last."""
    late = (*_PLANNED, *_KERNELS)
    return sorted(choices, key=lambda choice: late.index(choice.key) if choice.key in late else -1)


def _as_before(session: Session, checkpoint: Checkpoint | None, run: RunFolder, chosen: tuple[str, ...]) -> Session:
    before = _flat(checkpoint.state["settings"]) if checkpoint is not None else {}
    now = _flat(session.config.model_dump(mode="json"))
    keys = [key for key in chosen if now[key] == "auto" and key in before]
    reasons = _reasons(run) if keys else {}
    return with_choices(
        session,
        [
            Choice(key=key, value=before[key], reason=reasons.get((key, before[key]), "as the run was started"))
            for key in keys
        ],
    )


def _reasons(run: RunFolder) -> dict[tuple[str, Any], str]:
    """Why each choice of the run's plan was made, by key and value; nothing where the plan is damaged."""
    try:
        choices = json.loads(run.plan.read_text(encoding="utf-8"))["choices"]
        return {(choice["key"], choice["value"]): choice["reason"] for choice in choices}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _state_of(checkpoint: Checkpoint) -> TrainState:
    saved = checkpoint.state["train"]
    if saved.keys() != {field.name for field in fields(TrainState)}:
        raise CheckpointError(
            Problem(
                what=f"the checkpoint of step {checkpoint.step} was written by another version of brim",
                expected="the version in the run's environment.json",
                fix="install that version, or train anew into another folder",
            )
        )
    return TrainState(**saved)


# What a run may be continued with although it was started otherwise: it changes the cut of a batch, the time that
# something takes or what is done after training, not what a step learns.
_MAY_CHANGE = (
    "dataset",  # the data may have moved: its rows are compared, not its path
    "backend.",
    "memory.",
    "generation.",
    "preprocessing.on_bad_row",  # what is left of the rows is compared, not why
    "preprocessing.on_overlong",
    "trainer.batch_size",
    "trainer.use_maximum_batch_size",
    "trainer.batch_search",
    "trainer.gradient_accumulation_steps",
    "trainer.eval_batch_size",
    "trainer.enable_gradient_checkpointing",
    "trainer.chunked_loss",
    "trainer.early_stop",
    "trainer.on_nonfinite",
)


def _allowed_changes(config: Config, checkpoint: Checkpoint, run: RunFolder) -> list[str]:
    """What has changed since the checkpoint was written. Raises ConfigError for what must not.

    The checkpoint's own settings count, which its digests guard: config.yaml may have been edited, or damaged.
    """
    before, now = _flat(checkpoint.state["settings"]), _flat(config.model_dump(mode="json"))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    refused = [key for key in changed if not key.startswith(_MAY_CHANGE)]
    if refused:
        raise ConfigError(
            *(
                Problem(
                    what=f"{key} is {_shown(now.get(key))}, but this run was started with {_shown(before.get(key))}",
                    where=str(run.config),
                    fix="set it back, or train anew into another folder",
                )
                for key in refused
            )
        )
    return [f"{key} is now {_shown(now.get(key))}; it was {_shown(before.get(key))}" for key in changed]


def _shown(value: object) -> str:
    """A value as YAML writes it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
