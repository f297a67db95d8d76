"""Turn a source and a configuration into token rows, a ledger and notes.

Training, evaluation and prediction use it. Errors and notes about the rows are given once all are tokenized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from brim.config.schema import Config, PreprocessingConfig
from brim.data.labels import bounded, with_known_labels
from brim.data.prompts import Prompter, learning_limits, prompt_limits, prompter, require_room_for_template
from brim.data.read import SPLITS, Entry, Ledger, RowFaults, Source
from brim.data.split import (
    assign_splits,
    leaving_none_unasked,
    most_unasked,
    require_filled,
    sampled_rows,
    with_usable_splits,
)
from brim.data.tokens import Chat, Findings, Limits, Piece, TextEncoder, Texts, TokenRows, tokenize
from brim.errors import DataError, problems_of
from brim.notes import warning
from brim.units import format_count

if TYPE_CHECKING:
    from brim.data.chat import ChatPrompter


FULL = "full"  # the name of all rows together, where they are not split


Keys = npt.NDArray[np.int64]


Watch: TypeAlias = Callable[[Texts], None]
AnyPrompter: TypeAlias = "Prompter | ChatPrompter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Hold token rows by split (train, validation, test; each may be empty), what happened to rows, and notes."""

    splits: dict[str, TokenRows]
    ledger: Ledger
    notes: tuple[str, ...]
    num_spare: int = 0  # rows that may yet be left out by preprocessing.max_dropped_fraction

    @property
    def num_rows(self) -> dict[str, int]:
        """Return how many rows each split has."""
        return {split: len(rows) for split, rows in self.splits.items()}

    @property
    def rows(self) -> TokenRows:
        """Return the rows of the only split, in the order of the source."""
        (rows,) = self.splits.values()
        return rows


def prepare(
    source: Source,
    config: Config,
    encoder: TextEncoder,
    *,
    context_length: int | None,
    only: str | None = None,
    watch: Watch | None = None,
) -> Prepared:
    """Sample, split, render, tokenize and cut, as the configuration says.

    only: a split to prepare alone, or "full" for every row of the source under that name, in its order. What training
    leaves out of a split is left out of the split alone, too.
    watch: sees each batch of texts before it is tokenized.
    Raises DataError: missing columns, missing cells, an unusable split column, no rows to train on; more than a few
    rows that cannot be used, are beyond the model's context where no length is set, or have nothing to learn from.
    """
    asked = prompter(config, source, with_answers=True, encoder=encoder, split=only)
    source, keys, codes, notes = _assigned(only, asked, config)
    num_all = len(keys)
    if only is not None:
        keys = keys if codes is None else keys[codes == SPLITS.index(only)]
    code_of_key = np.full(source.table.num_rows, -1, dtype=np.int8)
    if only is None and codes is not None:
        code_of_key[keys] = codes
    done = _tokenized(
        asked,
        source,
        keys,
        encoder,
        learning_limits(config, context_length),
        config,
        split_of=lambda key: only or SPLITS[code_of_key[key]],
        watch=watch,
        num_all=num_all,
    )
    if only is not None:
        splits = {only: done.rows}
    else:
        row_codes = code_of_key[done.rows.keys]
        splits = {name: done.rows.take(np.flatnonzero(row_codes == code)) for code, name in enumerate(SPLITS)}
        notes += _require_train(splits, source, config)
    return replace(done, splits=splits, notes=(*notes, *done.notes))


def prompts_of(
    source: Source,
    config: Config,
    encoder: TextEncoder,
    *,
    only: str = FULL,
    watch: Watch | None = None,
    context_length: int | None = None,
) -> Prepared:
    """Prepare the prompts of a split, or of every row, in the order of the source; the answer's column need not exist.

    Prompts are cut where the input feature has a length; whether the others can be continued is the caller's to see.
    context_length: where nothing is to follow the prompts: longer ones are treated as preprocessing.on_overlong says.
    Raises DataError: missing columns or cells, an unusable split column, prompts beyond the context.
    """
    asked = prompter(config, source, with_answers=False, encoder=encoder, split=only)
    config = config.model_copy(update={"preprocessing": leaving_none_unasked(config.preprocessing)})
    source, keys, codes, notes = _assigned(only, asked, config)
    keys = keys if codes is None else keys[codes == SPLITS.index(only)]
    limits = prompt_limits(config, context_length)
    done = _tokenized(asked, source, keys, encoder, limits, config, split_of=lambda key: only, watch=watch, num_all=0)
    return replace(done, notes=(*notes, *done.notes))


