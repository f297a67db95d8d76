"""How many rows are run together without gradients: fewer once memory has run out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.batching.caches import free_caches
from brim.batching.oom import is_out_of_memory
from brim.data import TokenRows
from brim.errors import OutOfMemoryError, Problem

Doing: TypeAlias = Literal["evaluation", "generation"]

_FIX: dict[Doing, str] = {
    "evaluation": "load the base in 4 bits (quantization.bits: 4), set trainer.chunked_loss: true, or cut rows with "
    "preprocessing.global_max_sequence_length",
    "generation": "load the base in 4 bits (quantization.bits: 4), lower generation.max_new_tokens, or shorten the "
    "prompt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """Memory ran out: the rows that did not fit are run again, and from now on no more than `after` together."""

    doing: Doing
    keys: tuple[int, ...]  # of the rows that did not fit together
    longest: int  # tokens
    after: int

    @property
    def before(self) -> int:
        return len(self.keys)

    def record(self) -> dict[str, Any]:
        """Fields of the event in metrics.jsonl."""
        return {
            "event": "oom",
            "where": self.doing,
            "rows": list(self.keys),
            "padded_length": self.longest,
            "rows_at_once": self.after,
        }

    def __str__(self) -> str:
        return (
            f"{self.doing}: {self.before:,} rows of up to {self.longest:,} tokens ran out of memory; they are run "
            f"again, and from now on {self.after:,} together"
        )


class RowsAtOnce:
    """A number of rows that only falls. One object serves all evaluations of a run; training has a limit of its own.

    on_smaller: called each time that it falls; what it raises ends the work.
    """

    def __init__(self, num_rows: int, *, on_smaller: Callable[[Smaller], None] = lambda smaller: None) -> None:
        assert num_rows > 0, "no rows at once are no work"
        self.num_rows = num_rows
        self.on_smaller = on_smaller

    def run(
        self, rows: TokenRows, order: NDArray[np.intp], work: Callable[[NDArray[np.intp]], None], *, doing: Doing
    ) -> None:
        """Call `work` with some positions after the other, in this order, until each was in one call that ended well.

        work: may be called again with positions of a call that ran out of memory, and must not count them twice.
        Raises OutOfMemoryError, naming the row, when one alone runs out of memory.
        """
        done = 0
        has_retried = False
        while done < len(order):
            positions = order[done : done + self.num_rows]
            if _fits(work, positions):
                done += len(positions)
                has_retried = False
                continue
            # Here, after the `except` block: its traceback keeps tensors alive.
            free_caches()
            if len(positions) > 1:
                self._halve(rows, positions, doing)
            elif has_retried:
                position = int(positions[0])
                raise too_large(key=int(rows.keys[position]), num_tokens=int(rows.lengths[position]), doing=doing)
            else:
                has_retried = True

    def _halve(self, rows: TokenRows, positions: NDArray[np.intp], doing: Doing) -> None:
        self.num_rows = len(positions) // 2
        keys = tuple(int(key) for key in rows.keys[positions])
        longest = int(rows.lengths[positions].max())
        self.on_smaller(Smaller(doing=doing, keys=keys, longest=longest, after=self.num_rows))


def rows_at_once(given: int | RowsAtOnce) -> RowsAtOnce:
    """A number that nobody else knows of, for one piece of work; or the one that is shared."""
    return RowsAtOnce(given) if isinstance(given, int) else given


def longest_first(rows: TokenRows) -> NDArray[np.intp]:
    """Positions by length, so that rows of like length are together and a misfit shows at once."""
    return np.argsort(-rows.lengths, kind="stable")


def too_large(*, key: int, num_tokens: int, doing: Doing) -> OutOfMemoryError:
    """What ends the work when a row alone runs out of memory."""
    return OutOfMemoryError(
        Problem(
            what=f"{doing} of a single row runs out of memory ({num_tokens:,} tokens)",
            where=f"row {key} (numbered from 0)",
            fix=_FIX[doing],
        )
    )


def _fits(work: Callable[[NDArray[np.intp]], None], positions: NDArray[np.intp]) -> bool:
    try:
        work(positions)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
