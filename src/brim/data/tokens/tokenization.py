"""Tokenize texts and conversations into token rows, cut where a length is set; every cut goes to the ledger.

Each piece of a conversation is encoded apart, as a prediction has to encode what it goes on from. A category's labels
are tokenized in every form in which a model would write them. `Texts` holds rows before they are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from brim.config.schema import Config, FinetuneTrainer
from brim.config.text import dotted
from brim.data.read import Entry
from brim.data.tokens.encoder import TextEncoder
from brim.data.tokens.rows import TokenRow
from brim.errors import ConfigError, Problem

Tokens: TypeAlias = tuple[int, ...]
SplitOf: TypeAlias = Callable[[int], str]  # returns a row's split, for the ledger


_BEFORE = "\n"  # no tokenizer takes it together with a word behind it


MATCH = dotted(("output_features", 0, "decoder", "match"))


def label_tokens(labels: Sequence[str], encoder: TextEncoder) -> dict[str, tuple[Tokens, ...]]:
    """Return the tokens of each label: as a word of its own after a space, and without a space before it.

    Which of them is natural depends on the prompt's last character and on what the model has learned; where both are
    allowed, the model decides. The end is not among the tokens.
    Raises ConfigError for labels that the tokenizer cannot write so that they are read as they are.
    """
    made = {
        label: tuple(form for form in forms if encoder.decode(form, skip_special_tokens=True).strip() == label)
        for label, forms in _forms(labels, encoder).items()
    }
    _require_written(made)
    return made


def _forms(labels: Sequence[str], encoder: TextEncoder) -> dict[str, tuple[Tokens, ...]]:
    bare = _within_text(labels, encoder)
    plain = encoder.encode(list(labels), special_tokens=False)
    spaced = encoder.encode([f" {label}" for label in labels], special_tokens=False)
    made: dict[str, tuple[Tokens, ...]] = {}
    for number, label in enumerate(labels):
        # Some tokenizers put the space before a text themselves.
        with_space = spaced[number] if plain[number] == bare[number] else plain[number]
        made[label] = tuple(dict.fromkeys((tuple(with_space), tuple(bare[number]))))
    return made


def label_room(config: Config, encoder: TextEncoder) -> int | None:
    """Count the tokens of the longest label and its end, where nothing else can be generated; else return None.

    Raises ConfigError as `label_tokens`.
    """
    feature = config.output_features[0]
    decoder = feature.categories if config.chat is None else None
    if decoder is None or not decoder.constrain_to_vocabulary or not feature.labels:
        return None
    return _room(label_tokens(feature.labels, encoder))


def learned_label_room(config: Config, encoder: TextEncoder) -> int | None:
    """Count the tokens of the longest label and its end, where a model learns to write nothing else; else return None.

    A model that was taught nothing may write words before a label, in which `decoder.match` finds it.
    """
    feature = config.output_features[0]
    is_learned = isinstance(config.trainer, FinetuneTrainer) and config.chat is None and feature.categories is not None
    return _room(_forms(feature.labels, encoder)) if is_learned and feature.labels else None


def _room(forms: Mapping[str, Sequence[Tokens]]) -> int:
    return 1 + max(len(form) for each in forms.values() for form in each)


def _within_text(texts: Sequence[str], encoder: TextEncoder) -> list[list[int]]:
    """Encode texts that follow other text, where nothing is put before them."""
    alone = encoder.encode(texts, special_tokens=False)
    [before] = encoder.encode([_BEFORE], special_tokens=False)
    behind = encoder.encode([f"{_BEFORE}{text}" for text in texts], special_tokens=False)
    return [
        after[len(before) :] if after[: len(before)] == before else ids
        for after, ids in zip(behind, alone, strict=True)
    ]


def _require_written(made: Mapping[str, Sequence[Tokens]]) -> None:
    ConfigError.raise_for(
        Problem(
            what=f"the base model's tokenizer cannot write the label {label!r}",
            where=MATCH,
            expected="with constrain_to_vocabulary, labels that come out of the tokenizer as they went in",
            fix="name the label otherwise, or set constrain_to_vocabulary: false",
        )
        for label, forms in made.items()
        if not forms
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Hold a number of tokens, and the key or fact that sets it."""

    num_tokens: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Say where rows are cut. None: nowhere."""

    prompt: Limit | None = None
    answer: Limit | None = None
    joined: Limit | None = None
    context_length: int | None = None  # longer rows, after all cuts, are findings


@dataclass(slots=True, kw_only=True)
class Findings:
    """Collect what tokenizing finds, beside the rows; for decisions once all rows are seen."""

    split_of: SplitOf
    special_in_template: int = 0  # special tokens that the template spells out itself
    entries: list[Entry] = field(default_factory=list)
    overlong: list[tuple[int, int]] = field(default_factory=list)  # (key, tokens) beyond the context
    unlearnable: list[tuple[int, int]] = field(default_factory=list)  # (key, tokens) without a supervised one
    most_dropped: int = 0  # unusable rows that would have been left out, where there are more of them
    special: list[int] = field(default_factory=list)  # keys of rows whose own text spells out special tokens
    empty: list[int] = field(default_factory=list)  # keys of rows whose answer is an empty text
    doubled_bos: int = 0  # rows whose prompt begins with BOS twice
    are_chats: bool = False  # the rows are conversations, which are cut as wholes alone
    otherwise: list[int] = field(default_factory=list)  # keys of conversations whose pieces have other tokens together


def cut(
    key: int, prompt: list[int], answer: list[int] | None, *, eos_id: int, limits: Limits, split_of: SplitOf
) -> tuple[TokenRow, list[Entry]]:
    """Join prompt, answer and EOS as one row, keeping the first tokens of each part and then of the whole.

    An answer that is cut still ends in EOS; a row that is cut as a whole does not. Without an answer the row is the
    prompt, to be continued. split_of: a row's split, for the ledger's entries.
    """
    entries: list[Entry] = []

    def keep(event: str, ids: list[int], limit: Limit | None) -> list[int]:
        entries.extend(_entries(key, split_of, event, len(ids), limit))
        return ids if limit is None else ids[: limit.num_tokens]

    prompt = keep("cut_prompt", prompt, limits.prompt)
    joined = prompt if answer is None else [*prompt, *keep("cut_answer", answer, limits.answer), eos_id]
    joined = keep("cut_joined", joined, limits.joined)
    supervised = np.arange(len(joined)) >= len(prompt)
    return TokenRow(key=key, input_ids=np.asarray(joined, dtype=np.int32), supervised=supervised), entries


def _entries(key: int, split_of: SplitOf, event: str, num_tokens: int, limit: Limit | None) -> Iterator[Entry]:
    """Give the ledger's entry of a part that is longer than its limit, and nothing for others."""
    if limit is not None and num_tokens > limit.num_tokens:
        kept = limit.num_tokens
        yield Entry(
            key=key, split=split_of(key), event=event, why=limit.why, tokens_before=num_tokens, tokens_after=kept
        )


