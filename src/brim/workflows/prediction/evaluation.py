"""Evaluate a model on the rows of a data set, and compare two models on the same rows.

A comparison shows at what the one model is better, with an interval for each difference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from brim.config import load_config
from brim.config.prompts import LabelReader
from brim.config.schema import Config, FinetuneTrainer
from brim.data import Prepared, prepare, prompter, prompts_of
from brim.data.read import Entry, Ledger, Source
from brim.data.tokens import TextEncoder, Texts, TokenRows
from brim.errors import DataError, InputError, require_extra
from brim.infer.engines import Engine, respond_to
from brim.infer.metrics import (
    LabelCounts,
    Measure,
    Scores,
    exact_match,
    intervals,
    label_measures,
    label_reader,
    text_measures,
)
from brim.models import LLM, model_note, no_library_warnings
from brim.notes import Kind, Note, OnBatch, Say, is_told, kind_of, planned, status, topic_of
from brim.session import Session, with_labels
from brim.train import RunFolder
from brim.units import format_count
from brim.workflows.prediction.generation import adapter_merged
from brim.workflows.prediction.launch import planned_engine
from brim.workflows.prediction.members import Several, is_one_process
from brim.workflows.prediction.prompts import continuable
from brim.workflows.prediction.scoring import Load, batches_for, scored
from brim.workflows.runs import Comparison, EvaluateResult, TrainResult

# Figures by the token, which cannot be compared across tokenizers.
_BY_TOKEN = ("loss", "perplexity", "token_accuracy", "response_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Hold prompts to respond to, and the answer that the data has for each."""

    prompts: TokenRows
    references: Sequence[str]

    def take(self, positions: NDArray[np.int64]) -> Asked:
        """Return those at these positions."""
        references = [self.references[position] for position in positions.tolist()]
        return Asked(prompts=self.prompts.take(positions), references=references)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Hold a model and its rows, before its weights are loaded."""

    name: str
    session: Session
    rows: TokenRows
    asked: Asked | None  # None: texts are not asked for
    ledger: Ledger
    notes: tuple[str, ...]  # on the rows

    @classmethod
    def of(
        cls,
        name: str,
        session: Session,
        source: Source,
        *,
        split: str,
        with_texts: bool = False,
        like: Contender | None = None,
    ) -> Contender:
        """Return a model with its rows of a split.

        with_texts: generate texts, too; for a category they are generated in any case. like: the first model, whose
        rows, settings of `generation` and choice of texts the other one takes.
        """
        config = session.config
        if with_texts and label_reader(config) is None:
            require_extra(
                "metrics", "sacrebleu", "rouge_score", what="a comparison of texts", otherwise="leave --texts out"
            )
        if like is not None:
            config = config.having("generation", like.session.config.generation)
        session = with_labels(replace(session, config=config), source)
        prepared = prepare(
            source,
            session.config if like is None else _with_same_rows(session.config, like.session.config),
            session.encoder,
            context_length=session.folder.context_length,
            only=split,
        )
        rows, ledger, asked = prepared.splits[split], prepared.ledger, None
        if with_texts or label_reader(session.config) is not None if like is None else like.asked is not None:
            rows, asked, entries = answerable(source, session, prepared, split=split)
            ledger = ledger.with_more(entries)
        tokens = format_count(int(rows.lengths.sum()), "token")
        data = planned("data", f"{format_count(len(rows), 'row')} ({split}), {tokens}")
        notes = (data, *prepared.notes, *ledger.summary())
        return cls(name=name, session=session, rows=rows, asked=asked, ledger=ledger, notes=notes)

    def only(self, keys: NDArray[np.int64]) -> Contender:
        """Return the contender with the rows of these keys alone."""
        positions = np.flatnonzero(np.isin(self.rows.keys, keys))
        asked = None if self.asked is None else self.asked.take(positions)
        return replace(self, rows=self.rows.take(positions), asked=asked)

    def evaluated(self, load: Load, *, num_members: int = 1, split: str, say: Say, on_batch: OnBatch) -> EvaluateResult:
        """Return the model's figures on its rows. load: loads its weights; num_members: processes that do, if several.

        on_batch: is called with the number of rows done since.
        """
        with ExitStack() as stack:
            model: LLM | Several
            if is_one_process(self.session.config, num_members):
                model = load()
            else:
                model = stack.enter_context(Several(self.session, num_members, is_spent=True, say=say))
            result = evaluate(model, self.session, self.rows, split=split, asked=self.asked, say=say, on_batch=on_batch)
        return replace(result, num_left_out=self.ledger.num_left_out())

    def compared(
        self, ours: EvaluateResult, second: Contender, load: Load, *, num_members: int, say: Say, on_batch: OnBatch
    ) -> Comparison:
        """Evaluate the second model on the rows that both can take, and compare.

        ours: of this contender, whose weights are not in memory any more. load, num_members: see `evaluated`.
        Raises DataError where there is no such row.
        """
        keys = np.intersect1d(self.rows.keys, second.rows.keys)
        if not len(keys):
            raise DataError(
                what="there is no row that both models can take",
                where=second.name,
                fix="compare on rows that are short enough for both",
            )
        mine, other, notes = self.only(keys), second.only(keys), []
        if num_left := max(len(self.rows), len(second.rows)) - len(keys):
            rows = format_count(len(keys), "row")
            notes.append(f"compared on the {rows} that both models take; {num_left:,} are left out")

        def say_of_other(line: str) -> None:
            if is_told(line):
                kind: Kind = "detail" if kind_of(line) == "plan" else kind_of(line)  # it takes about the same again
                line = Note(f"{other.name}: {line}", kind=kind, topic=topic_of(line))
            say(line)

        how: dict[str, Any] = {"num_members": num_members, "split": ours.split, "on_batch": on_batch}
        theirs = other.evaluated(load, **how, say=say_of_other)
        our_measures, their_measures = _measures_on(ours, mine, keys), dict(theirs.measures)
        if not _same_targets(mine.rows, other.rows):
            num_bytes = _answer_bytes(mine)
            our_measures = _without_tokens(our_measures, _losses(ours, keys), num_bytes)
            their_measures = _without_tokens(their_measures, _losses(theirs, keys), num_bytes)
            notes.append(
                "the two models read the answers as different tokens: figures of a token are not compared; "
                "bits_per_byte is the loss by the answers' bytes"
            )
        return Comparison.of(our_measures, their_measures, other=other.name, num_rows=len(keys), notes=notes)


def _with_same_rows(config: Config, like: Config) -> Config:
    """Return the configuration with all that decides which rows are in a split."""
    for part in ("split", "sample_ratio", "sample_size"):
        config = config.having(f"preprocessing.{part}", getattr(like.preprocessing, part))
    return config.having("random_seed", like.random_seed)


def base_of(config: Config, run: RunFolder | None, *, has_learned: bool) -> Config:
    """Return the configuration of a trained model's base: without its adapter, and with its first weights.

    run: the one that trained it, if it is known. has_learned: it was trained in this process, which its configuration
    does not show.
    Raises InputError where the model is its base itself.
    """
    original = config if run is None else load_config(run.config).config
    first = {"adapter": None, "base_model": original.base_model, "initialize": original.initialize}
    if not has_learned and config.trained_adapter is None and config.base_model == original.base_model:
        raise InputError(
            what="this is the base model itself: there is nothing that it could be compared with",
            expected="a run's folder, or a configuration whose adapter has trained weights",
            fix="name the run, or another model with --against",
        )
    return config.model_copy(update=first)


def _measures_on(ours: EvaluateResult, mine: Contender, keys: NDArray[np.int64]) -> dict[str, Measure]:
    """Return the measures of the rows of these keys alone."""
    frame = ours.rows
    if len(keys) == len(frame):
        return dict(ours.measures)
    frame = frame[frame["row"].isin(keys)]
    figures = {name: frame[name].to_numpy() for name in ("loss", "num_correct", "num_supervised")}
    measures = Scores(keys=keys, **figures).measures()
    if mine.asked is not None:
        measures |= response_measures(frame, mine.asked.references, label_reader(mine.session.config))
    return measures


def _without_tokens(
    measures: Mapping[str, Measure], losses: NDArray[np.float64], num_bytes: NDArray[np.int64]
) -> dict[str, Measure]:
    kept = {name: measure for name, measure in measures.items() if name not in _BY_TOKEN}
    return {"bits_per_byte": Measure.ratio(losses / math.log(2), num_bytes), **kept}


def _losses(result: EvaluateResult, keys: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = result.rows.loc[result.rows["row"].isin(keys), "loss"].to_numpy()
    return found


def _answer_bytes(of: Contender) -> NDArray[np.int64]:
    """Return the bytes of each row's answer in UTF-8, as its tokens decode; at least 1, for its end."""
    decode = of.session.encoder.decode
    texts = (decode(row.input_ids[row.supervised].tolist(), skip_special_tokens=True) for row in of.rows)
    return np.array([max(len(text.encode()), 1) for text in texts], dtype=np.int64)


