"""Prompts that hold their own answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from brim.data.advice.finding import Finding, Keys, share

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
