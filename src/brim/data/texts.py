"""What rows are as text, before they are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a row's text that is encoded apart, and whether the model learns to write it."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What is known of a conversation beside its last prompt and answer."""

    pieces: tuple[Piece, ...]  # the whole text
    own_texts: tuple[str, ...]  # what the data says, without what the template writes around it
    reply: str | None  # the content of the last answer, where it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Prompts and answers of some rows, as text."""

    keys: npt.NDArray[np.int64]  # 0-based row numbers in the source
    prompts: list[str]  # of a conversation: all that stands before the last answer
    answers: list[str]  # empty when only prompts were asked for
    chats: list[Chat] | None = None  # with `chat`, for each row
    own_prompts: list[str] | None = None  # prompts without the examples that were retrieved for them

    def only(self, numbers: Sequence[int]) -> Texts:
        """Some of the rows, by their positions."""
        if len(numbers) == len(self.keys):
            return self
        return Texts(
            keys=self.keys[list(numbers)],
            prompts=[self.prompts[number] for number in numbers],
            answers=[self.answers[number] for number in numbers] if self.answers else [],
            chats=None if self.chats is None else [self.chats[number] for number in numbers],
            own_prompts=None if self.own_prompts is None else [self.own_prompts[number] for number in numbers],
        )