def _same_targets(ours: TokenRows, theirs: TokenRows) -> bool:
    return np.array_equal(ours.num_supervised, theirs.num_supervised) and all(
        np.array_equal(mine.input_ids[mine.supervised], other.input_ids[other.supervised])
        for mine, other in zip(ours, theirs, strict=True)
    )


def evaluate_splits(
    llm: LLM, session: Session, source: Source, prepared: Prepared, *, say: Say, on_batch: OnBatch
) -> TrainResult:
    """Evaluate the splits, as `train` does with `trainer.type: none`, and Ludwig, too."""
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
        metrics[split] = evaluate(llm, session, rows, split=split, asked=asked, say=say, on_batch=on_batch).metrics
    return TrainResult(
        output_directory=None,
        num_steps=0,
        best_step=None,
        metrics=metrics,
        num_rows=prepared.num_rows,
        seconds=time.perf_counter() - started,
        num_left_out=prepared.ledger.num_left_out(),
    )


@no_library_warnings()
def evaluate(
    model: LLM | Several,
    session: Session,
    rows: TokenRows,
    *,
    split: str,
    asked: Asked | None,
    say: Say,
    on_batch: OnBatch,
) -> EvaluateResult:
    """Compute loss, perplexity and accuracies of rows with answers.

    model: this process's, or several processes that have one. asked: where given, the model's own texts are compared
    with the data's: for BLEU, ROUGE and exact match, or, of a category, for accuracy and F1 of its labels. on_batch: is
    called with the number of rows done since, first of those that are scored, then of the texts.
    """
    if isinstance(model, Several):
        scores = model.evaluate(rows, on_batch=on_batch)
    else:
        say(model_note(session.config, model, trains=False))
        batches = batches_for(session, [rows], llm=model, say=say)
        say(status("evaluating", is_planned=True))
        scores = scored(model, session, rows, batches, on_batch=on_batch)
    figures, measures = scores.summary(), scores.measures()
    frame = pd.DataFrame(asdict(scores)).rename(columns={"keys": "row"})
    if asked is not None:
        if isinstance(model, Several):
            texts = respond(model, session, asked.prompts, on_batch=on_batch)
        else:
            texts = responses_to(model, session, asked.prompts, say=say, on_batch=on_batch)
        reader = label_reader(session.config)
        if reader is not None:
            counts = LabelCounts()
            texts.insert(1, "label", counts.extract(texts["response"].tolist(), reader))
            for line in counts.notes(session.config.output_features[0]):
                say(line)
        measures |= response_measures(texts, asked.references, reader)
        frame = pd.concat([frame, texts], axis=1)
    return EvaluateResult(
        split=split,
        metrics=figures | {name: measure.value for name, measure in measures.items()},
        intervals=intervals(measures, len(frame)),
        rows=frame,
        measures=measures,
    )


