"""How many rows are run together without gradients: fewer once memory has run out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.batching.caches import free_caches
from brim.batching.oom import is_out_of_memory
from brim.data import TokenRows
from brim.errors import OutOfMemoryError, Problem
from brim.units import format_bytes

Doing: TypeAlias = Literal["evaluation", "generation"]
Work: TypeAlias = Callable[[NDArray[np.intp]], None]  # on positions

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
    unit: Literal["rows", "bytes"] = "rows"  # of `after`; bytes: allocated, as predicted

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
            ("rows_at_once" if self.unit == "rows" else "cap_bytes"): self.after,
        }

    def __str__(self) -> str:
        after = f"{self.after:,} together" if self.unit == "rows" else f"in batches of up to {format_bytes(self.after)}"
        return (
            f"{self.doing}: {self.before:,} rows of up to {self.longest:,} tokens ran out of memory; they are run "
            f"again, and from now on {after}"
        )


class Batches(Protocol):
    """How rows are run together. What it has learned of the memory stays for later calls."""

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """Call `work` with some positions after the other, until each was in one call that ended well.

        order: the positions, those of the longest rows first. work: may be called again with positions of a call that
        ran out of memory, and must not count them twice.
        Raises OutOfMemoryError, naming the row, when one alone runs out of memory.
        """
        ...


class RowsAtOnce:
    """Batches of a number of rows that only falls. One object serves all evaluations of a run; training has its own.

    on_smaller: called each time that it falls; what it raises ends the work.
    """

    def __init__(self, num_rows: int, *, on_smaller: Callable[[Smaller], None] = lambda smaller: None) -> None:
        assert num_rows > 0, "no rows at once are no work"
        self.num_rows = num_rows
        self.on_smaller = on_smaller

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """See Batches; in this order."""
        done = 0
        has_retried = False
        while done < len(order):
            positions = order[done : done + self.num_rows]
            if fits(work, positions, is_last=has_retried):
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


def batches(given: int | Batches) -> Batches:
    """The same, where rows may be run together in other ways."""
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


def fits(work: Work, positions: NDArray[np.intp], *, is_last: bool = False) -> bool:
    """Whether the call ended well, and not for lack of memory. Other errors are passed on.

    is_last: a row alone has failed before.
    """
    try:
        work(positions)
    except Exception as error:
        if not is_out_of_memory(error, is_last=is_last):
            raise
        return False
    return True
