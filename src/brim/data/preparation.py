"""Turn a source and a configuration into token rows, a ledger and notes.

Training, evaluation and prediction use it. Errors and notes about the rows are given once all are tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from brim.config.schema import Config
from brim.data.labels import with_known_labels
from brim.data.prompts import Prompter, learning_limits, prompt_limits, prompter, require_room_for_template
from brim.data.read import SPLITS, Ledger, Source
from brim.data.tokens import Chat, Findings, Limits, Piece, TextEncoder, Texts, TokenRows, tokenize
from brim.data.usable import (
    assign_splits,
    bad_rows,
    bounded,
    few_of,
    leaving_none_unasked,
    require_filled,
    require_fitting,
    require_learnable,
    sampled_rows,
    with_usable_splits,
    without_missing,
    without_unusable,
)
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
    policy, seed = config.preprocessing, config.random_seed
    source = with_usable_splits(asked.source, policy)
    keys = sampled_rows(source, policy, seed=seed)
    return source, keys, *assign_splits(source, policy, keys, seed=seed, used=asked.used_columns)


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
    keys = without_missing(asked.source, asked.columns, keys, ledger, split_of)
    findings = Findings(split_of=split_of, special_in_template=encoder.count_special(asked.bare_template))
    texts = bounded(_watched(asked.texts(keys), watch), asked.faults)
    if config.chat is None:
        texts = with_known_labels(texts, config.output_features[0], asked.faults)
    rows = TokenRows.from_blocks(tokenize(texts, encoder, limits, findings))
    bad = {**source.faults, **asked.faults.problems}
    few = few_of(bad, findings, preprocessing, num_rows=num_all + len(source.faults) if num_all else 0)
    rows = without_unusable(rows, findings, preprocessing, source, limits=limits, few=few.why or None)
    problems = problems_of(
        lambda: ledger.entries.extend(
            bad_rows(asked.faults, source, preprocessing.on_bad_row, few, len(keys), split_of)
        ),
        lambda: require_fitting(findings, source, limits, num_rows=len(keys)),
        lambda: require_learnable(findings, source, num_rows=len(keys)),
    )
    DataError.raise_for(problems)
    ledger.entries += findings.entries
    ledger.entries.sort(key=lambda entry: entry.key)
    read_notes = (*source.notes, *source.notes_on_mixed(asked.used_columns))
    notes = (*read_notes, *asked.notes(), *notes_of(findings, source, limits))
    return Prepared(splits={FULL: rows}, ledger=ledger, notes=notes, num_spare=max(0, few.num_more))


def _watched(texts: Iterable[Texts], watch: Watch | None) -> Iterator[Texts]:
    for batch in texts:
        if watch is not None:
            watch(batch)
        yield batch


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
