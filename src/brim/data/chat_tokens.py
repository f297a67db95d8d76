"""Conversations as token rows: each piece encoded apart, as a prediction has to encode what it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from brim.data.encoder import TextEncoder
from brim.data.rows import TokenRow
from brim.data.texts import Chat


def chat_rows(chats: Sequence[Chat], encoder: TextEncoder) -> Iterator[TokenRow]:
    """A row with key 0 for each conversation. Nothing is added to what the template writes: no BOS, no EOS."""
    first = iter(encoder.encode([chat.pieces[0].text for chat in chats], special_tokens=False))
    later = iter(_continued([piece.text for chat in chats for piece in chat.pieces[1:]], encoder))
    for chat in chats:
        parts = [(next(later if number else first), piece.supervised) for number, piece in enumerate(chat.pieces)]
        supervised = np.concatenate([np.full(len(ids), mark) for ids, mark in parts])
        ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
        yield TokenRow(key=0, input_ids=ids, supervised=supervised)


def encoded_otherwise(chats: Sequence[Chat], rows: Sequence[TokenRow], encoder: TextEncoder) -> list[int]:
    """Positions of the conversations whose text, encoded at once, gives other tokens than its pieces."""
    whole = encoder.encode(["".join(piece.text for piece in chat.pieces) for chat in chats], special_tokens=False)
    return [at for at, (row, ids) in enumerate(zip(rows, whole, strict=True)) if row.input_ids.tolist() != ids]


def _continued(texts: Sequence[str], encoder: TextEncoder) -> list[list[int]]:
    """Tokens of texts that other text precedes: some tokenizers put a space before the first word of what they get."""
    alone = encoder.encode(texts, special_tokens=False)
    newline, letter, both = encoder.encode(["\n", "a", "\na"], special_tokens=False)
    if both == newline + letter:
        return alone
    behind = encoder.encode([f"\n{text}" for text in texts], special_tokens=False)
    return [
        after[len(newline) :] if after[: len(newline)] == newline else ids
        for after, ids in zip(behind, alone, strict=True)
    ]
