"""A model's figures on the rows of a data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from brim.api.forward_planning import batches_for
from brim.api.planned_generation import planned_engine
from brim.api.prompts import continuable
from brim.api.results import EvaluateResult, TrainResult
from brim.api.session import Say, Session, say_nothing
from brim.config import Config, FinetuneTrainer
from brim.config.labels import LabelReader
from brim.data import Entry, Ledger, Prepared, Source, TextEncoder, TokenRows, prompts_of
from brim.data.prompt import prompter
from brim.data.texts import Texts
from brim.infer.bootstrap import Measure, intervals, ratio
from brim.infer.engine import Engine, respond_to
from brim.infer.evaluate import Scores, score_rows
from brim.infer.label_metrics import label_measures
from brim.infer.labels import LabelCounts, extract, label_reader
from brim.infer.metrics import score_measures, summarize
from brim.infer.rows_at_once import Batches, RowsAtOnce
from brim.infer.text_metrics import exact_match, text_measures
from brim.models.llm import LLM
from brim.models.quiet import no_library_warnings
from brim.notes import status


def evaluate_splits(
    llm: LLM,
    session: Session,
    source: Source,
    prepared: Prepared,
    *,
    say: Say,
    on_batch: Callable[[int], None],
) -> TrainResult:
    """What `train` does with `trainer.type: none`, as in Ludwig."""
    trainer, splits = session.config.trainer, prepared.splits
    started = time.perf_counter()
    wanted = [] if trainer.skip_all_evaluation else ["train", "validation", "test"]
    if not trainer.evaluate_training_set:
        wanted = wanted[1:]
    metrics: dict[str, Mapping[str, float]] = {}
    for split in (split for split in wanted if len(splits[split])):
        rows, asked = splits[split], None
        if label_reader(session.config) is not None:
            rows, asked, entries = answerable(source, session, prepared, split=split)
            for line in Ledger(num_rows=len(splits[split]), entries=entries).summary():
                say(line)
        at_once = batches_for(session, [rows], llm=llm, say=say)
        found = evaluate(llm, session, rows, split=split, batches=at_once, asked=asked, say=say, on_batch=on_batch)
        metrics[split] = found.metrics
    return TrainResult(
        output_directory=None,
        num_steps=0,
        best_step=None,
        metrics=metrics,
        num_rows={split: len(rows) for split, rows in splits.items()},
        seconds=time.perf_counter() - started,
        num_left_out=prepared.ledger.num_left_out(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Prompts to write a text for, and the text that the data has for each."""

    prompts: TokenRows
    references: Sequence[str]


