"""Prompts and rows that stand in the data more than once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brim.data.advice.facts import Facts, Flags, Integers
from brim.data.advice.finding import Finding, share

_ONE_PROMPT_SHARE = 0.5
_ONE_ANSWER_SHARE = 0.5
_LOOSE_SHARE = 0.001
_FEW_ROWS = 10  # below this, a text in half of the rows is no news
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of the prompt's hash is lost

BY_ROWS = "`brim check … --rows FILE` lists them"


def pair_hashes(facts: Facts) -> npt.NDArray[np.uint64]:
    """A hash of prompt and answer together."""
    prompts, answers = facts.prompt.view(np.uint64), facts.answer.view(np.uint64)
    return np.asarray(prompts * _MIX + answers, dtype=np.uint64)


def says_nothing(facts: Facts) -> Flags:
    """Rows whose prompt does not tell them apart: blank, as where text is learned alone, or in most rows the same."""
    firsts = _Groups.of(facts.prompt)
    return facts.blank_prompt | (firsts.sizes > max(_FEW_ROWS, _ONE_PROMPT_SHARE * len(facts)))


def one_prompt(facts: Facts) -> list[Finding]:
    """A prompt that is not blank and stands in most rows, with different answers."""
    is_it = says_nothing(facts) & ~facts.blank_prompt
    answers = facts.answer[is_it]
    if not len(answers) or (answers == answers[0]).all():
        return []
    return [
        Finding(
            kind="one_prompt",
            what=f"{share(int(is_it.sum()), len(facts))} have the very same prompt, with different answers",
            why="the answer cannot follow from such a prompt",
            fix="put the columns that decide the answer into prompt.template, as {column}",
            rows=facts.keys[is_it],
        )
    ]


def different_answers(facts: Facts) -> list[Finding]:
    """One prompt, several answers: letter for letter, and apart from that but for case and spacing."""
    skip = says_nothing(facts)
    exact = _several_answers(facts, facts.prompt) & ~skip
    loose = _several_answers(facts, facts.loose_prompt) & ~skip & ~exact
    found = []
    if exact.any():
        rows, like = _side_by_side(facts.keys[exact], facts.prompt[exact])
        num_prompts = int(np.count_nonzero(rows == like))
        found.append(
            Finding(
                kind="different_answers",
                what=f"{share(len(rows), len(facts))} ask the same as another and are answered differently "
                f"({_prompts(num_prompts)})",
                why="the model learns a mixture of the answers",
                fix="keep one answer a prompt, or add to the prompt what makes them differ",
                rows=rows,
                like=like,
            )
        )
    if loose.sum() >= max(2, _LOOSE_SHARE * len(facts)):
        rows, like = _side_by_side(facts.keys[loose], facts.loose_prompt[loose])
        found.append(
            Finding(
                kind="nearly_the_same",
                what=f"{share(len(rows), len(facts))} differ from another's prompt in case or spacing alone "
                "and are answered differently",
                why="unless case or spacing decides the answer, the model learns a mixture",
                fix="look at some; write such prompts alike and keep one answer",
                rows=rows,
                like=like,
            )
        )
    return found


def duplicates(facts: Facts) -> list[Finding]:
    """Rows whose prompt and answer stood there before."""
    groups = _Groups.of(pair_hashes(facts))
    again = groups.first != np.arange(len(facts))
    if not again.any():
        return []
    return [
        Finding(
            kind="duplicates",
            what=f"{share(int(again.sum()), len(facts))} repeat an earlier row, prompt and answer",
            why="what is repeated weighs more, and is learned by heart",
            fix=f"take them out; {BY_ROWS}",
            rows=facts.keys[again],
            like=facts.keys[groups.first[again]],
        )
    ]


def one_answer(facts: Facts) -> list[Finding]:
    """An answer that most rows share."""
    groups = _Groups.of(facts.answer)
    largest = int(groups.sizes.max(initial=0))
    if largest <= max(_FEW_ROWS, _ONE_ANSWER_SHARE * len(facts)):
        return []
    return [
        Finding(
            kind="one_answer",
            what=f"{share(largest, len(facts))} have one and the same answer",
            why=f"a model that always writes it is right in {largest / len(facts):.1%} of the rows",
            fix="compare sequence_accuracy with this share, or balance the answers",
            rows=facts.keys[groups.sizes == largest],
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Equal values: for each entry, the first entry of its group and the group's size."""

    first: Integers
    sizes: Integers

    @classmethod
    def of(cls, values: npt.NDArray[np.generic]) -> _Groups:
        _, first, group, counts = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
        return cls(first=first[group], sizes=counts[group])


def _several_answers(facts: Facts, prompts: Integers) -> Flags:
    """Rows whose prompt has more than one answer."""
    _, group = np.unique(prompts, return_inverse=True)
    pairs = group.astype(np.uint64) * _MIX + facts.answer.view(np.uint64)
    _, first_of_pair = np.unique(pairs, return_index=True)
    num_answers = np.bincount(group[first_of_pair], minlength=len(facts))
    return np.asarray(num_answers[group] > 1, dtype=np.bool_)


def _side_by_side(keys: Integers, values: Integers) -> tuple[Integers, Integers]:
    """The rows after the first of each group, groups by their first row, and that first row for each."""
    groups = _Groups.of(values)
    order = np.lexsort((np.arange(len(keys)), groups.first))
    return keys[order], keys[groups.first[order]]


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count:,} prompts"