def texts_as_source(texts: Sequence[str], encoder: TextEncoder, *, are_chats: bool = False) -> TokenRows:
    """Return finished prompts as rows to be continued; keys are their positions.

    are_chats: a chat template has written them, and nothing is added to what it writes.
    """
    chats = [Chat(pieces=(Piece(text=text, supervised=False),), own_texts=(), reply=None) for text in texts]
    batch = Texts(keys=np.arange(len(texts)), prompts=list(texts), answers=[], chats=chats if are_chats else None)
    return TokenRows.from_blocks(tokenize([batch], encoder, Limits(), Findings(split_of=lambda key: FULL)))


def _assigned(
    split: str | None, asked: AnyPrompter, config: Config
) -> tuple[Source, Keys, npt.NDArray[np.int8] | None, list[str]]:
    """Return the source with the faults of rows that cannot be split, the rows to use, their splits, and notes.

    There are no splits where all rows are wanted together ("full").
    """
    if split == FULL:
        return asked.source, asked.source.usable_rows(), None, []
    source = with_usable_splits(asked.source, config)
    keys = sampled_rows(source, config)
    return source, keys, *assign_splits(source, config, keys, used=asked.used_columns)


def _require_train(splits: dict[str, TokenRows], source: Source, config: Config) -> list[str]:
    """Return notes on empty splits. Raises DataError where no rows are left to train on."""
    if config.trainer.type != "none" and not len(splits["train"]):
        raise DataError(
            what="no rows are left to train on",
            where=source.name,
            expected="at least one row in the train split",
            fix="look at preprocessing.split and at what was dropped",
        )
    return [f"the {name} split has no rows" for name in ("validation", "test") if not len(splits[name])]


def _tokenized(
    asked: AnyPrompter,
    source: Source,
    keys: Keys,
    encoder: TextEncoder,
    limits: Limits,
    config: Config,
    *,
    split_of: Callable[[int], str],
    watch: Watch | None,
    num_all: int,
) -> Prepared:
    """Tokenize these rows, all as one split, and decide about those that cannot be used.

    num_all: usable rows of all splits, of which `auto` leaves out a share; 0: it leaves out none.
    """
    preprocessing = config.preprocessing
    if isinstance(asked, Prompter):
        require_room_for_template(asked, encoder, limits)
    require_filled(source, asked.columns, keys)
    ledger = Ledger(num_rows=len(keys) + len(source.faults))
    keys = _without_missing(asked, keys, ledger, split_of)
    findings = Findings(split_of=split_of, special_in_template=encoder.count_special(asked.bare_template))
    texts = bounded(_watched(asked.texts(keys), watch), asked.faults)
    if config.chat is None:
        texts = with_known_labels(texts, config.output_features[0], asked.faults)
    rows = TokenRows.from_blocks(tokenize(texts, encoder, limits, findings))
    bad = {**source.faults, **asked.faults.problems}
    few = few_of(bad, findings, preprocessing, num_rows=num_all + len(source.faults) if num_all else 0)
    rows = without_unusable(rows, findings, preprocessing, source, limits=limits, few=few.why or None)
    problems = problems_of(
        lambda: ledger.entries.extend(_bad_rows(asked, source, preprocessing.on_bad_row, few, len(keys), split_of)),
        lambda: require_fitting(findings, source, limits, num_rows=len(keys)),
        lambda: require_learnable(findings, source, num_rows=len(keys)),
    )
    DataError.raise_for(problems)
    ledger.entries += findings.entries
    ledger.entries.sort(key=lambda entry: entry.key)
    read_notes = (*source.notes, *source.notes_on_mixed(asked.used_columns))
    notes = (*read_notes, *asked.notes(), *notes_of(findings, source, limits))
    return Prepared(splits={FULL: rows}, ledger=ledger, notes=notes, num_spare=max(0, few.num_more))


