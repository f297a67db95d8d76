"""Report what a configuration makes of its data, in figures and rendered rows, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.config import new_tokens
from brim.config.schema import Config, RandomSplit
from brim.data.advice import Bin, Cut, Finding, Watcher, advise, in_order, look_at_cuts, no_room
from brim.data.labels import label_slips, with_labels_of_data
from brim.data.preparation import FULL, Prepared, prepare, prompts_of
from brim.data.read import Ledger, Source
from brim.data.tokens import TextEncoder, TokenRow, TokenRows, label_room


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Hold how long the rows of a split are, in tokens."""

    median: int
    p95: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """A split's size and lengths; the lengths are None where the split has no rows."""

    name: str
    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    prompt: Lengths | None  # of a conversation: all before the last answer
    answer: Lengths | None  # with its EOS; None also where the data has no answers
    total: Lengths | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Hold a piece of a rendered row, and whether the model learns to write it."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Hold a row as the model sees it, decoded from its token ids."""

    key: int
    where: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Hold what `brim check` reports about the data."""

    name: str
    num_rows: int
    context_length: int | None
    splits: tuple[SplitReport, ...]
    events: tuple[str, ...]  # the ledger's summary: what was cut or dropped
    other_events: tuple[str, ...]  # the same without the cuts, which are among the advice, too
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]
    lengths: tuple[Bin, ...]  # tokens of each row of all splits, before whole rows were cut
    cuts: tuple[Cut, ...]
    advice: tuple[Finding, ...]  # the most important first

    def as_dict(self) -> dict[str, Any]:
        """Return the report as --json prints it."""
        return {**asdict(replace(self, advice=())), "advice": [finding.as_dict() for finding in self.advice]}


def check_data(
    config: Config, source: Source, encoder: TextEncoder, *, context_length: int | None, show: int = 0
) -> CheckReport:
    """Prepare the data as training would and describe it. show: how many rows to render, from the train split first.

    Where nothing is trained, the data may lack the answer's column, or the one that says its split, as `predict`
    allows. Raises DataError as `prepare`.
    """
    stand_ins: list[str] = []
    if config.prompt.retrieval is not None:
        from brim.data.retrieval import without_embeddings  # here, since few prompts have examples

        config, stand_ins = without_embeddings(config)
    (config, choices), slips = with_labels_of_data(config, source), label_slips(config, source)
    watcher = Watcher(encoder)
    prepared = _prepared(config, source, encoder, watcher, context_length=context_length)
    found, lengths, on_cuts = look_at_cuts(
        prepared.splits.values(), prepared.ledger, has_answers=watcher.has_answers, context_length=context_length
    )
    advice = [
        *advise(watcher, prepared.splits, config=config, source=source, encoder=encoder, slips=slips),
        *on_cuts,
        *_room(config, prepared, context_length, of_labels=label_room(config, encoder)),
    ]
    shown = [row for rows in prepared.splits.values() for row in rows[:show]][:show]
    return CheckReport(
        name=source.name,
        num_rows=source.table.num_rows,
        context_length=context_length,
        splits=tuple(_report(name, rows, config, watcher.has_answers) for name, rows in prepared.splits.items()),
        events=tuple(prepared.ledger.summary()),
        other_events=tuple(_without_cuts(prepared.ledger, found).summary()),
        notes=(*stand_ins, *map(str, choices), *prepared.notes),
        samples=tuple(
            Sample(key=row.key, where=source.locate(row.key), segments=tuple(_segments(row, encoder))) for row in shown
        ),
        lengths=lengths,
        cuts=found,
        advice=in_order(advice, source),
    )


def _prepared(
    config: Config, source: Source, encoder: TextEncoder, watcher: Watcher, *, context_length: int | None
) -> Prepared:
    """Prepare the data as training would; where nothing is trained and columns are missing, prepare what there is."""
    split = config.preprocessing.split
    if config.trainer.type != "none":
        return prepare(source, config, encoder, context_length=context_length, watch=watcher)
    lacking = _lacking_answers(config, source)
    if lacking is not None:
        done = prompts_of(source, config, encoder, only=FULL, watch=watcher)
        note = f"{lacking}: the prompts alone were checked, as for predict"
        return replace(done, notes=(note, *done.notes))
    if not isinstance(split, RandomSplit) and split.column not in source.table.column_names:
        whole = prepare(source, config, encoder, context_length=context_length, only=FULL, watch=watcher)
        note = f"the data has no column `{split.column}`: it was checked as a whole, without splits"
        return replace(whole, notes=(note, *whole.notes))
    return prepare(source, config, encoder, context_length=context_length, watch=watcher)


def _lacking_answers(config: Config, source: Source) -> str | None:
    """Say why the data cannot be evaluated, which is that answers are missing; None where it has all."""
    there = source.table.column_names
    if config.chat is None:
        answer = config.output_features[0].column_name
        return None if answer in there else f"the data has no column `{answer}`"
    if config.chat.messages not in there:
        return None  # `prepare` reports it
    from brim.data.chat import num_unanswered  # here, since it imports Jinja

    count = num_unanswered(source, config.chat.messages)
    return f"{count:,} of the {source.table.num_rows:,} rows do not end with an answer" if count else None


def _without_cuts(ledger: Ledger, found: Iterable[Cut]) -> Ledger:
    of_cuts = {cut.event for cut in found}
    return Ledger(num_rows=ledger.num_rows, entries=[entry for entry in ledger if entry.event not in of_cuts])


def _room(config: Config, prepared: Prepared, context_length: int | None, *, of_labels: int | None) -> list[Finding]:
    """Find prompts that leave no room for an answer, where the configuration only generates.

    of_labels: tokens that are generated at most, where nothing but labels can be.
    """
    if config.trainer.type != "none" or context_length is None:
        return []
    rows = prepared.splits.values()
    keys = np.concatenate([each.keys for each in rows])
    lengths = np.concatenate([_prompt_tokens(each, config) for each in rows])
    num_new = new_tokens(config, context_length) if of_labels is None else of_labels
    can_cut = config.chat is None  # the prompt of a conversation is never cut
    return no_room(keys, lengths, context_length=context_length, num_new=num_new, can_cut=can_cut)


def _prompt_tokens(rows: TokenRows, config: Config) -> npt.NDArray[np.int64]:
    """Count the tokens before each row's answer; in a conversation, before the last answer."""
    if config.chat is None:
        return rows.num_prompt_tokens
    return np.fromiter((_before_last(row.supervised) for row in rows), dtype=np.int64, count=len(rows))