def response_measures(texts: pd.DataFrame, references: Sequence[str], reader: LabelReader | None) -> dict[str, Measure]:
    """Measure responses, as `respond` gives them, in the order of the references. reader: of a category."""
    responses = texts["response"].tolist()
    if reader is None:
        found = text_measures(responses, references)
    else:
        labels = LabelCounts().extract(responses, reader)
        found = label_measures(labels, [reference.strip() for reference in references])
        found["exact_match"] = exact_match(responses, references)
    found["response_tokens"] = Measure.ratio(texts["num_response_tokens"].to_numpy())
    found["ended_by_itself"] = Measure.ratio((texts["finish_reason"] == "stop").to_numpy())
    return found


def responses_to(
    llm: LLM, session: Session, prompts: TokenRows, *, engine: Engine | None = None, say: Say, on_batch: OnBatch
) -> pd.DataFrame:
    """Respond to each of at least one prompt, as `respond` does. engine: default: the one that is planned for them."""
    with ExitStack() as stack:
        if engine is None:
            merged = stack.enter_context(adapter_merged(llm, session, prompts, is_spent=False, say=say))
            engine, _ = planned_engine(llm, merged.session, prompts, beside_bytes=merged.beside_bytes, say=say)
        say(status("generating", is_planned=True))
        return respond(engine, session, prompts, on_batch=on_batch)


