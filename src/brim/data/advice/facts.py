"""What the advice needs to know of each row's texts, in a few dozen bytes a row: the texts themselves are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from brim.data.advice.characters import are_broken
from brim.data.advice.ending import answer_ends
from brim.data.advice.separator import ConstantEdges, PromptEnds, constant_edges, prompt_ends
from brim.data.prompt import Texts

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Kind = TypeVar("Kind", bound=np.generic)

# Shorter answers stand in their prompts by chance, or since the prompt lists what may be answered.
_LONG_ANSWER_CHARACTERS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Arrays with one entry a row, rows ascending by key.

    A text is known by Python's own hash of it, 64 bits with a secret seed: among a million different texts two have
    the same with a probability of 3e-8.
    """

    keys: Integers
    prompt: Integers
    loose_prompt: Integers  # of the prompt with case folded and each run of whitespace as one space
    answer: Integers
    blank_prompt: Flags
    prompt_ends: npt.NDArray[np.uint8]  # PromptEnds
    answer_ends: npt.NDArray[np.uint8]  # AnswerEnds
    answer_characters: npt.NDArray[np.int32]
    answer_in_prompt: Flags
    broken: Flags  # characters that no one typed

    def __len__(self) -> int:
        return len(self.keys)

    def of(self, keys: Integers) -> Facts:
        """Those of the rows with these keys."""
        at = np.searchsorted(self.keys, np.sort(keys))
        return Facts(**{field.name: getattr(self, field.name)[at] for field in fields(self)})


class Watcher:
    """Takes the facts of texts as they pass by, batch by batch."""

    def __init__(self, eos_text: str) -> None:
        self.has_answers = False
        self.samples: list[tuple[str, str]] = []  # ends of prompts that end in a space, with their answers' starts
        self._eos_text = eos_text
        self._edges: ConstantEdges | None = None
        self._parts: list[Facts] = []

    def __call__(self, texts: Texts) -> None:
        if self._edges is None:
            self._edges = constant_edges(texts.prompts, texts.answers)
            self.has_answers = bool(texts.answers)
        part = _facts_of(texts, self._edges, self._eos_text)
        self._parts.append(part)
        if self.has_answers:
            self._keep_samples(texts, part)

    def facts(self) -> Facts:
        """Of all texts that have passed."""
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
    prompts = texts.prompts if texts.own_prompts is None else texts.own_prompts  # examples show answers like theirs
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


def _mapped(of: Callable[[str], int], texts: Iterable[str], kind: type[Kind]) -> npt.NDArray[Kind]:
    return np.fromiter(map(of, texts), dtype=kind)


def _loose_hash(text: str) -> int:
    return hash(" ".join(text.split()).casefold())


def _has_words(text: str) -> bool:
    return bool(text) and not text.isspace()
