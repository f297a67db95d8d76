"""Find rows that spoil training or its measurement: leaked, repeated, or too few.

The findings are prompts that hold their own answer, validation and test rows that the model has been trained on,
prompts and rows that stand in the data more than once, and splits with too few rows to measure by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from brim.data.advice.boundaries import Facts, Flags, Integers
from brim.data.advice.finding import Finding, Keys, share
from brim.units import format_count

# Answers are quoted from the prompt in some rows of many tasks; where it is so in most, the template gives them away.
_MOST = 0.5


def answer_in_prompt(keys: Keys, within: npt.NDArray[np.bool_]) -> list[Finding]:
    """Rows whose answer, of a sentence's length, stands in the prompt word for word."""
    count = int(within.sum())
    if count < 2 or count <= _MOST * len(keys):
        return []
    return [
        Finding(
            kind="answer_in_prompt",
            what=f"{share(count, len(keys))} have their answer in the prompt, word for word",
            why="the model learns to copy; fine where the task is to find a passage",
            fix="look at `brim check … --show 3`; take the column that holds the answer out of the prompt",
            rows=keys[within],
        )
    ]


def leakage(by_split: Mapping[str, Facts], *, fix: str) -> list[Finding]:
    """Rows of validation and test whose prompt, or whole row where the prompt says nothing, is in train, too.

    The split with the larger share is named first.
    """
    train = by_split.get("train")
    if train is None or not len(train):
        return []
    leaks = [_Leak(name, by_split[name], train) for name in ("validation", "test") if len(by_split.get(name, ()))]
    leaks = sorted((leak for leak in leaks if leak.known.any()), key=lambda leak: -leak.known.mean())
    if not leaks:
        return []
    return [
        Finding(
            kind="leakage",
            what="; ".join(leak.told for leak in leaks),
            why="a model that has seen the answers scores better there than on new prompts",
            fix=fix,
            rows=np.concatenate([leak.split.keys[leak.known] for leak in leaks]),
            like=np.concatenate([leak.twins for leak in leaks]),
        )
    ]


class _Leak:
    """What of a split is in train."""

    def __init__(self, name: str, split: Facts, train: Facts) -> None:
        self.name, self.split = name, split
        pairs, train_pairs = pair_hashes(split), pair_hashes(train)
        whole: Flags = np.isin(pairs, train_pairs)
        silent = set(train.prompt[says_nothing(train)].tolist())
        says_something = ~np.isin(split.prompt, np.fromiter(silent, dtype=np.int64)) & ~split.blank_prompt
        asked: Flags = np.isin(split.prompt, train.prompt) & says_something
        self.known: Flags = whole | asked
        self.num_whole = int(whole.sum())
        by_prompt = _first_like(split.prompt, train.prompt, train.keys)
        by_pair = _first_like(pairs.view(np.int64), train_pairs.view(np.int64), train.keys)
        self.twins: Integers = np.where(whole, by_pair, by_prompt)[self.known]

    @property
    def told(self) -> str:
        known = share(int(self.known.sum()), len(self.split), f"{self.name} rows")
        with_answer = f" ({self.num_whole:,} with the same answer)" if self.num_whole else ""
        return f"{known} have a prompt that stands in train{with_answer}"


def _first_like(values: Integers, among: Integers, keys: Integers) -> Integers:
    """For each value the key of the first equal one; where there is none, some key."""
    known, first = np.unique(among, return_index=True)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.asarray(keys[first[at]], dtype=np.int64)


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
    return format_count(count, "prompt")


_ENOUGH_ROWS = 30


def small_split(num_rows: Mapping[str, int]) -> list[Finding]:
    """Validation and test with a few rows. num_rows: of each split; none at all is told elsewhere.

    The uncertainty of a share of n rows is at most 0.98 / sqrt(n), at 95% confidence.
    """
    small = {name: num_rows[name] for name in ("validation", "test") if 0 < num_rows.get(name, 0) < _ENOUGH_ROWS}
    if not small:
        return []
    told = ", ".join(f"{name} has {count:,}" for name, count in small.items())
    uncertainty = min(0.98 / sqrt(min(small.values())), 1)
    return [
        Finding(
            kind="small_split",
            what=f"few rows to measure by: {told}",
            why=f"an accuracy from so few rows is uncertain by up to ±{uncertainty:.0%}",
            fix="give the split more rows (preprocessing.split)",
            rows=np.zeros(0, np.int64),
        )
    ]
