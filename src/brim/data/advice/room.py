"""Prompts that leave too little of the context for the answer: `predict` and `evaluate` refuse them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from brim.data.advice.finding import Finding, Keys, share


def no_room(
    keys: Keys, lengths: npt.NDArray[np.int64], *, context_length: int, num_new: int, can_cut: bool
) -> list[Finding]:
    """Rows whose prompt is longer than the context less the tokens to be generated. The longest come first.

    lengths: tokens of each prompt. num_new: generation.max_new_tokens. can_cut: whether a key cuts prompts.
    """
    room = context_length - num_new
    too_long = np.flatnonzero(lengths > room)
    if not len(too_long):
        return []
    longest = too_long[np.argsort(-lengths[too_long], kind="stable")]
    return [
        Finding(
            kind="no_room",
            what=f"{share(len(longest), len(keys), 'prompts')} are too long: the model's context of "
            f"{context_length:,} tokens less generation.max_new_tokens {num_new:,} leaves {max(room, 0):,}, "
            f"the longest has {lengths[longest[0]]:,}",
            why="predict stops at such rows before it generates",
            fix="lower generation.max_new_tokens"
            + (f", or set input_features[0].preprocessing.max_sequence_length: {room}" if can_cut and room > 0 else ""),
            rows=keys[longest],
        )
    ]
