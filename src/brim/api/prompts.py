"""Whether prompts can be continued: none is empty, and each leaves room in the context for the new tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from brim.api.session import Session
from brim.data import TokenRows
from brim.errors import ConfigError, DataError, InputError, Problem

_SHOWN = 5  # a message locates this many rows and counts the others


def require_continuable(rows: TokenRows, session: Session, locate: Callable[[int], str]) -> None:
    """Raise DataError, naming the rows, for prompts that the model cannot go on from.

    rows: prompts, with or without their answers. locate: where the row of a key stands.
    Raises ConfigError where the new tokens leave no prompt any room.
    """
    lengths = rows.num_prompt_tokens
    problems = [
        *_empty(rows.keys[lengths == 0].tolist(), locate),
        *_too_long(rows.keys, lengths, _room(session), locate),
    ]
    if problems:
        raise DataError(*problems)


def _room(session: Session) -> int | None:
    """Tokens that a prompt may have; None where the model has no limit."""
    new_tokens, context_length = session.config.generation.max_new_tokens, session.folder.context_length
    assert new_tokens is not None, "resolved before"
    if context_length is None:
        return None
    if new_tokens >= context_length:
        raise ConfigError(
            Problem(
                what="generation.max_new_tokens leaves no room for a prompt: "
                f"it is {new_tokens:,}, the model's context {context_length:,} tokens",
                fix="lower generation.max_new_tokens",
            )
        )
    return context_length - new_tokens


def _empty(keys: list[int], locate: Callable[[int], str]) -> list[Problem]:
    if not keys:
        return []
    return [
        Problem(
            what=f"{_prompts(len(keys))} empty",
            where=_places([locate(key) for key in keys[:_SHOWN]], len(keys)),
            expected="at least one token to go on from",
            fix="fill or remove the rows, or give the prompt a template",
        )
    ]


def _too_long(
    keys: NDArray[np.int64], lengths: NDArray[np.int64], room: int | None, locate: Callable[[int], str]
) -> list[Problem]:
    if room is None or not (lengths > room).any():
        return []
    longest = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths > room)]
    located = [f"{locate(int(keys[i]))} ({lengths[i]:,} tokens)" for i in longest[:_SHOWN]]
    return [
        Problem(
            what=f"{_prompts(len(longest))} too long: too little of the model's context is left for the answer",
            where=_places(located, len(longest)),
            expected=f"at most {room:,} tokens of prompt (context - generation.max_new_tokens)",
            fix="lower generation.max_new_tokens, or shorten or remove the prompts "
            "(input_features[0].preprocessing.max_sequence_length cuts those of a data set; each cut is counted)",
        )
    ]


def require_texts(prompts: Sequence[object]) -> None:
    """Raise InputError for a prompt that is no text, or cannot be written as UTF-8."""
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str) or any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError(
                Problem(what=f"prompt {number} is no text", expected="a str, or a list of them, in valid Unicode")
            )


def _prompts(count: int) -> str:
    return "1 prompt is" if count == 1 else f"{count:,} prompts are"


def _places(located: list[str], count: int) -> str:
    listed = ", ".join(located)
    return listed if count <= len(located) else f"{listed} and {count - len(located):,} more"
