"""Run rows together without gradients, as many as fit: fewer once memory has run out.

The number of rows is given, or follows from predicted costs and a cap; without a prediction it follows from trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from brim.batching import CapChange, Cutter, MicroBatch, run_batches
from brim.batching.memory import PeakMeter
from brim.data.tokens import TokenRows
from brim.errors import OutOfMemoryError
from brim.units import format_bytes, format_count

T = TypeVar("T")


WINDOW_ROWS = 4096  # as planning/evaluation.py has it; tests compare them


class RowsByCost:
    """Make batches of what fits, by predicted costs. One object serves all evaluations of a run: its limit only falls.

    on_smaller: called each time that the limit falls; what it raises ends the work.
    """

    def __init__(self, cutter: Cutter, *, on_smaller: OnSmaller = lambda smaller: None) -> None:
        self._cutter = cutter
        self._on_smaller = on_smaller

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """Run rows in batches, as Batches.run does."""

        def divide(left: NDArray[np.intp]) -> list[MicroBatch]:
            return [replace(batch, rows=left[batch.rows]) for batch in self._cutter.cut(rows.lengths[left])]

        for start in range(0, len(order), WINDOW_ROWS):
            run_rows(
                rows,
                order[start : start + WINDOW_ROWS],
                doing=doing,
                divide=divide,
                work=lambda batch: work(batch.rows),
                lower=self._cutter.lower,
                on_smaller=self._on_smaller,
            )

    def state(self) -> dict[str, Any]:
        return {"cutter": self._cutter.state()}


# An A100 reaches 90% of its speed at about 1,000 tokens of a batch, with weights in 4 bits at 4,000: beyond four times
# as many there is little to be had for the risk.
_ENOUGH_TOKENS = 16_384


_SHARE_OF_LIMIT = 0.9


class RowsByTrial:
    """Make batches by trial: the longest row alone, then twice as many tokens each time, while twice the measured fits.

    After a lack of memory half as many, and never more again. Where the device does not say what it took, the growth
    ends at such a lack.
    """

    def __init__(self, meter: PeakMeter, *, on_smaller: OnSmaller = lambda smaller: None) -> None:
        self._meter = meter
        self._on_smaller = on_smaller
        self._most_tokens = 1  # of several rows, padding included
        self._grows = True

    def state(self) -> dict[str, Any]:
        return {}

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """Run rows in batches, as Batches.run does, in this order."""

        def divide(left: NDArray[np.intp]) -> Iterator[MicroBatch]:
            while len(left):
                num_rows = max(1, self._most_tokens // int(rows.lengths[left[0]]))
                yield together(rows, left[:num_rows])
                left = left[num_rows:]

        run_rows(
            rows,
            order,
            doing=doing,
            divide=divide,
            work=lambda batch: self._measured(batch, work),
            lower=self._lower,
            on_smaller=self._on_smaller,
        )

    def _measured(self, batch: MicroBatch, work: Work) -> None:
        """Run a batch; twice as many tokens follow, while what it took says that they fit."""
        if not self._grows:
            work(batch.rows)
            return
        num_tokens = batch.num_rows * batch.padded_length
        self._meter.begin()
        before_bytes = self._meter.peak_bytes()
        work(batch.rows)
        peak_bytes, limit_bytes = self._meter.peak_bytes(), self._meter.limit_bytes()
        if before_bytes is not None and peak_bytes is not None and limit_bytes is not None:
            twice_bytes = before_bytes + 2 * (peak_bytes - before_bytes)
            self._grows = twice_bytes <= _SHARE_OF_LIMIT * limit_bytes
        if self._grows:
            self._most_tokens = min(2 * max(num_tokens, self._most_tokens), _ENOUGH_TOKENS)
            self._grows = self._most_tokens < _ENOUGH_TOKENS
        else:
            self._most_tokens = max(num_tokens, self._most_tokens)

    def _lower(self, failed: MicroBatch) -> CapChange:
        self._grows = False
        after = failed.num_rows // 2
        self._most_tokens = after * failed.padded_length
        return CapChange(before=failed.num_rows, after=after, unit="rows")


Doing: TypeAlias = Literal["evaluation", "generation"]


Work: TypeAlias = Callable[[NDArray[np.intp]], None]  # on positions


OnSmaller: TypeAlias = Callable[["Smaller"], None]


_FIX: dict[Doing, str] = {
    "evaluation": "load the base in 4 bits (quantization.bits: 4), set trainer.chunked_loss: true, or cut rows with "
    "preprocessing.global_max_sequence_length",
    "generation": "load the base in 4 bits (quantization.bits: 4), lower generation.max_new_tokens, or shorten the "
    "prompt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """Report that memory ran out: the rows are run again, and from now on no more than `after` together."""

    doing: Doing
    keys: tuple[int, ...]  # of the rows that did not fit together
    longest: int  # tokens
    after: int
    unit: str = "rows"  # of `after`; or bytes: allocated, as predicted

    @property
    def before(self) -> int:
        return len(self.keys)

    def record(self) -> dict[str, Any]:
        """Return the fields of the event in metrics.jsonl."""
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
    """Decide which rows run together. What it has learned of the memory stays for later calls."""

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """Call `work` with some of the positions at a time, until each was in one call that ended well.

        order: the positions, those of the longest rows first. work: may be called again with positions of a call that
        ran out of memory, and must not count them twice.
        Raises OutOfMemoryError, naming the row, when one alone runs out of memory.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what another process needs to make batches by the same limit, as JSON."""
        ...


class RowsAtOnce:
    """Make batches of a number of rows that only falls. One object serves all evaluations of a run.

    on_smaller: called each time that it falls; what it raises ends the work.
    """

    def __init__(self, num_rows: int, *, on_smaller: OnSmaller = lambda smaller: None) -> None:
        assert num_rows > 0, "at least one row at once"
        self.num_rows = num_rows
        self.on_smaller = on_smaller

    def run(self, rows: TokenRows, order: NDArray[np.intp], work: Work, *, doing: Doing) -> None:
        """Run rows in batches, as Batches.run does, in this order."""

        def divide(left: NDArray[np.intp]) -> Iterator[MicroBatch]:
            for start in range(0, len(left), self.num_rows):
                yield together(rows, left[start : start + self.num_rows])

        run_rows(
            rows,
            order,
            doing=doing,
            divide=divide,
            work=lambda batch: work(batch.rows),
            lower=self._halve,
            on_smaller=self.on_smaller,
        )

    def state(self) -> dict[str, Any]:
        return {"rows": self.num_rows}

    def _halve(self, failed: MicroBatch) -> CapChange:
        before, self.num_rows = self.num_rows, failed.num_rows // 2
        return CapChange(before=before, after=self.num_rows, unit="rows")


def longest_first(rows: TokenRows) -> NDArray[np.intp]:
    """Return positions by length: rows of like length are together, and one that does not fit shows at once."""
    return np.argsort(-rows.lengths, kind="stable")


def together(rows: TokenRows, positions: NDArray[np.intp]) -> MicroBatch:
    """Return the rows at these positions as one batch."""
    return MicroBatch(rows=positions, padded_length=int(rows.lengths[positions].max()))


def run_rows(
    rows: TokenRows,
    order: NDArray[np.intp],
    *,
    doing: Doing,
    divide: Callable[[NDArray[np.intp]], Iterable[MicroBatch]],
    work: Callable[[MicroBatch], T],
    done: Callable[[MicroBatch, T], object] = lambda batch, result: None,
    lower: Callable[[MicroBatch], CapChange | None],
    on_smaller: OnSmaller,
) -> None:
    """Run rows in batches (`run_batches`), and report each time that fewer of them go on together.

    lower: lowers the limit after a batch of several rows that failed.
    Raises OutOfMemoryError, naming the row, when one alone runs out of memory.
    """

    def shrink(failed: MicroBatch) -> bool:
        change = None if failed.num_rows == 1 else lower(failed)
        if change is not None:
            keys, longest = tuple(rows.keys[failed.rows].tolist()), failed.padded_length
            on_smaller(Smaller(doing=doing, keys=keys, longest=longest, after=change.after, unit=change.unit))
        return change is not None

    run_batches(
        order,
        divide=divide,
        work=work,
        done=done,
        shrink=shrink,
        too_large=lambda batch: too_large(
            key=int(rows.keys[batch.rows[0]]), num_tokens=batch.padded_length, doing=doing
        ),
    )


def too_large(*, key: int, num_tokens: int, doing: Doing) -> OutOfMemoryError:
    """Return the error that ends the work when a row alone runs out of memory."""
    return OutOfMemoryError(
        what=f"{doing} of a single row runs out of memory ({format_count(num_tokens, 'token')})",
        where=f"row {key} (numbered from 0)",
        fix=_FIX[doing],
    )
