"""The engine that writes the responses of a session, as the configuration and the plan say."""

from __future__ import annotations

import sys

from brim.api.session import Session
from brim.data.chat_end import end_ids_of_turns
from brim.data.chat_prompt import chat_template
from brim.infer.engine import Engine
from brim.infer.generation_settings import generation_settings
from brim.infer.room import FixedRoom
from brim.infer.rows_at_once import RowsAtOnce, rows_at_once
from brim.infer.static_engine import StaticEngine, end_ids
from brim.models.llm import LLM


def engine_for(llm: LLM, session: Session, *, batch_rows: int | RowsAtOnce) -> Engine:
    """What responds to the session's prompts."""
    at_once = rows_at_once(batch_rows)
    return StaticEngine(
        llm.model,
        settings=settings_of(llm, session),
        room=FixedRoom(at_once.num_rows, prefill_tokens=sys.maxsize),
        on_smaller=at_once.on_smaller,
        seed=session.config.random_seed,
        device=llm.device,
        precision=llm.precision,
    )


def settings_of(llm: LLM, session: Session) -> dict[str, object]:
    """How the model generates, for transformers' GenerationConfig."""
    encoder, chat = session.encoder, session.config.chat
    ends = [] if chat is None else end_ids_of_turns(chat_template(chat, encoder), encoder)
    return generation_settings(
        session.config.generation,
        pad_id=encoder.pad_id,
        end_ids=list(dict.fromkeys([*ends, *end_ids(llm.model, encoder.eos_id)])),
    )
