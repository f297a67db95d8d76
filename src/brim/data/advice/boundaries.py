"""Find texts with broken characters, answers without an end, and prompts without a separator.

Broken characters are those that nobody typed: replacement and control characters, and UTF-8 that was read as
Windows-1252. A model learns to stop only where it is shown the end of an answer, and it must be able to tell where
the prompt ends and the answer begins.

What the advice needs of each row's texts is collected in a few dozen bytes a row; the texts are not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.data.advice.finding import Finding, Keys, share
from brim.data.tokens import Texts

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


# What Windows-1252 makes of the bytes 80 to 9F; A0 to BF stay the code points of these numbers.
_CP1252 = "".join(
    bytes([byte]).decode("cp1252") for byte in range(0x80, 0xA0) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
)


_TRAIL = f"[{_CP1252}\\x{{80}}-\\x{{BF}}]"


_BROKEN = f"\\x{{FFFD}}|[\\x00-\\x08\\x0B\\x0E-\\x1A\\x1C-\\x1F\\x7F]|[ÂÃ]{_TRAIL}|â€{_TRAIL}"


def are_broken(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which texts hold such a character. Form feeds and escape sequences of terminals are left alone."""
    found = pc.match_substring_regex(pa.array(texts, type=pa.large_string()), _BROKEN)
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


def broken_characters(keys: Keys, broken: npt.NDArray[np.bool_]) -> list[Finding]:
    """Rows with such characters."""
    rows = keys[broken]
    if not len(rows):
        return []
    return [
        Finding(
            kind="broken_characters",
            what=f"{share(len(rows), len(keys))} hold characters that nobody typed (\ufffd, Ã© for é, control codes)",
            why="the model learns to write them",
            fix="read the original again with its own encoding and save it as UTF-8",
            rows=rows,
        )
    ]


# End signs of other models, which this tokenizer may know as plain text only.
_END_SIGNS = ("</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<eos>", "[EOS]")


_LONG_CHARACTERS = 40  # a last line of this length is no word, no number and no item of a list


_NEARLY_ALL = 0.9  # of the long last lines end as sentences do: it is prose, and what does not stands out


_MOST = 0.5  # do: it is prose, in which what does not may be a matter of style


_TIMES_AS_OFTEN = 3


_SENTENCE_ENDS = tuple(".!?…。！？")


_CLOSERS = "\"'”’»)]}*_`"  # may stand behind the end of a sentence


_FEW = 3  # fewer that stand out are chance


_LEAST_SHARE = 0.005  # of all rows


_WIDE_CHARACTERS = 50  # answers that may have been cut at a width; shorter ones are labels


class AnswerEnds(IntFlag):
    """How an answer ends, as bits."""

    LONG = 1  # its last line is long
    SENTENCE = 2  # LONG, and ends as a sentence does
    OPEN = 4  # LONG, and ends in a letter, a digit or a comma
    EOS_INSIDE = 8  # the end-of-sequence token is spelled out before the end
    EOS_AT_END = 16
    FOREIGN = 32  # ends in another model's end sign
    WORD = 64  # ends in a letter, a digit, a comma or a space, as most cuts at a number of characters do


def answer_ends(answers: Sequence[str], eos_text: str) -> npt.NDArray[np.uint8]:
    """AnswerEnds of each row. eos_text: how the tokenizer spells its end-of-sequence token."""
    foreign = tuple(sign for sign in _END_SIGNS if sign != eos_text)
    ends = (_answer_end(answer, eos_text, foreign) for answer in answers)
    return np.fromiter(ends, dtype=np.uint8, count=len(answers))


def end_in_text(keys: Keys, ends: npt.NDArray[np.uint8], *, eos_text: str) -> list[Finding]:
    """Answers that spell out an end sign, of this tokenizer or of another."""
    found = []
    told = (
        (
            AnswerEnds.EOS_INSIDE,
            f"have the end-of-sequence token {eos_text} inside",
            "the model learns to stop there; what follows is never generated",
            f"take {eos_text} out of the answers, or split the rows",
        ),
        (
            AnswerEnds.EOS_AT_END,
            f"end in {eos_text} already",
            "brim ends each answer with it, so that it stands there twice",
            f"take {eos_text} off the answers",
        ),
        (
            AnswerEnds.FOREIGN,
            "end in another model's end sign, such as </s>",
            f"this tokenizer ends with {eos_text}, which brim adds; the other sign is text that is learned",
            "take the sign off the answers",
        ),
    )
    for flag, what, why, fix in told:
        rows = keys[(ends & flag) > 0]
        if len(rows):
            what = f"{share(len(rows), len(keys), 'answers')} {what}"
            found.append(Finding(kind="end_in_text", what=what, why=why, fix=fix, rows=rows))
    return found


