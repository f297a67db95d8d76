"""Whether prompts can be continued: none is empty, and each leaves room in the context for the new tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from brim.api.session import Session
from brim.data import TokenRows
from brim.errors import DataError, Problem

_SHOWN = 5  # a message locates this many rows and counts the others


def require_continuable(rows: TokenRows, session: Session, locate: Callable[[int], str]) -> None:
    """Raise DataError, naming the rows, for prompts that the model cannot go on from.

    rows: prompts, with or without their answers. locate: where the row of a key stands.
    """
    problems = []
    lengths = rows.num_prompt_tokens
    empty = rows.keys[lengths == 0].tolist()
    if empty:
        problems.append(
            Problem(
                what=f"{_prompts(len(empty))} empty",
                where=_places(empty, locate),
                expected="at least one token to go on from",
                fix="fill or remove the rows, or give the prompt a template",
            )
        )
    new, context = session.config.generation.max_new_tokens, session.folder.context_length
    assert new is not None, "resolved before"
    long = [] if context is None else rows.keys[np.flatnonzero(lengths + new > context)].tolist()
    if long:
        problems.append(
            Problem(
                what=f"{_prompts(len(long))} too long: with generation.max_new_tokens, {new:,}, "
                f"the answer could pass the model's context, {context:,} tokens",
                where=_places(long, locate),
                fix="lower generation.max_new_tokens, or shorten or remove the prompts",
            )
        )
    if problems:
        raise DataError(*problems)


def _prompts(count: int) -> str:
    return "1 prompt is" if count == 1 else f"{count:,} prompts are"


def _places(keys: list[int], locate: Callable[[int], str]) -> str:
    located = ", ".join(locate(key) for key in keys[:_SHOWN])
    return located if len(keys) <= _SHOWN else f"{located} and {len(keys) - _SHOWN:,} more"
