"""Decide which prompts can be continued: not empty, and short enough that the context holds the new tokens, too.

Policies decide, for one prediction, what happens to rows that cannot be used and to prompts that are too long. A row
is identified by its number, or by the value of a column, wherever in the data it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from brim.config.schema import InputFeature
from brim.data import texts_as_source
from brim.data.read import WAY_OUT, Entry, RowFaults, Source, blocks, cell_texts
from brim.data.tokens import TokenRows
from brim.errors import ConfigError, DataError, InputError, Problem
from brim.notes import Note, warning
from brim.session import Session
from brim.units import format_count

OnError: TypeAlias = Literal["stop", "skip"]


OnOverlong: TypeAlias = Literal["error", "truncate_left", "skip"]


_ON_BAD_ROW: dict[OnError, str] = {"stop": "error", "skip": "drop"}


_ON_OVERLONG: dict[OnOverlong, str] = {"error": "error", "truncate_left": "truncate", "skip": "drop"}


def check_policies(on_error: str | None, on_overlong: str | None) -> tuple[OnError | None, OnOverlong | None]:
    """Return the policies that a person typed. Raises InputError for another word."""
    for option, name, known in (
        ("--on-error", on_error, get_args(OnError)),
        ("--on-overlong", on_overlong, get_args(OnOverlong)),
    ):
        if name is not None and name not in known:
            raise InputError(what=f"{name!r} is not known", where=option, expected=", ".join(known))
    return cast("OnError | None", on_error), cast("OnOverlong | None", on_overlong)


def with_policies(session: Session, *, on_error: OnError | None, on_overlong: OnOverlong | None) -> Session:
    """Return the session with the policies that are given; else as its configuration says.

    `skip` leaves out and names in the ledger: rows that cannot be read, rows with which the prompt cannot be filled,
    empty prompts and prompts that are too long.
    """
    config = session.config
    changes: dict[str, Any] = {}
    if on_error is not None:
        changes["on_bad_row"] = _ON_BAD_ROW[on_error]
    if on_overlong is not None:
        changes["on_overlong"] = _ON_OVERLONG[on_overlong]
    elif on_error == "skip" and config.preprocessing.on_overlong in ("auto", "error"):
        changes["on_overlong"] = "drop"
    config = config.having("preprocessing", config.preprocessing.model_copy(update=changes))
    if on_error == "skip":
        config = config.having("input_features", tuple(map(_dropping_missing, config.input_features)))
    return replace(session, config=config)


def _dropping_missing(feature: InputFeature) -> InputFeature:
    """Return the feature that drops rows without a value that the prompt needs, unless it is filled in."""
    key = "preprocessing.missing_value_strategy"
    return feature.having(key, "drop_row") if feature.preprocessing.missing_value_strategy == "error" else feature


Integers: TypeAlias = NDArray[np.int64]
Locate: TypeAlias = Callable[[int], str]  # names the place of a row, by its key
Keep: TypeAlias = Literal["first", "last"]


ON_OVERLONG = "preprocessing.on_overlong"


_SHOWN = 5  # a message locates this many rows and counts the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuable:
    """Hold the prompts that can be continued, and the ledger's entries on the others."""

    prompts: TokenRows  # shortened where preprocessing.on_overlong is truncate
    positions: Integers  # of these prompts among those that were given
    entries: list[Entry]


def continuable(
    prompts: TokenRows, session: Session, source: Source, *, split: str, keep: Keep = "first", num_spare: int = 0
) -> Continuable:
    """Drop or cut what cannot be continued, as preprocessing.on_bad_row and on_overlong say.

    keep: the first tokens of a prompt that is cut, or the last, after its BOS. num_spare: how many prompts may be
    dropped where these say `auto`.
    Raises DataError where they say that it is an error, or when more than half of the prompts are empty; ConfigError
    where the new tokens fill the whole context.
    """
    policy, room = session.config.preprocessing, _room(session)
    lengths = prompts.num_prompt_tokens
    is_empty, is_long = lengths == 0, np.zeros(len(prompts), np.bool_) if room is None else lengths > room
    found = {"on_bad_row": is_empty, "on_overlong": is_long}
    unasked = {key: rows for key, rows in found.items() if getattr(policy, key) == "auto"}
    if unasked and np.count_nonzero(np.any(list(unasked.values()), axis=0)) <= num_spare:
        policy = policy.model_copy(update=dict.fromkeys(unasked, "drop"))
    else:
        unasked = {}
    few = f"preprocessing.max_dropped_fraction {policy.max_dropped_fraction:g} leaves out a few rows"
    entries: list[Entry] = []
    is_kept = np.ones(len(prompts), np.bool_)
    if policy.on_bad_row == "drop":
        why = few if "on_bad_row" in unasked else ""
        entries += _dropped_empty(prompts.keys[is_empty].tolist(), source, split, num_rows=len(prompts), unasked=why)
        is_kept &= ~is_empty
    # The prompt of a conversation ends with the beginning of the answer, without which it cannot be continued.
    is_cut = policy.on_overlong == "truncate" and session.config.chat is None
    if (is_cut or policy.on_overlong == "drop") and room is not None:
        how = "drop" if not is_cut else "truncate" if keep == "first" else "truncate_left"
        told = _entries(prompts.keys[is_long], lengths[is_long], room, split, how=how)
        if "on_overlong" in unasked:
            told = [replace(entry, why=few, place=source.locate(entry.key)) for entry in told]
        entries += told
        if not is_cut:
            is_kept &= ~is_long
        elif is_long.any():
            bos_id = session.encoder.bos_id
            prompts = prompts.cut_to(room) if keep == "first" else prompts.cut_to_last(room, after=bos_id)
    positions = np.flatnonzero(is_kept)
    kept = prompts.take(positions)
    require_continuable(kept, session, source.locate)
    return Continuable(prompts=kept, positions=positions, entries=sorted(entries, key=lambda entry: entry.key))


