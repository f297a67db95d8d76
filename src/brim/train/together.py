"""Let the processes that train together know, with the sums of each step, what one of them has met.

A process that was asked to stop, has lowered its limit or cannot go on says so in the vector that is added up with the
gradients; what takes more words is exchanged after that, in steps that have it. A lone process has nobody to tell.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from brim.distributed import Share
from brim.train.checkpoints import TrainState
from brim.train.gradient import Gradient
from brim.train.job import TrainJob
from brim.train.logs import Peaks


class Together:
    """Speak for one rank of a run. The log is the first one's."""

    def __init__(self, job: TrainJob, state: TrainState, gradient: Gradient, peaks: Peaks) -> None:
        self.num_out_of_memory = 0  # of the other ranks
        self._job, self._state, self._gradient, self._peaks = job, state, gradient, peaks
        self._nothing, self._stops = Share(), False  # what a lone process says; some rank was asked to stop
        self._unheard: list[Mapping[str, Any]] = []  # events of a rank that writes no log

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event, or keep it until the first rank asks for it."""
        ranks = self._job.ranks
        if ranks.is_first:
            self._job.observer.write({**event, "rank": 0} if ranks.are_several else event)
        else:
            self._unheard.append(event)

    def share(self, stop: threading.Event, busy_s: float, *, has_failed: bool) -> Share:
        """Return what this rank says of its part of the step, if there are others."""
        if not self._job.ranks.are_several:
            return self._nothing
        return Share(
            cap=self._job.cutter.limit,
            num_events=len(self._unheard),
            is_stopping=stop.is_set(),
            has_failed=has_failed,
            peak_bytes=self._peaks.most_bytes(),
            busy_s=busy_s,
        )

    def hear(self) -> list[int]:
        """Take in what the ranks have said with a step; return those that cannot go on."""
        shares = self._gradient.shares
        self._stops = any(share.is_stopping for share in shares)
        if any(share.num_events for share in shares) or len({share.cap for share in shares}) > 1:
            self._exchange()
        return [rank for rank, share in enumerate(shares) if share.has_failed]

    def end(self) -> None:
        """Write the events of all ranks since the last sum. All come here."""
        if self._job.ranks.are_several:
            self._exchange()

    def stops(self, stop: threading.Event) -> bool:
        """Say whether the run is to stop after this step, so that all ranks stop after the same."""
        return self._stops if self._job.ranks.are_several else stop.is_set()

    def fields(self, peak_bytes: int) -> dict[str, Any]:
        """Return the fields of a step's line that tell of all ranks. peak_bytes: this one's."""
        shares = self._gradient.shares
        if not shares:
            return {}
        fields: dict[str, Any] = {
            "num_micro_batches": sum(share.num_micro_batches for share in shares),
            "peak_bytes": max(peak_bytes, *(share.peak_bytes for share in shares)),
            "ranks": len(shares),
        }
        if self._job.claims:
            fields["rows_by_rank"] = [share.num_rows for share in shares]
            fields["micro_batches_by_rank"] = [share.num_micro_batches for share in shares]
        if self._job.llm.device.type == "cpu":  # a GPU goes on when the host has queued its work
            busy_s = [share.busy_s for share in shares]
            fields["busy"] = round(sum(busy_s) / len(busy_s) / max(busy_s), 4)  # of the time until the last was done
        return fields

    def _exchange(self) -> None:
        """Write the events of all ranks; all go on with the lowest limit, and with what has become of it."""
        job, mine, self._unheard = self._job, self._unheard, []
        found = job.ranks.exchanged("events", lambda: (mine, job.cutter.state()["cap"]))
        for rank, (events, _) in enumerate(found):
            for event in events:
                job.observer.write({**event, "rank": rank})
                self.num_out_of_memory += rank != job.ranks.rank and event["event"] == "oom"
        lowest = min((cap for _, cap in found), key=lambda cap: int(cap["now"]))
        before = job.cutter.limit
        job.cutter.restore({**job.cutter.state(), "cap": lowest})
        if lowest["now"] != before and job.ranks.is_first:
            told = {"event": "cap", "before": before, "after": lowest["now"], "unit": job.cutter.unit}
            job.observer.write({"step": self._state.step + 1, **told})