def tokenize(
    texts: Iterable[Texts], encoder: TextEncoder, limits: Limits, findings: Findings
) -> Iterator[list[TokenRow]]:
    """Give blocks of token rows in the order of the texts; `findings` fills while they are drawn.

    Prompt and answer are encoded apart, since generation sees the prompt alone. Texts without answers become prompts
    to be continued.
    """
    for batch in texts:
        if batch.chats is not None:
            yield _conversations(batch, batch.chats, encoder, limits, findings)
            continue
        prompts = encoder.encode(batch.prompts, special_tokens=True)
        answers = encoder.encode(batch.answers, special_tokens=False) if batch.answers else None
        rows = []
        for number, key in enumerate(batch.keys.tolist()):
            answer = answers[number] if answers is not None else None
            row, entries = cut(
                key, prompts[number], answer, eos_id=encoder.eos_id, limits=limits, split_of=findings.split_of
            )
            findings.entries += entries
            rows.append(row)
            _look(findings, row, limits, is_learned=answer is not None)
        _look_at_texts(findings, batch, prompts, encoder)
        yield rows


def _conversations(
    batch: Texts, chats: Sequence[Chat], encoder: TextEncoder, limits: Limits, findings: Findings
) -> list[TokenRow]:
    """Return a batch of conversations as token rows, cut as wholes."""
    findings.are_chats = True
    whole = list(_chat_rows(batch.keys.tolist(), chats, encoder))
    findings.otherwise += [whole[at].key for at in encoded_otherwise(chats, whole, encoder)]
    rows = []
    for row, chat in zip(whole, chats, strict=True):
        if limits.joined is not None:
            findings.entries += _entries(row.key, findings.split_of, "cut_joined", len(row.input_ids), limits.joined)
            row = row.first(limits.joined.num_tokens)
        if chat.reply is not None and not chat.reply.strip():
            findings.empty.append(row.key)
        if any(encoder.count_special(text) for text in chat.own_texts):
            findings.special.append(row.key)
        rows.append(row)
        _look(findings, row, limits, is_learned=bool(batch.answers))
    return rows


