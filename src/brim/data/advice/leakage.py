"""Rows to measure by that the model has been trained on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from brim.data.advice.facts import Facts, Flags, Integers
from brim.data.advice.finding import Finding, share
from brim.data.advice.repeated import pair_hashes, says_nothing


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
