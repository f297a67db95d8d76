"""Collect what the advice needs of each row's texts as they pass by: a few dozen bytes a row; the texts are not kept.

Broken characters are those that nobody typed: replacement and control characters, and UTF-8 that was read as
Windows-1252. How a prompt ends tells whether the model can see where the answer begins, and how an answer ends whether
something had cut it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.data.advice.finding import Integers
from brim.data.tokens import TextEncoder, Texts

Flags = npt.NDArray[np.bool_]


Bits = npt.NDArray[np.uint8]


# Shorter answers stand in their prompts by chance, or since the prompt lists what may be answered.
_LONG_ANSWER_CHARACTERS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Hold facts of rows as arrays with one entry a row, rows ascending by key.

    A text is known by Python's own hash of it, 64 bits with a secret seed: among a million different texts two have
    the same with a probability of 3e-8.
    """

    keys: Integers
    prompt: Integers
    loose_prompt: Integers  # of the prompt with case folded and each run of whitespace as one space
    answer: Integers
    blank_prompt: Flags
    prompt_ends: Bits  # PromptEnds
    answer_ends: Bits  # AnswerEnds
    answer_characters: npt.NDArray[np.int32]
    answer_in_prompt: Flags
    broken: Flags  # characters that no one typed

    def __len__(self) -> int:
        return len(self.keys)

    def of(self, keys: Integers) -> Facts:
        """Return the facts of the rows with these keys."""
        at = np.searchsorted(self.keys, np.sort(keys))
        return Facts(**{field.name: getattr(self, field.name)[at] for field in fields(self)})


