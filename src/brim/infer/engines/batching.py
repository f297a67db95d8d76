"""Run rows together without gradients, as many as fit: fewer once memory has run out.

The number of rows is given, or follows from predicted costs and a cap; where nobody can say what rows take, it
follows from trials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.batching import CapChange, Cutter, MicroBatch, PeakMeter, free_caches, is_out_of_memory
from brim.data.tokens import TokenRows
from brim.errors import OutOfMemoryError
from brim.units import format_bytes, format_count

WINDOW_ROWS = 4096  # as planning/evaluation.py has it; tests compare them


class RowsByCost:
    """Batches. One object serves all evaluations of a run: its limit only falls, and training has one of its own.

    on_smaller: called each time that the limit falls; what it raises ends the work.
    """

    def __init__(self, cutter: Cutter, *, on_smaller: Callable[[Smaller], None] = lambda smaller: None) -> None:
        self._cutter = cutter
        self._on_smaller = on_smaller

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """See Batches."""
        for start in range(0, len(order), WINDOW_ROWS):
            left = order[start : start + WINDOW_ROWS]
            while len(left):
                left = self._run_until_lowered(rows, left, work, doing)

    def _run_until_lowered(
        self, rows: TokenRows, positions: NDArray[np.intp], work: Work, doing: Doing
    ) -> NDArray[np.intp]:
        """The positions that are left, which are to be cut anew; none where all fitted."""
        batches = self._cutter.cut(rows.lengths[positions])
        for number, batch in enumerate(batches):
            taken = positions[batch.rows]
            if fits(work, taken):
                continue
            # Here, after the `except` block: its traceback keeps tensors alive.
            free_caches()
            change = self._cutter.lower(batch)
            if change is not None:
                self._tell(rows, taken, batch, change, doing)
                return np.concatenate([positions[each.rows] for each in batches[number:]])
            if not fits(work, taken, is_last=True):
                position = int(taken[0])
                raise too_large(key=int(rows.keys[position]), num_tokens=int(rows.lengths[position]), doing=doing)
        return positions[:0]

    def _tell(
        self, rows: TokenRows, positions: NDArray[np.intp], batch: MicroBatch, change: CapChange, doing: Doing
    ) -> None:
        keys = tuple(int(key) for key in rows.keys[positions])
        unit: Literal["rows", "bytes"] = "rows" if change.unit == "rows" else "bytes"
        self._on_smaller(Smaller(doing=doing, keys=keys, longest=batch.padded_length, after=change.after, unit=unit))


# An A100 reaches 90% of its speed at about 1,000 tokens of a batch, with weights in 4 bits at 4,000: beyond four times
# as many there is little to be had for the risk.
_ENOUGH_TOKENS = 16_384


_SHARE_OF_LIMIT = 0.9


class RowsByTrial:
    """Batches. The longest row runs alone; then twice as many tokens each time, while twice what was measured fits.

    After a lack of memory half as many, and never more again. Where the device does not say what it took, such a lack
    is what ends the growth.
    """

    def __init__(self, meter: PeakMeter, *, on_smaller: Callable[[Smaller], None] = lambda smaller: None) -> None:
        self._meter = meter
        self._on_smaller = on_smaller
        self._most_tokens = 1  # of several rows, padding included
        self._grows = True

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """See Batches; in this order."""
        done = 0
        has_retried = False
        while done < len(order):
            longest = int(rows.lengths[order[done]])
            positions = order[done : done + max(1, self._most_tokens // longest)]
            if self._tried(work, positions, len(positions) * longest, is_last=has_retried):
                done += len(positions)
                has_retried = False
                continue
            # Here, after the `except` block: its traceback keeps tensors alive.
            free_caches()
            if len(positions) > 1:
                self._shrink(rows, positions, longest, doing)
            elif has_retried:
                raise too_large(key=int(rows.keys[positions[0]]), num_tokens=longest, doing=doing)
            else:
                has_retried = True

    def _tried(self, work: Work, positions: NDArray[np.intp], num_tokens: int, *, is_last: bool) -> bool:
        if not self._grows:
            return fits(work, positions, is_last=is_last)
        self._meter.begin()
        before_bytes = self._meter.peak_bytes()
        if not fits(work, positions, is_last=is_last):
            return False
        peak_bytes, limit_bytes = self._meter.peak_bytes(), self._meter.limit_bytes()
        if before_bytes is not None and peak_bytes is not None and limit_bytes is not None:
            twice_bytes = before_bytes + 2 * (peak_bytes - before_bytes)
            self._grows = twice_bytes <= _SHARE_OF_LIMIT * limit_bytes
        if self._grows:
            self._most_tokens = min(2 * max(num_tokens, self._most_tokens), _ENOUGH_TOKENS)
            self._grows = self._most_tokens < _ENOUGH_TOKENS
        else:
            self._most_tokens = max(num_tokens, self._most_tokens)
        return True

    def _shrink(self, rows: TokenRows, positions: NDArray[np.intp], longest: int, doing: Doing) -> None:
        self._grows = False
        at_once = len(positions) // 2
        self._most_tokens = at_once * longest
        keys = tuple(int(key) for key in rows.keys[positions])
        self._on_smaller(Smaller(doing=doing, keys=keys, longest=longest, after=at_once))


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
        what=f"{doing} of a single row runs out of memory ({format_count(num_tokens, 'token')})",
        where=f"row {key} (numbered from 0)",
        fix=_FIX[doing],
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
