"""Two models on the same rows: what the one is better at, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from brim.api.evaluation import Asked, answerable, evaluate, response_measures
from brim.api.forward_planning import batches_for
from brim.api.results import Comparison, EvaluateResult
from brim.api.session import Say, Session, with_labels
from brim.config import Config, load_config
from brim.data import Ledger, Source, TokenRows, prepare
from brim.errors import DataError, InputError, Problem
from brim.infer.bootstrap import Measure, intervals, paired_intervals, ratio
from brim.infer.evaluate import Scores
from brim.infer.labels import label_reader
from brim.infer.metrics import score_measures
from brim.models.llm import LLM
from brim.train.run_folder import RunFolder

# What is counted a token, so that it says nothing across tokenizers.
_BY_TOKEN = ("loss", "perplexity", "token_accuracy", "response_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A model and its rows, before anything of it is loaded."""

    name: str
    session: Session
    rows: TokenRows
    asked: Asked | None  # None: no texts are wanted
    ledger: Ledger
    notes: tuple[str, ...]  # on the rows

    def only(self, keys: NDArray[np.int64]) -> Contender:
        """With the rows of these keys."""
        positions = np.flatnonzero(np.isin(self.rows.keys, keys))
        asked = self.asked
        if asked is not None:
            references = [asked.references[position] for position in positions.tolist()]
            asked = Asked(prompts=asked.prompts.take(positions), references=references)
        return replace(self, rows=self.rows.take(positions), asked=asked)


def contender(
    name: str,
    session: Session,
    source: Source,
    *,
    split: str,
    with_texts: bool = False,
    like: Contender | None = None,
) -> Contender:
    """Return a model with its rows of a split.

    with_texts: texts are wanted; of a category they are in any case. like: the first model, whose rows, settings of
    `generation` and texts the other one is given.
    """
    config = session.config
    if like is not None:
        config = config.model_copy(update={"generation": like.session.config.generation})
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
    notes = (*prepared.notes, *ledger.summary())
    return Contender(name=name, session=session, rows=rows, asked=asked, ledger=ledger, notes=notes)


def evaluated(
    contender: Contender, llm: LLM, *, split: str, say: Say, on_batch: Callable[[int], None]
) -> EvaluateResult:
    """Return a model's figures on its rows. on_batch: told how many more rows are done."""
    session, rows, asked = contender.session, contender.rows, contender.asked
    at_once = batches_for(session, [rows], llm=llm, say=say)
    result = evaluate(llm, session, rows, split=split, batches=at_once, asked=asked, say=say, on_batch=on_batch)
    return replace(result, num_left_out=contender.ledger.num_left_out())


def _with_same_rows(config: Config, like: Config) -> Config:
    """The configuration with all that decides which rows are in a split."""
    parts = {part: getattr(like.preprocessing, part) for part in ("split", "sample_ratio", "sample_size")}
    preprocessing = config.preprocessing.model_copy(update=parts)
    return config.model_copy(update={"preprocessing": preprocessing, "random_seed": like.random_seed})


def base_of(config: Config, run: RunFolder | None, *, has_learned: bool) -> Config:
    """The configuration of the base model of one that was trained: without its adapter, and with its first weights.

    run: the one that trained it, if it is known. has_learned: in this process, so that the configuration does not say.
    Raises InputError where the model is its base itself.
    """
    original = config if run is None else load_config(run.config).config
    first = {"adapter": None, "base_model": original.base_model, "initialize": original.initialize}
    adapter = config.adapter
    has_adapter = adapter is not None and adapter.pretrained_adapter_weights is not None
    if not has_learned and not has_adapter and config.base_model == original.base_model:
        raise InputError(
            Problem(
                what="this is the base model itself: there is nothing that it could be compared with",
                expected="a run's folder, or a configuration whose adapter has trained weights",
                fix="name the run, or another model with --against",
            )
        )
    return config.model_copy(update=first)


