"""The engine that writes the responses of a session, as the configuration and the plan say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from brim.api.session import Session
from brim.data.chat_end import end_ids_of_turns
from brim.data.chat_prompt import chat_template
from brim.data.label_tokens import label_tokens
from brim.infer.engine import Constraint, Engine
from brim.infer.generation_settings import generation_settings
from brim.infer.label_constraint import LabelConstraint
from brim.infer.room import FixedRoom
from brim.infer.rows_at_once import RowsAtOnce, rows_at_once
from brim.infer.static_engine import StaticEngine, end_ids
from brim.models.llm import LLM


def engine_for(llm: LLM, session: Session, *, batch_rows: int | RowsAtOnce) -> Engine:
    """What responds to the session's prompts."""
    at_once, settings = rows_at_once(batch_rows), settings_of(llm, session)
    return StaticEngine(
        llm.model,
        settings=settings,
        room=FixedRoom(at_once.num_rows, prefill_tokens=sys.maxsize),
        on_smaller=at_once.on_smaller,
        seed=session.config.random_seed,
        device=llm.device,
        precision=llm.precision,
        constraint=constraint_of(session, settings),
    )


def constraint_of(session: Session, settings: Mapping[str, Any]) -> Constraint | None:
    """To the labels of a category that asks for it. settings: what `settings_of` gives."""
    feature = session.config.output_features[0]
    decoder = feature.categories
    if decoder is None or not decoder.constrain_to_vocabulary:
        return None
    return LabelConstraint(label_tokens(feature.labels, session.encoder), end_ids=settings["eos_token_id"])


def settings_of(llm: LLM, session: Session) -> dict[str, Any]:
    """How the model generates, for transformers' GenerationConfig."""
    encoder, chat = session.encoder, session.config.chat
    ends = [] if chat is None else end_ids_of_turns(chat_template(chat, encoder), encoder)
    return generation_settings(
        session.config.generation,
        pad_id=encoder.pad_id,
        end_ids=list(dict.fromkeys([*ends, *end_ids(llm.model, encoder.eos_id)])),
    )