@no_library_warnings()
def evaluate(
    llm: LLM,
    session: Session,
    rows: TokenRows,
    *,
    split: str,
    batches: Batches,
    asked: Asked | None = None,
    say: Say = say_nothing,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> EvaluateResult:
    """Loss, perplexity and accuracies of rows with answers.

    asked: where given, the model's own texts are compared with the data's: for BLEU, ROUGE and exact match, or, of a
    category, for accuracy and F1 of its labels. on_batch: told how many more rows are done, first of those that are
    scored, then of the texts.
    """
    say(status("evaluating"))
    scores = scored(llm, session, rows, batches, on_batch=on_batch)
    figures, measures = summarize(scores), score_measures(scores)
    frame = pd.DataFrame(
        {
            "row": scores.keys,
            "loss": scores.loss,
            "num_correct": scores.num_correct,
            "num_supervised": scores.num_supervised,
        }
    )
    if asked is not None:
        texts = _responses(llm, session, asked, say=say, on_batch=on_batch)
        measures |= response_measures(texts, asked.references, label_reader(session.config))
        frame = pd.concat([frame, texts], axis=1)
    return EvaluateResult(
        split=split,
        metrics=figures | {name: measure.value for name, measure in measures.items()},
        intervals=intervals(measures, len(frame)),
        rows=frame,
        measures=measures,
    )


def scored(
    llm: LLM,
    session: Session,
    rows: TokenRows,
    batches: Batches,
    *,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> Scores:
    """Loss and hits of each row under teacher forcing. on_batch: told how many more rows are done."""
    return score_rows(
        llm.model,
        rows,
        pad_id=session.encoder.pad_id,
        batch_rows=batches,
        device=llm.device,
        precision=llm.precision,
        head=llm.head,
        on_batch=on_batch,
    )


def response_measures(texts: pd.DataFrame, references: Sequence[str], reader: LabelReader | None) -> dict[str, Measure]:
    """Of responses, as `respond` gives them, in the order of the references. reader: of a category."""
    responses = texts["response"].tolist()
    if reader is None:
        found = text_measures(responses, references)
    else:
        labels = extract(responses, reader, LabelCounts())
        found = label_measures(labels, [reference.strip() for reference in references])
        found["exact_match"] = exact_match(responses, references)
    found["response_tokens"] = ratio(texts["num_response_tokens"].to_numpy())
    found["ended_by_itself"] = ratio((texts["finish_reason"] == "stop").to_numpy())
    return found


def _responses(llm: LLM, session: Session, asked: Asked, *, say: Say, on_batch: Callable[[int], None]) -> pd.DataFrame:
    """With a column of labels for a category."""
    planned = planned_engine(llm, session, asked.prompts, say=say, on_smaller=lambda smaller: say(str(smaller)))
    say(status("generating"))
    texts = respond(planned.engine, session, asked.prompts, on_batch=on_batch)
    reader = label_reader(session.config)
    if reader is not None:
        counts = LabelCounts()
        texts.insert(1, "label", extract(texts["response"].tolist(), reader, counts))
        for line in counts.notes(session.config.output_features[0]):
            say(line)
    return texts


def asked_of(source: Source, session: Session, rows: TokenRows, *, split: str) -> Asked:
    """What to write a text for, and the answers as the data has them, whole even where tokens are cut.

    rows: with answers, in the order of the source. Of a conversation, the last answer is asked for.
    """
    asked = prompter(session.config, source, with_answers=True, encoder=session.encoder, with_examples=False)
    batches = asked.texts(rows.keys)
    references = [answer for batch in batches for answer in _answers(batch, session.encoder)]
    if session.config.chat is None:
        return Asked(prompts=rows.prompts(), references=references)
    # The rows have their answers: what cannot be used was left out before, and is no error now.
    preprocessing = session.config.preprocessing.model_copy(update={"on_bad_row": "drop"})
    config = session.config.model_copy(update={"preprocessing": preprocessing})
    every = prompts_of(source, config, session.encoder, only=split).rows
    return Asked(prompts=every.take(np.flatnonzero(np.isin(every.keys, rows.keys))), references=references)


def answerable(
    source: Source, session: Session, prepared: Prepared, *, split: str
) -> tuple[TokenRows, Asked, list[Entry]]:
    """The rows of a split whose prompts can be continued, what to write a text for, and what happened to the others."""
    rows = prepared.splits[split]
    asked = asked_of(source, session, rows, split=split)
    kept = continuable(asked.prompts, session, source, split=split, num_spare=prepared.num_spare)
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


def said(num_rows: int, say: Say) -> RowsAtOnce:
    """So many rows together, or fewer once memory has run out; then it is said."""
    return RowsAtOnce(num_rows, on_smaller=lambda smaller: say(str(smaller)))


def respond(
    engine: Engine, session: Session, prompts: TokenRows, *, on_batch: Callable[[int], None] = lambda rows: None
) -> pd.DataFrame:
    """The model's text for each prompt: columns response, finish_reason, num_prompt_tokens, num_response_tokens.

    on_batch: told how many more rows are done.
    """
    encoder = session.encoder
    responses = respond_to(engine, prompts, on_batch=on_batch)
    frame: pd.DataFrame = pd.DataFrame(
        {
            "response": [encoder.decode(r.token_ids, skip_special_tokens=True) for r in responses],
            "finish_reason": [r.finish_reason for r in responses],
            "num_prompt_tokens": prompts.lengths,
            "num_response_tokens": [len(r.token_ids) for r in responses],
        }
    )
    return frame
