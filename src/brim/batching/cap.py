"""The limit on micro-batches within a run: lowered when memory runs out, raised again after clean steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

FIRST_WAIT_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """In bytes or in rows. A lowering is undone, the last one first, after `wait_steps` clean steps in a row.

    Each out-of-memory that follows a raise doubles the wait, so that in a run of n steps a limit that is too high is
    tried again about log2(n) times.
    """

    now: int
    before: tuple[int, ...] = ()  # what it was lowered from, the value at launch first
    raised_from: int | None = None  # where the last change was a raise: what has gone well before it
    num_clean_steps: int = 0  # since the last change
    wait_steps: int = FIRST_WAIT_STEPS

    def lowered(self, to: int, *, failed: int) -> Cap:
        """Memory ran out at `failed`, and `to` is below it. Back to what went well, where that is more than `to`."""
        assert to < failed, "a limit that does not exclude what failed would run out of memory again"
        wait_steps = self.wait_steps
        if self.raised_from is not None:
            wait_steps *= 2
            if self.raised_from < failed:
                to = max(to, self.raised_from)
        return Cap(now=to, before=(*self.before, self.now), wait_steps=wait_steps)

    def after_clean_step(self) -> Cap:
        """One more step has gone well."""
        if not self.before:
            return self
        if self.num_clean_steps + 1 < self.wait_steps:
            return replace(self, num_clean_steps=self.num_clean_steps + 1)
        *before, now = self.before
        return Cap(now=now, before=tuple(before), raised_from=self.now, wait_steps=self.wait_steps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Cap:
        return cls(**{**saved, "before": tuple(saved["before"])})
