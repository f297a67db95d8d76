"""Whether the model can tell where the prompt ends and the answer begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from brim.data.advice.finding import Finding, Keys, share

_SPACES = " \t"
_EDGE_CHARACTERS = (12, 6, 4, 3, 2)  # tried in this order
_CONSTANT_SHARE = 0.9  # of the rows have the same ending, which then marks the end
_WORTH_TELLING = 0.1  # share of rows; a few odd ones are no missing separator


class PromptEnds(IntFlag):
    """How a prompt ends, as bits."""

    OPEN = 1  # in a word, a number or a comma, and not as the other prompts do
    GLUED = 2  # OPEN, and the answer goes on without a space
    SPACE = 4  # in a space or a tab


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantEdges:
    """What nearly all prompts end in, and nearly all answers begin with; empty where there is no such thing."""

    prompt_end: str = ""
    answer_start: str = ""


def constant_edges(prompts: Sequence[str], answers: Sequence[str]) -> ConstantEdges:
    """From some rows, which need be no sample: what is constant is constant everywhere.

    An answer's start counts where it begins with a line break or a sign; words are its text.
    """
    start = _constant([answer[: max(_EDGE_CHARACTERS)] for answer in answers], at_end=False)
    return ConstantEdges(
        prompt_end=_constant([prompt[-max(_EDGE_CHARACTERS) :] for prompt in prompts], at_end=True),
        answer_start="" if start.lstrip(_SPACES)[:1].isalnum() else start,
    )


def prompt_ends(prompts: Sequence[str], answers: Sequence[str], edges: ConstantEdges) -> npt.NDArray[np.uint8]:
    """PromptEnds of each row."""
    ends = (_end(prompt, answer, edges) for prompt, answer in zip(prompts, answers, strict=True))
    return np.fromiter(ends, dtype=np.uint8, count=len(prompts))


def no_separator(keys: Keys, ends: npt.NDArray[np.uint8], *, fix: str) -> list[Finding]:
    """Prompts that end in the middle of their text, with nothing between it and the answer."""
    is_open = (ends & PromptEnds.OPEN) > 0
    num_open, num_glued = int(is_open.sum()), int(((ends & PromptEnds.GLUED) > 0).sum())
    if num_open < max(2, _WORTH_TELLING * len(keys)):
        return []
    glued = f"; in {num_glued:,} not even a space stands between them" if num_glued else ""
    return [
        Finding(
            kind="no_separator",
            what=f"{share(num_open, len(keys))} have no separator: the prompt ends in a word, and the answer goes on"
            f"{glued}",
            why="the model cannot tell where the prompt ends; fine where the answer is meant to continue its text",
            fix=fix,
            rows=keys[is_open],
        )
    ]


def space_at_end(keys: Keys, ends: npt.NDArray[np.uint8], *, is_trap: bool, fix: str) -> list[Finding]:
    """Prompts that end in a space. is_trap: whether the tokenizer would have put it into the answer's first word."""
    has_space = (ends & PromptEnds.SPACE) > 0
    if not is_trap or has_space.sum() < max(2, _WORTH_TELLING * len(keys)):
        return []
    return [
        Finding(
            kind="space_at_end",
            what=f"{share(int(has_space.sum()), len(keys), 'prompts')} end in a space, a token of its own",
            why="in the text that the model knows, the space belongs to the word after it",
            fix=fix,
            rows=keys[has_space],
        )
    ]


_OPEN, _GLUED, _SPACE = (flag.value for flag in PromptEnds)  # plain ones are quick


def _end(prompt: str, answer: str, edges: ConstantEdges) -> int:
    last = prompt[-1:]
    has_space = last != "" and last in _SPACES
    flags = _SPACE if has_space else 0
    if has_space:
        last = prompt.rstrip(_SPACES)[-1:]
    if not (last.isalnum() or last == ",") or (edges.prompt_end and prompt.endswith(edges.prompt_end)):
        return flags
    if answer[:1] in ("\n", "\r") or (edges.answer_start and answer.startswith(edges.answer_start)):
        return flags
    is_glued = not has_space and answer[:1].isalnum()
    return flags | _OPEN | (_GLUED if is_glued else 0)


def _constant(pieces: Sequence[str], *, at_end: bool) -> str:
    """The longest ending (or beginning) of at least two characters that nearly all pieces share."""
    for num_characters in _EDGE_CHARACTERS:
        edges = Counter(piece[-num_characters:] if at_end else piece[:num_characters] for piece in pieces)
        edge, count = edges.most_common(1)[0] if edges else ("", 0)
        if len(edge) > 1 and count >= _CONSTANT_SHARE * len(pieces):
            return edge
    return ""