def _look(findings: Findings, row: TokenRow, limits: Limits, *, is_learned: bool) -> None:
    if is_learned and not row.num_supervised:
        findings.unlearnable.append((row.key, len(row.input_ids)))
    if limits.context_length is not None and len(row.input_ids) > limits.context_length:
        findings.overlong.append((row.key, len(row.input_ids)))


def _look_at_texts(findings: Findings, batch: Texts, prompts: list[list[int]], encoder: TextEncoder) -> None:
    for number, key in enumerate(batch.keys.tolist()):
        num_special = encoder.count_special(batch.prompts[number]) - findings.special_in_template
        if batch.answers and not batch.answers[number].strip():
            findings.empty.append(key)
        if batch.answers:
            num_special += encoder.count_special(batch.answers[number])
        if num_special > 0:
            findings.special.append(key)
        ids = prompts[number]
        findings.doubled_bos += len(ids) > 1 and ids[0] == ids[1] == encoder.bos_id


def _chat_rows(keys: Sequence[int], chats: Sequence[Chat], encoder: TextEncoder) -> Iterator[TokenRow]:
    """Give a row for each conversation. Nothing is added to what the template writes: no BOS, no EOS."""
    first = iter(encoder.encode([chat.pieces[0].text for chat in chats], special_tokens=False))
    later = iter(_continued([piece.text for chat in chats for piece in chat.pieces[1:]], encoder))
    for key, chat in zip(keys, chats, strict=True):
        parts = [(next(later if number else first), piece.supervised) for number, piece in enumerate(chat.pieces)]
        supervised = np.concatenate([np.full(len(ids), mark) for ids, mark in parts])
        ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
        yield TokenRow(key=key, input_ids=ids, supervised=supervised)


def encoded_otherwise(chats: Sequence[Chat], rows: Sequence[TokenRow], encoder: TextEncoder) -> list[int]:
    """Return the positions of conversations whose text, encoded at once, gives other tokens than its pieces."""
    whole = encoder.encode(["".join(piece.text for piece in chat.pieces) for chat in chats], special_tokens=False)
    return [at for at, (row, ids) in enumerate(zip(rows, whole, strict=True)) if row.input_ids.tolist() != ids]


def _continued(texts: Sequence[str], encoder: TextEncoder) -> list[list[int]]:
    """Encode texts that follow other text: some tokenizers put a space before the first word of what they are given."""
    before, letter, both = encoder.encode([_BEFORE, "a", f"{_BEFORE}a"], special_tokens=False)
    return encoder.encode(texts, special_tokens=False) if both == before + letter else _within_text(texts, encoder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Hold a part of a row's text that is encoded apart, and whether the model learns to write it."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Hold what is known of a conversation beside its last prompt and answer."""

    pieces: tuple[Piece, ...]  # the whole text
    own_texts: tuple[str, ...]  # what the data says, without what the template writes around it
    reply: str | None  # the content of the last answer, where it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Hold prompts and answers of some rows, as text."""

    keys: npt.NDArray[np.int64]  # 0-based row numbers in the source
    prompts: list[str]  # of a conversation: all that stands before the last answer
    answers: list[str]  # empty when only prompts were asked for
    chats: list[Chat] | None = None  # with `chat`, for each row
    own_prompts: list[str] | None = None  # prompts without the examples that were retrieved for them

    def only(self, numbers: Sequence[int]) -> Texts:
        """Return some of the rows, by their positions."""
        if len(numbers) == len(self.keys):
            return self
        return Texts(
            keys=self.keys[list(numbers)],
            prompts=[self.prompts[number] for number in numbers],
            answers=[self.answers[number] for number in numbers] if self.answers else [],
            chats=None if self.chats is None else [self.chats[number] for number in numbers],
            own_prompts=None if self.own_prompts is None else [self.own_prompts[number] for number in numbers],
        )
