"""Texts as token rows, cut where a length is set; every cut goes to the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from brim.data.chat_tokens import chat_rows, encoded_otherwise
from brim.data.encoder import TextEncoder
from brim.data.ledger import Entry
from brim.data.rows import TokenRow, batch_of
from brim.data.texts import Chat, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A number of tokens, and the key or fact that sets it."""

    num_tokens: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where rows are cut. None: nowhere."""

    prompt: Limit | None = None
    answer: Limit | None = None
    joined: Limit | None = None
    context_length: int | None = None  # longer rows, after all cuts, are findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was cut from a row."""

    event: str  # cut_prompt, cut_answer or cut_joined, as in the ledger
    limit: Limit
    tokens_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How rows are looked at while they are tokenized."""

    split_of: Callable[[int], str]  # a row's split, for the ledger
    special_in_template: int = 0  # special tokens that the template spells out itself


@dataclass(slots=True, kw_only=True)
class Findings:
    """What tokenizing found, beside the rows; for decisions once all rows are seen."""

    entries: list[Entry] = field(default_factory=list)
    overlong: list[tuple[int, int]] = field(default_factory=list)  # (key, tokens) beyond the context
    unlearnable: list[tuple[int, int]] = field(default_factory=list)  # (key, tokens) without a supervised one
    most_dropped: int = 0  # unusable rows that would have been left out, where there are more of them
    special: list[int] = field(default_factory=list)  # keys of rows whose own text spells out special tokens
    empty: list[int] = field(default_factory=list)  # keys of rows whose answer is an empty text
    doubled_bos: int = 0  # rows whose prompt begins with BOS twice
    are_chats: bool = False  # the rows are conversations, which are cut as wholes alone
    otherwise: list[int] = field(default_factory=list)  # keys of conversations whose pieces have other tokens together


def cut(prompt: list[int], answer: list[int] | None, *, eos_id: int, limits: Limits) -> tuple[TokenRow, list[Cut]]:
    """Prompt, answer and EOS as one row with key 0, keeping the first tokens of each part and then of the whole.

    An answer that is cut still ends in EOS; a row that is cut as a whole does not. Without an answer the row is the
    prompt, to be continued.
    """
    cuts = []

    def keep(event: str, ids: list[int], limit: Limit | None) -> list[int]:
        if limit is None or len(ids) <= limit.num_tokens:
            return ids
        cuts.append(Cut(event=event, limit=limit, tokens_before=len(ids)))
        return ids[: limit.num_tokens]

    prompt = keep("cut_prompt", prompt, limits.prompt)
    joined = prompt if answer is None else [*prompt, *keep("cut_answer", answer, limits.answer), eos_id]
    joined = keep("cut_joined", joined, limits.joined)
    supervised = np.arange(len(joined)) >= len(prompt)
    return TokenRow(key=0, input_ids=np.asarray(joined, dtype=np.int32), supervised=supervised), cuts


def cut_whole(row: TokenRow, limit: Limit | None) -> tuple[TokenRow, list[Cut]]:
    """The first tokens of a row, and what was cut."""
    if limit is None or len(row.input_ids) <= limit.num_tokens:
        return row, []
    kept = slice(limit.num_tokens)
    made = Cut(event="cut_joined", limit=limit, tokens_before=len(row.input_ids))
    return replace(row, input_ids=row.input_ids[kept], supervised=row.supervised[kept]), [made]


def tokenize(
    texts: Iterable[Texts], encoder: TextEncoder, limits: Limits, findings: Findings, policy: Policy
) -> Iterator[pa.RecordBatch]:
    """Batches of token rows in the order of the texts; `findings` fills while they are drawn.

    Prompt and answer are encoded apart, since generation sees the prompt alone. Texts without answers become prompts
    to be continued.
    """
    for batch in texts:
        if batch.chats is not None:
            yield from _conversations(batch, batch.chats, encoder, limits, findings, policy)
            continue
        prompts = encoder.encode(batch.prompts, special_tokens=True)
        answers = encoder.encode(batch.answers, special_tokens=False) if batch.answers else None
        rows = []
        for number, key in enumerate(batch.keys.tolist()):
            answer = answers[number] if answers is not None else None
            row, cuts = cut(prompts[number], answer, eos_id=encoder.eos_id, limits=limits)
            row = replace(row, key=key)
            findings.entries += [_entry(key, policy.split_of(key), each) for each in cuts]
            rows.append(row)
            _look(findings, row, limits, is_learned=answer is not None)
        _look_at_texts(findings, batch, prompts, encoder, policy)
        if rows:
            yield batch_of(rows)


def _conversations(
    batch: Texts, chats: Sequence[Chat], encoder: TextEncoder, limits: Limits, findings: Findings, policy: Policy
) -> Iterator[pa.RecordBatch]:
    """A batch of conversations as token rows, cut as wholes."""
    findings.are_chats = True
    whole = [replace(row, key=key) for key, row in zip(batch.keys.tolist(), chat_rows(chats, encoder), strict=True)]
    findings.otherwise += [whole[at].key for at in encoded_otherwise(chats, whole, encoder)]
    rows = []
    for row, chat in zip(whole, chats, strict=True):
        row, cuts = cut_whole(row, limits.joined)
        findings.entries += [_entry(row.key, policy.split_of(row.key), each) for each in cuts]
        if chat.reply is not None and not chat.reply.strip():
            findings.empty.append(row.key)
        if any(encoder.count_special(text) for text in chat.own_texts):
            findings.special.append(row.key)
        rows.append(row)
        _look(findings, row, limits, is_learned=bool(batch.answers))
    if rows:
        yield batch_of(rows)


def _look(findings: Findings, row: TokenRow, limits: Limits, *, is_learned: bool) -> None:
    if is_learned and not row.num_supervised:
        findings.unlearnable.append((row.key, len(row.input_ids)))
    if limits.context_length is not None and len(row.input_ids) > limits.context_length:
        findings.overlong.append((row.key, len(row.input_ids)))


def _look_at_texts(
    findings: Findings, batch: Texts, prompts: list[list[int]], encoder: TextEncoder, policy: Policy
) -> None:
    for number, key in enumerate(batch.keys.tolist()):
        num_special = encoder.count_special(batch.prompts[number]) - policy.special_in_template
        if batch.answers and not batch.answers[number].strip():
            findings.empty.append(key)
        if batch.answers:
            num_special += encoder.count_special(batch.answers[number])
        if num_special > 0:
            findings.special.append(key)
        ids = prompts[number]
        findings.doubled_bos += len(ids) > 1 and ids[0] == ids[1] == encoder.bos_id


def _entry(key: int, split: str, made: Cut) -> Entry:
    return Entry(
        key=key,
        split=split,
        event=made.event,
        why=made.limit.why,
        tokens_before=made.tokens_before,
        tokens_after=made.limit.num_tokens,
    )
