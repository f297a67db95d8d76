"""A model's figures on the rows of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from brim.api.results import EvaluateResult
from brim.api.session import Session
from brim.config import Config
from brim.data import Source, TokenRows
from brim.data.prompt import prompter
from brim.infer.evaluate import score_rows
from brim.infer.generate import end_ids, generate
from brim.infer.generation_settings import generation_settings
from brim.infer.metrics import loss_interval, summarize
from brim.infer.text_metrics import text_metrics
from brim.models.llm import LLM


def evaluate(
    llm: LLM,
    session: Session,
    rows: TokenRows,
    *,
    split: str,
    batch_rows: int,
    references: Sequence[str] | None = None,
) -> EvaluateResult:
    """Loss, perplexity and accuracies of rows with answers.

    references: each row's answer as text; where given, the model's own texts are compared with them, for BLEU, ROUGE
    and exact match.
    """
    scores = score_rows(
        llm.model,
        rows,
        pad_id=session.encoder.pad_id,
        batch_rows=batch_rows,
        device=llm.device,
        precision=llm.precision,
    )
    metrics: dict[str, float] = summarize(scores)
    if references is not None:
        responses = respond(llm, session, rows.prompts(), batch_rows=batch_rows)["response"].tolist()
        metrics |= text_metrics(responses, references)
    frame = pd.DataFrame(
        {
            "row": scores.keys,
            "loss": scores.loss,
            "num_correct": scores.num_correct,
            "num_supervised": scores.num_supervised,
        }
    )
    return EvaluateResult(split=split, metrics=metrics, loss_interval=loss_interval(scores), rows=frame)


def references_of(source: Source, config: Config, rows: TokenRows) -> list[str]:
    """The answers of these rows (in the order of the source) as the data has them, whole even where tokens are cut."""
    batches = prompter(config, source, with_answers=True).texts(rows.keys)
    return [answer for batch in batches for answer in batch.answers]


def respond(llm: LLM, session: Session, prompts: TokenRows, *, batch_rows: int, **progress: Any) -> pd.DataFrame:
    """The model's text for each prompt: columns response, finish_reason, num_prompt_tokens, num_response_tokens."""
    encoder = session.encoder
    responses = generate(
        llm.model,
        prompts,
        settings=settings_of(llm, session),
        batch_rows=batch_rows,
        seed=session.config.random_seed,
        device=llm.device,
        precision=llm.precision,
        **progress,
    )
    frame: pd.DataFrame = pd.DataFrame(
        {
            "response": [encoder.decode(r.token_ids, skip_special_tokens=True) for r in responses],
            "finish_reason": [r.finish_reason for r in responses],
            "num_prompt_tokens": prompts.lengths,
            "num_response_tokens": [len(r.token_ids) for r in responses],
        }
    )
    return frame


def settings_of(llm: LLM, session: Session) -> dict[str, Any]:
    """How the model generates, for transformers' GenerationConfig."""
    encoder = session.encoder
    return generation_settings(
        session.config.generation, pad_id=encoder.pad_id, end_ids=end_ids(llm.model, encoder.eos_id)
    )