class Watcher:
    """Take the facts of texts as they pass by, batch by batch."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.has_answers = False
        self.eos_text = encoder.decode([encoder.eos_id], skip_special_tokens=False).strip()  # as it is written
        self.samples: list[tuple[str, str]] = []  # ends of prompts that end in a space, with their answers' starts
        self._edges: ConstantEdges | None = None
        self._parts: list[Facts] = []

    def __call__(self, texts: Texts) -> None:
        if self._edges is None:
            self._edges = constant_edges(texts.prompts, texts.answers)
            self.has_answers = bool(texts.answers)
        part = _facts_of(texts, self._edges, self.eos_text)
        self._parts.append(part)
        if self.has_answers:
            self._keep_samples(texts, part)

    def facts(self) -> Facts:
        """Return the facts of all texts that have passed."""
        parts = self._parts or [_facts_of(Texts(keys=np.zeros(0, np.int64), prompts=[], answers=[]), None, "")]
        names = [field.name for field in fields(Facts)]
        whole = Facts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
        self._parts = [whole]
        return whole

    def _keep_samples(self, texts: Texts, part: Facts) -> None:
        from_here = np.flatnonzero(part.prompt_ends & PromptEnds.SPACE)[: _MOST_SAMPLES - len(self.samples)]
        for number in from_here.tolist():
            self.samples.append(
                (texts.prompts[number][-_SAMPLE_CHARACTERS:], texts.answers[number][:_SAMPLE_CHARACTERS])
            )


_MOST_SAMPLES = 64


_SAMPLE_CHARACTERS = 24


def _facts_of(texts: Texts, edges: ConstantEdges | None, eos_text: str) -> Facts:
    prompts = texts.prompts if texts.own_prompts is None else texts.own_prompts  # examples hold others' answers
    answers = texts.answers or [""] * len(prompts)
    long = _LONG_ANSWER_CHARACTERS
    within = [len(answer) >= long and answer.strip() in prompt for prompt, answer in zip(prompts, answers, strict=True)]
    return Facts(
        keys=np.asarray(texts.keys, dtype=np.int64),
        prompt=_mapped(hash, prompts, np.int64),
        loose_prompt=_mapped(_loose_hash, prompts, np.int64),
        answer=_mapped(hash, answers, np.int64),
        blank_prompt=~_mapped(_has_words, prompts, np.bool_),
        prompt_ends=prompt_ends(prompts, answers, edges or ConstantEdges()),
        answer_ends=answer_ends(answers, eos_text),
        answer_characters=_mapped(len, answers, np.int32),
        answer_in_prompt=np.asarray(within, dtype=np.bool_),
        broken=are_broken(prompts) | are_broken(answers),
    )


def _mapped(of: Callable[[str], int], texts: Iterable[str], kind: type[Any]) -> npt.NDArray[Any]:
    return np.fromiter(map(of, texts), dtype=kind)


def _loose_hash(text: str) -> int:
    return hash(" ".join(text.split()).casefold())


def _has_words(text: str) -> bool:
    return bool(text) and not text.isspace()


# What Windows-1252 makes of the bytes 80 to 9F; A0 to BF stay the code points of these numbers.
_CP1252 = "".join(
    bytes([byte]).decode("cp1252") for byte in range(0x80, 0xA0) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
)


_TRAIL = f"[{_CP1252}\\x{{80}}-\\x{{BF}}]"


_BROKEN = f"\\x{{FFFD}}|[\\x00-\\x08\\x0B\\x0E-\\x1A\\x1C-\\x1F\\x7F]|[ÂÃ]{_TRAIL}|â€{_TRAIL}"


def are_broken(texts: Sequence[str]) -> Flags:
    """Return which texts hold such a character. Form feeds and escape sequences of terminals are left alone."""
    found = pc.match_substring_regex(pa.array(texts, type=pa.large_string()), _BROKEN)
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


# End signs of other models, which this tokenizer may know as plain text only.
_END_SIGNS = ("</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<eos>", "[EOS]")


_LONG_CHARACTERS = 40  # a longer last line is not just a word, a number or an item of a list


_SENTENCE_ENDS = tuple(".!?…。！？")


_CLOSERS = "\"'”’»)]}*_`"  # may stand behind the end of a sentence


class AnswerEnds(IntFlag):
    """Say how an answer ends, as bits."""

    LONG = 1  # its last line is long
    SENTENCE = 2  # LONG, and ends as a sentence does
    OPEN = 4  # LONG, and ends in a letter, a digit or a comma
    EOS_INSIDE = 8  # the end-of-sequence token is spelled out before the end
    EOS_AT_END = 16
    FOREIGN = 32  # ends in another model's end sign
    WORD = 64  # ends in a letter, a digit, a comma or a space, as most cuts at a number of characters do


def answer_ends(answers: Sequence[str], eos_text: str) -> Bits:
    """Return AnswerEnds of each row. eos_text: how the tokenizer spells its end-of-sequence token."""
    foreign = tuple(sign for sign in _END_SIGNS if sign != eos_text)
    ends = (_answer_end(answer, eos_text, foreign) for answer in answers)
    return np.fromiter(ends, dtype=np.uint8, count=len(answers))


_LONG, _SENTENCE, _OPEN_ANSWER, _INSIDE, _AT_END, _FOREIGN, _WORD = (
    flag.value for flag in AnswerEnds
)  # plain integers, which are faster than flags


def _answer_end(answer: str, eos_text: str, foreign: tuple[str, ...]) -> int:
    flags = _WORD if answer[-1:].isalnum() or answer[-1:] in (",", " ") else 0
    answer = answer.rstrip()
    if len(answer) - answer.rfind("\n") > _LONG_CHARACTERS:
        flags |= _LONG
        if answer[-1].isalnum() or answer[-1] == ",":
            flags |= 0 if _ends_in_address(answer) else _OPEN_ANSWER
        elif answer.rstrip(_CLOSERS).endswith(_SENTENCE_ENDS):
            flags |= _SENTENCE
    if eos_text and eos_text in answer:
        at_end = answer.endswith(eos_text)
        num_inside = answer.count(eos_text) - at_end
        flags |= (_AT_END if at_end else 0) | (_INSIDE if num_inside else 0)
    return flags | (_FOREIGN if answer.endswith(foreign) else 0)


def _ends_in_address(answer: str) -> bool:
    return "://" in answer[-300:].rsplit(None, 1)[-1]


_SPACES = " \t"


_EDGE_CHARACTERS = (12, 6, 4, 3, 2)  # tried in this order


_CONSTANT_SHARE = 0.9  # of the rows have the same ending, which then marks the end


class PromptEnds(IntFlag):
    """Say how a prompt ends, as bits."""

    OPEN = 1  # in a word, a number or a comma, and not as the other prompts do
    GLUED = 2  # OPEN, and the answer goes on without a space
    SPACE = 4  # in a space or a tab


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantEdges:
    """Hold what nearly all prompts end in, and nearly all answers begin with; empty where there is no such text."""

    prompt_end: str = ""
    answer_start: str = ""


def constant_edges(prompts: Sequence[str], answers: Sequence[str]) -> ConstantEdges:
    """Find constant edges in some rows, which need not be a sample: what is constant is constant everywhere.

    The start of answers counts where it begins with a line break or a sign; a word would be part of the text.
    """
    start = _constant([answer[: max(_EDGE_CHARACTERS)] for answer in answers], at_end=False)
    return ConstantEdges(
        prompt_end=_constant([prompt[-max(_EDGE_CHARACTERS) :] for prompt in prompts], at_end=True),
        answer_start="" if start.lstrip(_SPACES)[:1].isalnum() else start,
    )


def prompt_ends(prompts: Sequence[str], answers: Sequence[str], edges: ConstantEdges) -> Bits:
    """Return PromptEnds of each row."""
    ends = (_prompt_end(prompt, answer, edges) for prompt, answer in zip(prompts, answers, strict=True))
    return np.fromiter(ends, dtype=np.uint8, count=len(prompts))


_OPEN_PROMPT, _GLUED, _SPACE = (flag.value for flag in PromptEnds)  # plain integers, which are faster than flags


def _prompt_end(prompt: str, answer: str, edges: ConstantEdges) -> int:
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
    return flags | _OPEN_PROMPT | (_GLUED if is_glued else 0)


def _constant(pieces: Sequence[str], *, at_end: bool) -> str:
    """Return the longest ending (or beginning) of at least two characters that nearly all pieces share."""
    for num_characters in _EDGE_CHARACTERS:
        edges = Counter(piece[-num_characters:] if at_end else piece[:num_characters] for piece in pieces)
        edge, count = edges.most_common(1)[0] if edges else ("", 0)
        if len(edge) > 1 and count >= _CONSTANT_SHARE * len(pieces):
            return edge
    return ""