def _bad_rows(
    asked: AnyPrompter,
    source: Source,
    policy: Literal["auto", "error", "drop"],
    few: Few,
    num_rows: int,
    split_of: Callable[[int], str],
) -> list[Entry]:
    """Return the ledger's entries for rows that cannot be used. Raises DataError where they are not to be left out."""
    of_source = RowFaults(locate=source.locate, problems=dict(source.faults))
    num_all = num_rows + len(source.faults)
    if policy == "error" or (policy == "auto" and not few.why):
        of_source.problems |= asked.faults.problems
        return of_source.settle("error", num_rows=num_all, name=source.name, split_of=split_of, most=few.most)
    unasked = few.why if policy == "auto" else ""
    entries = of_source.settle(
        "drop", num_rows=source.table.num_rows, name=source.name, split_of=lambda key: None, unasked=unasked
    )
    return entries + asked.faults.settle(
        "drop", num_rows=num_rows, name=source.name, split_of=split_of, unasked=unasked
    )


def _watched(texts: Iterable[Texts], watch: Watch | None) -> Iterator[Texts]:
    for batch in texts:
        if watch is not None:
            watch(batch)
        yield batch


def _without_missing(asked: AnyPrompter, keys: Keys, ledger: Ledger, split_of: Callable[[int], str]) -> Keys:
    """Return the rows that stay where cells are missing; what is dropped or filled goes to the ledger."""
    dropped = np.zeros(asked.source.table.num_rows, dtype=np.bool_)
    filled = np.zeros_like(dropped)
    empty = {column: asked.source.missing(column.name, is_label=column.is_label) for column in asked.columns}
    for column, rows in empty.items():
        (dropped if column.rule.missing_value_strategy == "drop_row" else filled)[rows] = True
    for key in keys[(dropped | filled)[keys]].tolist():
        names = ", ".join(f"`{column.name}`" for column, rows in empty.items() if rows[key])
        event, why = "dropped_missing" if dropped[key] else "filled_missing", sys.intern(f"no value in {names}")
        ledger.entries.append(Entry(key=key, split=split_of(key), event=event, why=why))
    return keys[~dropped[keys]]


_FIX_LENGTH = "set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted)"


