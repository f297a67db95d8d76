"""The engine that writes the responses of a session, as the configuration and the plan say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from brim.api.session import Session
from brim.data.chat_end import end_ids_of_turns
from brim.data.chat_prompt import chat_template
from brim.data.label_tokens import label_tokens
from brim.errors import ConfigError, Problem
from brim.infer.engine import Constraint, Engine
from brim.infer.generation_settings import generation_settings
from brim.infer.label_constraint import LabelConstraint
from brim.infer.paged_engine import PagedEngine
from brim.infer.passes import base_model
from brim.infer.room import USUAL_PASS_TOKENS, FixedRoom, Room
from brim.infer.rows_at_once import RowsAtOnce, Smaller, rows_at_once
from brim.infer.slots_engine import SlotsEngine
from brim.infer.slots_support import why_not_slots
from brim.infer.static_engine import StaticEngine, end_ids
from brim.models.llm import LLM
from brim.planning.engine_choice import PAGED, SLOTS, STATIC, UNREFILLED


def engine_by_hand(llm: LLM, session: Session, *, batch_rows: int | RowsAtOnce) -> Engine:
    """What responds to the session's prompts, so many at a time."""
    at_once = rows_at_once(batch_rows)
    room = FixedRoom(at_once.num_rows, prefill_tokens=USUAL_PASS_TOKENS)
    return engine_for(llm, session, room=room, on_smaller=at_once.on_smaller)


def engine_for(
    llm: LLM,
    session: Session,
    *,
    room: Room,
    on_smaller: Callable[[Smaller], None] = lambda smaller: None,
    kind: str | None = None,
) -> Engine:
    """What responds to the session's prompts.

    on_smaller: told each time that fewer rows go on together. kind: where it was chosen already; default: as
    `generation.engine` says; vLLM, which loads the weights itself, is made elsewhere. Raises ConfigError for an engine
    that cannot do what the configuration asks.
    """
    settings = settings_of(llm, session)
    how: dict[str, Any] = {
        "settings": settings,
        "room": room,
        "seed": session.config.random_seed,
        "device": llm.device,
        "precision": llm.precision,
        "constraint": constraint_of(session, settings),
        "on_smaller": on_smaller,
    }
    asked = kind or session.config.generation.engine
    base = base_model(llm.model)
    against = why_not_slots(type(base), base.config, settings)
    if asked == PAGED:
        return PagedEngine(llm.model, **how)
    if asked == SLOTS and against:
        raise ConfigError(cannot(asked, against))
    if asked == STATIC or against:
        return StaticEngine(llm.model, **how)
    return SlotsEngine(llm.model, refill=asked != UNREFILLED, **how)


def cannot(engine: str, why: str) -> Problem:
    """An engine that was asked for does not do what the other keys ask."""
    return Problem(
        what=f"generation.engine is {engine}, and {why}", where="generation.engine", fix="set generation.engine: auto"
    )


def constraint_of(session: Session, settings: Mapping[str, Any]) -> Constraint | None:
    """To the labels of a category that asks for it. settings: what `settings_of` gives."""
    feature = session.config.output_features[0]
    decoder = feature.categories
    if decoder is None or not decoder.constrain_to_vocabulary:
        return None
    if not feature.labels:
        raise ConfigError(
            Problem(
                what=f"the labels of `{feature.name}` are not known, to which decoder.constrain_to_vocabulary holds it",
                where="output_features.0.decoder.match",
                fix="name the labels in output_features.0.preprocessing.vocab, or take the folder of a run",
            )
        )
    return LabelConstraint(label_tokens(feature.labels, session.encoder), end_ids=settings["eos_token_id"])


def settings_of(llm: LLM, session: Session) -> dict[str, Any]:
    """How the model generates, for transformers' GenerationConfig."""
    return settings_with(session, end_ids(llm.model, session.encoder.eos_id))


def settings_with(session: Session, own_ends: Sequence[int]) -> dict[str, Any]:
    """As `settings_of`. own_ends: tokens at which the model stops by itself."""
    encoder, chat = session.encoder, session.config.chat
    ends = [] if chat is None else end_ids_of_turns(chat_template(chat, encoder), encoder)
    return generation_settings(
        session.config.generation,
        pad_id=encoder.pad_id,
        end_ids=list(dict.fromkeys([*ends, *own_ends])),
    )