def asked_of(source: Source, session: Session, rows: TokenRows, *, split: str) -> Asked:
    """Return the prompts to respond to, and the answers as the data has them, whole even where their tokens are cut.

    rows: with answers, in the order of the source. Of a conversation, the last answer is asked for.
    """
    asked = prompter(session.config, source, with_answers=True, encoder=session.encoder, with_examples=False)
    batches = asked.texts(rows.keys)
    references = [answer for batch in batches for answer in _answers(batch, session.encoder)]
    if session.config.chat is None:
        return Asked(prompts=rows.prompts(), references=references)
    # The rows have their answers: what cannot be used was dropped before, and is not an error now.
    config = session.config.having("preprocessing.on_bad_row", "drop")
    every = prompts_of(source, config, session.encoder, only=split).rows
    return Asked(prompts=every.take(np.flatnonzero(np.isin(every.keys, rows.keys))), references=references)


def answerable(
    source: Source, session: Session, prepared: Prepared, *, split: str
) -> tuple[TokenRows, Asked, list[Entry]]:
    """Return the rows of a split whose prompts can be continued, what to ask, and the ledger's entries on the rest."""
    rows = prepared.splits[split]
    asked = asked_of(source, session, rows, split=split)
    kept = continuable(asked.prompts, session, source, split=split, num_spare=prepared.num_spare)
    return rows.take(kept.positions), replace(asked.take(kept.positions), prompts=kept.prompts), kept.entries


def _answers(batch: Texts, encoder: TextEncoder) -> list[str]:
    """Return answers as a model's text is read: a conversation's without the template's tokens around it."""
    if batch.chats is None:
        return batch.answers
    tokens = encoder.encode(batch.answers, special_tokens=False)
    return [
        encoder.decode(ids, skip_special_tokens=True) if chat.reply is None else chat.reply
        for ids, chat in zip(tokens, batch.chats, strict=True)
    ]


def size_for_generating(config: Config) -> str:
    """Return the trainer's key that says how many rows are generated for at once."""
    return "eval_batch_size" if isinstance(config.trainer, FinetuneTrainer) else "batch_size"


def respond(
    engine: Engine, session: Session, prompts: TokenRows, *, on_batch: OnBatch = lambda rows: None
) -> pd.DataFrame:
    """Generate the model's text for each prompt. on_batch: is called with the number of rows done since.

    The columns are response, finish_reason, num_prompt_tokens and num_response_tokens.
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
