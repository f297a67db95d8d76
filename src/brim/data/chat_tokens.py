"""Conversations as token rows: each piece encoded apart, as a prediction has to encode what it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from brim.data.encoder import TextEncoder
from brim.data.rows import TokenRow
from brim.data.texts import Chat


def chat_rows(chats: Sequence[Chat], encoder: TextEncoder) -> Iterator[TokenRow]:
    """A row with key 0 for each conversation. Nothing is added to what the template writes: no BOS, no EOS."""
    encoded = iter(encoder.encode([piece.text for chat in chats for piece in chat.pieces], special_tokens=False))
    for chat in chats:
        parts = [(next(encoded), piece.supervised) for piece in chat.pieces]
        supervised = np.concatenate([np.full(len(ids), mark) for ids, mark in parts])
        ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
        yield TokenRow(key=0, input_ids=ids, supervised=supervised)


def encoded_otherwise(chats: Sequence[Chat], rows: Sequence[TokenRow], encoder: TextEncoder) -> list[int]:
    """Positions of the conversations whose text, encoded at once, gives other tokens than its pieces."""
    whole = encoder.encode(["".join(piece.text for piece in chat.pieces) for chat in chats], special_tokens=False)
    return [at for at, (row, ids) in enumerate(zip(rows, whole, strict=True)) if row.input_ids.tolist() != ids]
