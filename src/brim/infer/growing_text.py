"""The text of tokens that arrive one after the other, in pieces that join up to the text of all of them."""

from __future__ import annotations

from functools import partial

from brim.data import TextEncoder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no character, or are not all there yet
_UNASSIGNED = "\U000e1000"  # no vocabulary has a token for it: where bytes are tokens, its last one is a byte within


class GrowingText:
    """Says of each token what it adds to the text; what a later token could still change is held back.

    A character may take several tokens, and a tokenizer that falls back to bytes throws away all of a run of them when
    the last ones are no character. So text counts as settled only when a stray byte behind it would not change it.
    Special tokens have no text. Only the last few tokens are decoded each time.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._decode = partial(encoder.decode, skip_special_tokens=True)
        (tokens,) = encoder.encode([_UNASSIGNED], special_tokens=False)
        self._stray = tokens[-1:]
        self._tokens: list[int] = []  # the last ones: those of the piece before, and what came since
        self._num_before = 0  # of them, belonging to the piece before
        self._num_given = 0  # characters of their text

    def add(self, token_id: int) -> str:
        """What can be said now that this token has come."""
        self._tokens.append(token_id)
        text = self._decode(self._tokens)
        settled = _common(text, self._decode([*self._tokens, *self._stray])).rstrip(_REPLACEMENT)
        piece = settled[self._num_given :]
        if piece and settled == text:
            self._tokens, self._num_before = self._tokens[self._num_before :], len(self._tokens) - self._num_before
            self._num_given = len(self._decode(self._tokens))
        else:
            self._num_given += len(piece)
        return piece

    def rest(self) -> str:
        """What was held back, now that no token follows."""
        return self._decode(self._tokens)[self._num_given :]


def _common(one: str, other: str) -> str:
    """What both begin with."""
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return one[:at]
    return one[: len(other)]