def require_rows(rows: TokenRows, split: str, source: Source) -> None:
    """Raise DataError for a split without rows."""
    if not len(rows):
        raise DataError(what=f"the split {split!r} has no rows", where=source.name, fix="choose another with --split")


def require_continuable(rows: TokenRows, session: Session, locate: Locate) -> None:
    """Raise DataError, naming the rows, for prompts that the model cannot continue.

    rows: prompts, with or without their answers. locate: names the place of a key's row.
    Raises ConfigError where the new tokens fill the whole context.
    """
    lengths = rows.num_prompt_tokens
    empty = rows.keys[lengths == 0].tolist()
    DataError.raise_for([*_empty(empty, locate), *_too_long(rows.keys, lengths, _room(session), locate)])


def _room(session: Session) -> int | None:
    """Return the tokens that a prompt may have; None where the model has no limit."""
    new_tokens, context_length = session.config.generation.max_new_tokens, session.folder.context_length
    assert new_tokens is not None, "resolved before"
    if context_length is None:
        return None
    if new_tokens >= context_length:
        raise ConfigError(
            what="generation.max_new_tokens leaves no room for a prompt: "
            f"it is {new_tokens:,}, the model's context {format_count(context_length, 'token')}",
            fix="lower generation.max_new_tokens",
        )
    return context_length - new_tokens


def _empty(keys: list[int], locate: Locate) -> Iterator[Problem]:
    if keys:
        yield Problem(
            what=f"{_prompts(len(keys))} empty",
            where=_places([locate(key) for key in keys[:_SHOWN]], len(keys)),
            expected="at least one token to go on from",
            fix=f"fill or remove the rows, give the prompt a template, or, for those of a data set, {WAY_OUT}",
        )


def _dropped_empty(keys: list[int], source: Source, split: str, *, num_rows: int, unasked: str) -> list[Entry]:
    faults = RowFaults(locate=source.locate, problems={key: Problem(what="the prompt is empty") for key in keys})
    return faults.settle("drop", num_rows=num_rows, name=source.name, split_of=lambda key: split, unasked=unasked)


def _entries(keys: Integers, lengths: Integers, room: int, split: str, *, how: str) -> list[Entry]:
    """Return the ledger's entries on prompts that are cut to the limit, or dropped since they exceed it."""
    return [
        Entry(
            key=key,
            split=split,
            event="dropped_overlong" if how == "drop" else "cut_prompt",
            why=f"{ON_OVERLONG} is {how}, and the context less generation.max_new_tokens is "
            f"{format_count(room, 'token')}",
            tokens_before=length,
            tokens_after=0 if how == "drop" else room,
        )
        for key, length in zip(keys.tolist(), lengths.tolist(), strict=True)
    ]


def _too_long(keys: Integers, lengths: Integers, room: int | None, locate: Locate) -> Iterator[Problem]:
    if room is None or not (lengths > room).any():
        return
    longest = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths > room)]
    located = [f"{locate(int(keys[i]))} ({format_count(lengths[i], 'token')})" for i in longest[:_SHOWN]]
    yield Problem(
        what=f"{_prompts(len(longest))} too long: too little of the model's context is left for the answer",
        where=_places(located, len(longest)),
        expected=f"at most {format_count(room, 'token')} of prompt (context - generation.max_new_tokens)",
        fix="lower generation.max_new_tokens, shorten or remove the prompts, or, for those of a data set, set "
        f"{ON_OVERLONG}: truncate to cut them, or drop to leave them out (each is counted); `brim predict "
        "--on-overlong truncate_left` cuts them and keeps their ends",
    )