def unfinished(keys: Keys, ends: npt.NDArray[np.uint8], characters: npt.NDArray[np.int32]) -> list[Finding]:
    """Answers that look as if something had cut them before brim saw them."""
    return [*_cut_at_one_length(keys, ends, characters), *_stops_in_a_sentence(keys, ends, characters)]


def _cut_at_one_length(keys: Keys, ends: npt.NDArray[np.uint8], characters: npt.NDArray[np.int32]) -> list[Finding]:
    """Many answers as long as the longest, most of them ending anywhere, and far fewer of any other length."""
    longest = int(characters.max(initial=0))
    at_longest = characters == longest
    num_cut = int(at_longest.sum())
    num_alike = int(np.unique(characters[~at_longest], return_counts=True)[1].max(initial=0))  # of another length
    num_anywhere = int(((ends[at_longest] & AnswerEnds.WORD) > 0).sum())
    stands_out = num_cut >= max(5, _LEAST_SHARE * len(keys)) and num_cut > _TIMES_AS_OFTEN * num_alike
    if (
        longest < _WIDE_CHARACTERS
        or not stands_out
        or 2 * num_anywhere <= num_cut
        or np.quantile(characters, 0.1) > 0.8 * longest
    ):
        return []
    return [
        Finding(
            kind="unfinished",
            what=f"{share(num_cut, len(keys), 'answers')} have exactly {longest:,} characters, and none has more: "
            "they look cut",
            why="the model learns to stop in the middle",
            fix="make the data again without that limit, or take these rows out",
            rows=keys[at_longest],
        )
    ]


def _stops_in_a_sentence(keys: Keys, ends: npt.NDArray[np.uint8], characters: npt.NDArray[np.int32]) -> list[Finding]:
    """Answers that end in a word where nearly all end as sentences do, or where most do and the long ones do not."""
    is_long, is_open = (ends & AnswerEnds.LONG) > 0, (ends & AnswerEnds.OPEN) > 0
    num_long, num_sentences = int(is_long.sum()), int(((ends & AnswerEnds.SENTENCE) > 0).sum())
    if num_sentences < _NEARLY_ALL * num_long:
        is_open &= _among_the_longest(is_long, is_open, characters)
    num_open = int(is_open.sum())
    if num_open < max(_FEW, _LEAST_SHARE * len(keys)) or num_sentences < _MOST * num_long:
        return []
    return [
        Finding(
            kind="unfinished",
            what=f"{share(num_open, len(keys), 'answers')} stop in a word or at a comma, where "
            f"{num_sentences / num_long:.0%} of those of their length end as sentences do",
            why="the model learns to stop in the middle of a sentence",
            fix="look at some; complete them, or take them out",
            rows=keys[is_open],
        )
    ]


def _among_the_longest(
    is_long: npt.NDArray[np.bool_], is_open: npt.NDArray[np.bool_], characters: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """The longest quarter, if it stops in a word far more often than the others: a limit cuts what is long.

    None, if it does not: then full stops are left out as a matter of style.
    """
    longest = is_long & (characters >= np.quantile(characters[is_long], 0.75)) if is_long.any() else is_long
    others = is_long & ~longest
    stands_out = is_open[longest].sum() * others.sum() > _TIMES_AS_OFTEN * is_open[others].sum() * longest.sum()
    return longest if stands_out else np.zeros_like(longest)


_LONG, _SENTENCE, _OPEN_ANSWER, _INSIDE, _AT_END, _FOREIGN, _WORD = (
    flag.value for flag in AnswerEnds
)  # plain ones are quick


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
    ends = (_prompt_end(prompt, answer, edges) for prompt, answer in zip(prompts, answers, strict=True))
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


_OPEN_PROMPT, _GLUED, _SPACE = (flag.value for flag in PromptEnds)  # plain ones are quick


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
    """The longest ending (or beginning) of at least two characters that nearly all pieces share."""
    for num_characters in _EDGE_CHARACTERS:
        edges = Counter(piece[-num_characters:] if at_end else piece[:num_characters] for piece in pieces)
        edge, count = edges.most_common(1)[0] if edges else ("", 0)
        if len(edge) > 1 and count >= _CONSTANT_SHARE * len(pieces):
            return edge
    return ""