_FIX_FEATURE_LENGTH = "set max_sequence_length of a feature to cut prompts or answers alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """Decide whether `auto` leaves out the rows that cannot be used."""

    most: int  # rows that may be left out so
    num_more: int  # of these, how many are not yet; negative where there are too many
    why: str  # the setting that leaves them out; empty where there are too many


def few_of(bad: Collection[int], findings: Findings, policy: PreprocessingConfig, *, num_rows: int) -> Few:
    """Judge all kinds of unusable rows together. bad: keys of rows that cannot be used. num_rows: of all splits."""
    keys = {*(bad if policy.on_bad_row == "auto" else ())}
    keys |= {key for key, _ in findings.unlearnable} if policy.drop_unlearnable == "auto" else set()
    keys |= {key for key, _ in findings.overlong} if policy.on_overlong == "auto" else set()
    most = most_unasked(policy, num_rows)
    if len(keys) > most:
        findings.most_dropped = most
    why = f"preprocessing.max_dropped_fraction {policy.max_dropped_fraction:g} leaves out up to {most:,}"
    return Few(most=most, num_more=most - len(keys), why=why if len(keys) <= most else "")


def require_fitting(findings: Findings, source: Source, limits: Limits, *, num_rows: int) -> None:
    """Raise DataError when rows are longer than the context, naming the longest."""
    if not findings.overlong:
        return
    longest = sorted(findings.overlong, key=lambda each: (-each[1], each[0]))
    raise DataError(
        what=f"{len(longest):,} of {num_rows:,} rows are longer than the model's context{_too_many(findings)}",
        where=source.places([key for key, _ in longest], [f" ({tokens:,} tokens)" for _, tokens in longest]),
        expected=f"at most {limits.context_length:,} tokens of prompt, answer and end of sequence",
        fix=_FIX_LENGTH if findings.are_chats else f"{_FIX_LENGTH}; or {_FIX_FEATURE_LENGTH}",
    )


def without_unusable(
    rows: TokenRows, findings: Findings, policy: PreprocessingConfig, source: Source, *, limits: Limits, few: str | None
) -> TokenRows:
    """Return the rows without those that `preprocessing` leaves out; these go from the findings to the ledger.

    Those are rows without anything to learn from, and rows that are longer than the context. few: the setting that
    leaves them out under `auto`, where the note names their places; None: they stay.
    """
    of_unlearnable = {True: "preprocessing.drop_unlearnable is true", "auto": few}.get(policy.drop_unlearnable)
    of_overlong = {"drop": "preprocessing.on_overlong is drop", "auto": few}.get(policy.on_overlong)
    context = f", and the context is {limits.context_length or 0:,} tokens"
    for event, found, why, more in (
        ("dropped_unlearnable", findings.unlearnable, of_unlearnable, ""),
        ("dropped_overlong", findings.overlong, of_overlong, context),
    ):
        if why is not None and found:
            place = source.locate if why == few else lambda key: ""
            rows = _drop(rows, event, found, why + more, findings=findings, place=place)
    return rows


def _drop(
    rows: TokenRows, event: str, found: list[tuple[int, int]], why: str, findings: Findings, place: Callable[[int], str]
) -> TokenRows:
    """Return the rows without those found, which go to the ledger. found: their keys and tokens."""
    entry = partial(Entry, event=event, why=why, tokens_after=0)
    findings.entries += [
        entry(key=key, split=findings.split_of(key), tokens_before=tokens, place=place(key)) for key, tokens in found
    ]
    keys = {key for key, _ in found}
    found.clear()
    findings.overlong[:] = [each for each in findings.overlong if each[0] not in keys]
    return rows.take(np.flatnonzero(~np.isin(rows.keys, list(keys))))


def require_learnable(findings: Findings, source: Source, *, num_rows: int) -> None:
    """Raise DataError when rows have no supervised token."""
    if not findings.unlearnable:
        return
    raise DataError(
        what=f"{len(findings.unlearnable):,} of {num_rows:,} rows have nothing to learn from: "
        f"no token of the answer is left{_too_many(findings)}",
        where=source.places([key for key, _ in findings.unlearnable]),
        expected="at least one token of the answer after all cuts",
        fix="raise the lengths, shorten the prompts, or set preprocessing.drop_unlearnable: true",
    )


def _too_many(findings: Findings) -> str:
    """Say how many of such rows would have been left out."""
    if not findings.most_dropped:
        return ""
    return f", more than the {findings.most_dropped:,} that preprocessing.max_dropped_fraction leaves out"


def notes_of(findings: Findings, source: Source, limits: Limits) -> list[str]:
    """Return notes on the rows, in which nothing is wrong."""
    notes: list[str] = []
    if limits.joined is not None and "the model's context" in limits.joined.why:
        notes.append(f"{limits.joined.why}: rows are cut at {format_count(limits.joined.num_tokens, 'token')}")
    if findings.empty:
        note = (
            f"the answer of {_rows(len(findings.empty))} is empty, so that the model learns to end at once: "
            f"{source.places(findings.empty)} (an empty text is not a missing value)"
        )
        notes.append(warning(note, topic="rows", short=f"the answer of {_rows(len(findings.empty))} is empty"))
    if findings.otherwise:
        notes.append(
            f"the tokens of {_rows(len(findings.otherwise))} are others where the text is encoded at once, not in the "
            "pieces of prompt and answer: programs that do so give the model other prompts than it learned from: "
            f"{source.places(findings.otherwise)}"
        )
    if findings.special:
        short = f"the text of {_rows(len(findings.special))} spells out special tokens (such as </s>)"
        note = f"{short}, which the model reads as those tokens: {source.places(findings.special)}"
        notes.append(warning(note, topic="rows", short=short))
    if findings.doubled_bos:
        short = f"the prompt of {_rows(findings.doubled_bos)} begins with the beginning-of-sequence token twice"
        notes.append(warning(f"{short}: the text has it and the tokenizer adds it", topic="rows", short=short))
    return notes


def _rows(count: int) -> str:
    return format_count(count, "row")
