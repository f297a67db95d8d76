"""A model's figures on the rows of a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from brim.api.inference import engine_by_hand
from brim.api.prompts import continuable
from brim.api.results import EvaluateResult
from brim.api.session import Say, Session, say_nothing
from brim.config import Config, FinetuneTrainer
from brim.data import Entry, Source, TextEncoder, TokenRows, prompts_of
from brim.data.prompt import prompter
from brim.data.texts import Texts
from brim.infer.engine import respond_to
from brim.infer.evaluate import score_rows
from brim.infer.metrics import loss_interval, summarize
from brim.infer.rows_at_once import Batches, RowsAtOnce
from brim.infer.text_metrics import text_metrics
from brim.models.llm import LLM

_ROWS_WITHOUT_A_PLAN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Prompts to write a text for, and the text that the data has for each."""

    prompts: TokenRows
    references: Sequence[str]


def evaluate(
    llm: LLM,
    session: Session,
    rows: TokenRows,
    *,
    split: str,
    batches: Batches,
    asked: Asked | None = None,
    say: Say = say_nothing,
) -> EvaluateResult:
    """Loss, perplexity and accuracies of rows with answers.

    asked: where given, the model's own texts are compared with the data's, for BLEU, ROUGE and exact match.
    """
    scores = score_rows(
        llm.model,
        rows,
        pad_id=session.encoder.pad_id,
        batch_rows=batches,
        device=llm.device,
        precision=llm.precision,
        head=llm.head,
    )
    metrics: dict[str, float] = summarize(scores)
    if asked is not None:
        responses = respond(llm, session, asked.prompts, batch_rows=said(rows_to_generate(session.config), say))[
            "response"
        ].tolist()
        metrics |= text_metrics(responses, asked.references)
    frame = pd.DataFrame(
        {
            "row": scores.keys,
            "loss": scores.loss,
            "num_correct": scores.num_correct,
            "num_supervised": scores.num_supervised,
        }
    )
    return EvaluateResult(split=split, metrics=metrics, loss_interval=loss_interval(scores), rows=frame)


def asked_of(source: Source, session: Session, rows: TokenRows, *, split: str) -> Asked:
    """What to write a text for, and the answers as the data has them, whole even where tokens are cut.

    rows: with answers, in the order of the source. Of a conversation, the last answer is asked for.
    """
    asked = prompter(session.config, source, with_answers=True, encoder=session.encoder, with_examples=False)
    batches = asked.texts(rows.keys)
    references = [answer for batch in batches for answer in _answers(batch, session.encoder)]
    if session.config.chat is None:
        return Asked(prompts=rows.prompts(), references=references)
    every = prompts_of(source, session.config, session.encoder, only=split).rows
    return Asked(prompts=every.take(np.flatnonzero(np.isin(every.keys, rows.keys))), references=references)


def answerable(
    source: Source, session: Session, rows: TokenRows, *, split: str
) -> tuple[TokenRows, Asked, list[Entry]]:
    """The rows whose prompts can be continued, what to write a text for, and what happened to the others."""
    asked = asked_of(source, session, rows, split=split)
    kept = continuable(asked.prompts, session, source, split=split)
    references = [asked.references[position] for position in kept.positions.tolist()]
    return rows.take(kept.positions), Asked(prompts=kept.prompts, references=references), kept.entries


def _answers(batch: Texts, encoder: TextEncoder) -> list[str]:
    """Answers as a model's text is read: a conversation's without the template's tokens around it."""
    if batch.chats is None:
        return batch.answers
    tokens = encoder.encode(batch.answers, special_tokens=False)
    return [
        encoder.decode(ids, skip_special_tokens=True) if chat.reply is None else chat.reply
        for ids, chat in zip(tokens, batch.chats, strict=True)
    ]


def size_for_generating(config: Config) -> str:
    """The trainer's key that says how many rows are generated for at once."""
    return "eval_batch_size" if isinstance(config.trainer, FinetuneTrainer) else "batch_size"


def rows_to_generate(config: Config) -> int:
    """How many rows are generated for at once."""
    given = getattr(config.trainer, size_for_generating(config))
    return _ROWS_WITHOUT_A_PLAN if given in ("auto", None) else int(given)


def said(num_rows: int, say: Say) -> RowsAtOnce:
    """So many rows together, or fewer once memory has run out; then it is said."""
    return RowsAtOnce(num_rows, on_smaller=lambda smaller: say(str(smaller)))


def respond(
    llm: LLM,
    session: Session,
    prompts: TokenRows,
    *,
    batch_rows: int | RowsAtOnce,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> pd.DataFrame:
    """The model's text for each prompt: columns response, finish_reason, num_prompt_tokens, num_response_tokens.

    on_batch: told how many prompts have got their response, each time that some have.
    """
    encoder = session.encoder
    responses = respond_to(engine_by_hand(llm, session, batch_rows=batch_rows), prompts, on_batch=on_batch)
    frame: pd.DataFrame = pd.DataFrame(
        {
            "response": [encoder.decode(r.token_ids, skip_special_tokens=True) for r in responses],
            "finish_reason": [r.finish_reason for r in responses],
            "num_prompt_tokens": prompts.lengths,
            "num_response_tokens": [len(r.token_ids) for r in responses],
        }
    )
    return frame