def compared(
    ours: EvaluateResult,
    contenders: tuple[Contender, Contender],
    load: Callable[[], LLM],
    *,
    say: Say,
    on_batch: Callable[[int], None],
) -> Comparison:
    """Evaluate the other model on the rows that both can take, and compare.

    ours: of the first of the contenders, whose weights are no more in memory. load: the other's weights.
    Raises DataError where there is no such row.
    """
    first, second = contenders
    keys = np.intersect1d(first.rows.keys, second.rows.keys)
    _require_common(keys, second)
    mine, other = first.only(keys), second.only(keys)
    say(f"{other.name}:")
    theirs = evaluated(other, load(), split=ours.split, say=say, on_batch=on_batch)
    our_measures, notes = _measures_on(ours, mine, keys), _notes(first, second, keys)
    their_measures = dict(theirs.measures)
    if not _same_targets(mine.rows, other.rows):
        num_bytes = _answer_bytes(mine)
        our_measures = _without_tokens(our_measures, _losses(ours, keys), num_bytes)
        their_measures = _without_tokens(their_measures, _losses(theirs, keys), num_bytes)
        notes.append(
            "the two models read the answers as different tokens: figures of a token are not compared; "
            "bits_per_byte is the loss by the answers' bytes"
        )
    return _comparison(other.name, our_measures, their_measures, len(keys), notes)


def _comparison(
    name: str, ours: Mapping[str, Measure], theirs: Mapping[str, Measure], num_rows: int, notes: Sequence[str]
) -> Comparison:
    return Comparison(
        other=name,
        num_rows=num_rows,
        metrics={name: measure.value for name, measure in ours.items()},
        intervals=intervals(ours, num_rows),
        other_metrics={name: measure.value for name, measure in theirs.items()},
        other_intervals=intervals(theirs, num_rows),
        differences={name: ours[name].value - theirs[name].value for name in ours if name in theirs},
        difference_intervals=paired_intervals(ours, theirs, num_rows),
        notes=tuple(notes),
    )


def _measures_on(ours: EvaluateResult, mine: Contender, keys: NDArray[np.int64]) -> dict[str, Measure]:
    """Of the rows of these keys alone."""
    frame = ours.rows
    if len(keys) == len(frame):
        return dict(ours.measures)
    frame = frame[frame["row"].isin(keys)]
    measures = score_measures(
        Scores(
            keys=frame["row"].to_numpy(),
            loss=frame["loss"].to_numpy(),
            num_correct=frame["num_correct"].to_numpy(),
            num_supervised=frame["num_supervised"].to_numpy(),
        )
    )
    if mine.asked is not None:
        measures |= response_measures(frame, mine.asked.references, label_reader(mine.session.config))
    return measures


def _without_tokens(
    measures: Mapping[str, Measure], losses: NDArray[np.float64], num_bytes: NDArray[np.int64]
) -> dict[str, Measure]:
    kept = {name: measure for name, measure in measures.items() if name not in _BY_TOKEN}
    return {"bits_per_byte": ratio(losses / math.log(2), num_bytes), **kept}


def _losses(result: EvaluateResult, keys: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = result.rows.loc[result.rows["row"].isin(keys), "loss"].to_numpy()
    return found


def _answer_bytes(of: Contender) -> NDArray[np.int64]:
    """Bytes of each row's answer in UTF-8, as its tokens read; at least 1, its end."""
    decode = of.session.encoder.decode
    texts = (decode(row.input_ids[row.supervised].tolist(), skip_special_tokens=True) for row in of.rows)
    return np.array([max(len(text.encode()), 1) for text in texts], dtype=np.int64)


def _same_targets(ours: TokenRows, theirs: TokenRows) -> bool:
    if not np.array_equal(ours.num_supervised, theirs.num_supervised):
        return False
    return all(
        np.array_equal(mine.input_ids[mine.supervised], other.input_ids[other.supervised])
        for mine, other in zip(ours, theirs, strict=True)
    )


def _require_common(keys: NDArray[np.int64], other: Contender) -> None:
    if not len(keys):
        raise DataError(
            Problem(
                what="there is no row that both models can take",
                where=other.name,
                fix="compare on rows that are short enough for both",
            )
        )


def _notes(first: Contender, second: Contender, keys: NDArray[np.int64]) -> list[str]:
    num_left = max(len(first.rows), len(second.rows)) - len(keys)
    return [f"compared on the {len(keys):,} rows that both models take; {num_left:,} are left out"] if num_left else []
