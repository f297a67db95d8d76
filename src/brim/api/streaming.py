"""One response as pieces of text, as it is made."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TypeAlias

from brim.api.evaluation import respond
from brim.api.inference import constraint_of, engine_by_hand, settings_of
from brim.api.planned_generation import plan_of_one, require_fits
from brim.api.session import Session
from brim.data import TextEncoder, TokenRows
from brim.errors import InputError, Problem
from brim.infer.growing_text import GrowingText
from brim.infer.kept_cache import KeptCache
from brim.infer.passes import base_model
from brim.infer.response import FinishReason
from brim.infer.slots_support import why_not_slots
from brim.infer.stream import stream_tokens
from brim.models.llm import LLM

Pieces: TypeAlias = Generator[str, None, FinishReason]  # none of them empty; then the reason for the end


def stream_text(llm: LLM, session: Session, prompt: TokenRows, *, kept: KeptCache | None = None) -> Pieces:
    """The response to one prompt, in pieces that join up to what `respond` gives.

    An architecture that brim's own engine cannot generate with says all at the end. kept: see KeptCache; who keeps one
    sees to memory.budget.
    Raises InputError, at once, for settings that only transformers' `generate` knows, and for what memory.budget does
    not hold.
    """
    settings, reason = settings_of(llm, session), require_streamable(llm, session)
    if kept is None:
        require_budget(llm, session, prompt)
    if reason:
        return _in_one_piece(llm, session, prompt)
    (row,) = prompt
    tokens = stream_tokens(
        llm.model,
        row.prompt().input_ids.tolist(),
        key=row.key,
        settings=settings,
        seed=session.config.random_seed,
        device=llm.device,
        precision=llm.precision,
        constraint=constraint_of(session, settings),
        kept=kept,
    )
    return _pieces(tokens, session.encoder)


def require_streamable(llm: LLM, session: Session) -> str:
    """Raise InputError for settings with which no response can be given while it is made.

    Returns why the architecture cannot do it either, empty where it can.
    """
    architecture = base_model(llm.model)
    reason = why_not_slots(type(architecture), architecture.config, settings_of(llm, session))
    if reason.startswith("generation."):
        raise InputError(
            Problem(
                what=f"a response cannot be given while it is made: {reason}",
                where="generation",
                fix="leave the key as it is by default, or ask for the whole response at once",
            )
        )
    return reason


def require_budget(llm: LLM, session: Session, prompt: TokenRows) -> None:
    """Raise InputError for a prompt that is predicted not to fit into memory.budget with its response."""
    plan = plan_of_one(llm, session, prompt_tokens=int(prompt.lengths[0]))
    if plan is not None:
        require_fits(plan)


def require_one(prompts: TokenRows) -> None:
    """Raise InputError for several prompts, whose responses would come one after the other."""
    if len(prompts) != 1:
        raise InputError(
            Problem(
                what=f"{len(prompts):,} prompts cannot be answered piece by piece at once",
                expected="one prompt with stream=True",
                fix="call `generate` once a prompt, or without stream, which answers all of them together",
            )
        )


def _pieces(tokens: Generator[int, None, FinishReason], encoder: TextEncoder) -> Pieces:
    text = GrowingText(encoder)
    with closing(tokens):
        while True:
            try:
                token = next(tokens)
            except StopIteration as ended:
                finish_reason: FinishReason = ended.value
                break
            if piece := text.add(token):
                yield piece
    if piece := text.rest():
        yield piece
    return finish_reason


def _in_one_piece(llm: LLM, session: Session, prompt: TokenRows) -> Pieces:
    response = respond(engine_by_hand(llm, session, batch_rows=1), session, prompt).iloc[0]
    if response["response"]:
        yield response["response"]
    finish_reason: FinishReason = response["finish_reason"]
    return finish_reason