def _before_last(supervised: npt.NDArray[np.bool_]) -> int:
    learned = np.flatnonzero(supervised)
    if not len(learned):
        return len(supervised)
    others = np.flatnonzero(~supervised[: learned[-1]])
    return int(others[-1]) + 1 if len(others) else 0


def _report(name: str, rows: TokenRows, config: Config, has_answers: bool) -> SplitReport:
    prompts = _prompt_tokens(rows, config)
    return SplitReport(
        name=name,
        num_rows=len(rows),
        num_tokens=int(rows.lengths.sum()),
        num_supervised_tokens=int(rows.num_supervised.sum()),
        prompt=_lengths(prompts),
        answer=_lengths(rows.lengths - prompts) if has_answers else None,
        total=_lengths(rows.lengths),
    )


def _lengths(lengths: npt.NDArray[np.int64]) -> Lengths | None:
    if not len(lengths):
        return None
    median, p95, p99, longest = np.quantile(lengths, [0.5, 0.95, 0.99, 1.0], method="higher").tolist()
    return Lengths(median=median, p95=p95, p99=p99, max=longest)


def _segments(row: TokenRow, encoder: TextEncoder) -> Iterator[Segment]:
    """Give runs of tokens that are all learned or all not learned, special tokens shown."""
    edges = np.flatnonzero(np.diff(row.supervised)) + 1
    for ids, marks in zip(np.split(row.input_ids, edges), np.split(row.supervised, edges), strict=True):
        if len(ids):
            text = encoder.decode(ids.tolist(), skip_special_tokens=False)
            yield Segment(text=text, supervised=bool(marks[0]))
