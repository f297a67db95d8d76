"""Answers without an end: the model learns to stop only where it is shown the end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from brim.data.advice.finding import Finding, Keys, share

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
    ends = (_end(answer, eos_text, foreign) for answer in answers)
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


_LONG, _SENTENCE, _OPEN, _INSIDE, _AT_END, _FOREIGN, _WORD = (flag.value for flag in AnswerEnds)  # plain ones are quick


def _end(answer: str, eos_text: str, foreign: tuple[str, ...]) -> int:
    flags = _WORD if answer[-1:].isalnum() or answer[-1:] in (",", " ") else 0
    answer = answer.rstrip()
    if len(answer) - answer.rfind("\n") > _LONG_CHARACTERS:
        flags |= _LONG
        if answer[-1].isalnum() or answer[-1] == ",":
            flags |= 0 if _ends_in_address(answer) else _OPEN
        elif answer.rstrip(_CLOSERS).endswith(_SENTENCE_ENDS):
            flags |= _SENTENCE
    if eos_text and eos_text in answer:
        at_end = answer.endswith(eos_text)
        num_inside = answer.count(eos_text) - at_end
        flags |= (_AT_END if at_end else 0) | (_INSIDE if num_inside else 0)
    return flags | (_FOREIGN if answer.endswith(foreign) else 0)


def _ends_in_address(answer: str) -> bool:
    return "://" in answer[-300:].rsplit(None, 1)[-1]