def prompts_of_texts(prompts: Sequence[str], session: Session, *, is_streamed: bool = False) -> TokenRows:
    """Return finished prompts as rows. is_streamed: there may be only one.

    Raises InputError and DataError for those that cannot be continued.
    """
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise InputError(what=f"the prompts are {type(prompts).__name__}", expected="a str, or a list of them")
    texts = list(prompts)
    require_texts(texts)
    rows = texts_as_source(texts, session.encoder, are_chats=session.config.chat is not None)
    require_continuable(rows, session, lambda key: f"prompt {key + 1}")
    if is_streamed and len(rows) != 1:
        raise InputError(
            what=f"{len(rows):,} prompts cannot be answered piece by piece at once",
            expected="one prompt with stream=True",
            fix="call `generate` once a prompt, or without stream, which answers all of them together",
        )
    return rows


def require_texts(prompts: Sequence[object]) -> None:
    """Raise InputError for a prompt that is not a text, or cannot be written as UTF-8."""
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str) or any("\ud800" <= character <= "\udfff" for character in prompt):
            expected = "a str, or a list of them, in valid Unicode"
            raise InputError(what=f"prompt {number} is not a text", expected=expected)


def _prompts(count: int) -> str:
    return format_count(count, "prompt is", "prompts are")


def _places(located: list[str], count: int) -> str:
    listed = ", ".join(located)
    return listed if count <= len(located) else f"{listed} and {count - len(located):,} more"


Keys = NDArray[np.uint64]


def row_keys(source: Source, rows: Integers, *, column: str | None) -> Keys:
    """Return 64 bits for each of these rows (ascending numbers): the number, or a hash of the column's value as text.

    Raises DataError, with the first few places, for values that are missing or that several rows have; InputError for a
    column that does not exist, or holds lists, objects or bytes.
    """
    if column is None:
        return rows.astype(np.uint64)
    _require_column(source, column)
    keys = np.zeros(len(rows), dtype=np.uint64)
    is_missing = np.zeros(len(rows), dtype=np.bool_)
    done = 0
    for block_rows, block in blocks(source.table.select([column]), rows):
        here = slice(done, done + len(block_rows))
        texts = cell_texts(block[column])
        keys[here] = [_hash(text) for text in texts]
        is_missing[here] = [not text for text in texts]
        done += len(block_rows)
    DataError.raise_for([*_missing(source, column, rows[is_missing]), *_shared(source, column, rows, keys, is_missing)])
    return keys


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _require_column(source: Source, column: str) -> None:
    names = source.table.column_names
    if column not in names:
        raise InputError(
            what=f"there is no column `{column}` to identify rows by",
            where=source.name,
            expected=", ".join(f"`{name}`" for name in names),
            fix="name one of them with --key, or leave it out: then rows are identified by their numbers",
        )
    kind = source.table.schema.field(column).type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise InputError(
            what=f"the column `{column}` holds {kind}, by which rows cannot be identified",
            where=source.name,
            expected="texts or numbers",
            fix="name another column with --key",
        )


def _missing(source: Source, column: str, rows: Integers) -> Iterator[Problem]:
    if len(rows):
        yield Problem(
            what=f"{_rows(len(rows))} no value in `{column}`, by which rows are to be identified",
            where=source.places(rows.tolist()),
            fix="fill it in, or leave out --key: then rows are identified by their numbers",
        )


def _shared(
    source: Source, column: str, rows: Integers, keys: Keys, is_missing: NDArray[np.bool_]
) -> Iterator[Problem]:
    """Yield a problem where rows have a value that an earlier row has, too."""
    here = np.flatnonzero(~is_missing)
    _, firsts = np.unique(keys[here], return_index=True)
    again = np.setdiff1d(here, here[firsts], assume_unique=True)
    if not len(again):
        return
    first = int(again[0])
    earlier = int(rows[here[np.flatnonzero(keys[here] == keys[first])[0]]])
    value = cell_texts(source.table.select([column]).slice(int(rows[first]), 1)[column])[0]
    yield Problem(
        what=f"{_rows(len(again))} a value in `{column}` that an earlier row has, too: {value[:60]!r} stands in "
        f"{source.locate(earlier)} first",
        where=source.places(rows[again].tolist()),
        expected="a value of its own for each row",
        fix="make them differ, name another column, or leave out --key: then rows are identified by their numbers",
    )


def _rows(count: int) -> str:
    return format_count(count, "row has", "rows have")


def own_data(source: Source, session: Session, split: str, *, num_rows: int) -> Note:
    """Say which rows are predicted where no data set was named."""
    part = "all splits" if split == "full" else f"the split {split}"
    has_trained = session.config.trainer.type != "none" and split in ("full", "train")
    told = (
        f"no data set was named (--dataset, in Python dataset=…): {format_count(num_rows, 'row')} of {source.name} "
        f"{'is' if num_rows == 1 else 'are'} predicted, "
        f"{part} of the configuration's own data{', those that it trains on among them' if has_trained else ''}"
    )
    return warning(told, topic="rows")
