"""What one fresh process tells of its measurement, as JSON. Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from brim.memory.events import Place
from brim.memory.measure.result import MeasuredTimeline, PhasePeak, Spike, Stayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one model, loaded once."""

    device: str
    kind: str
    baseline_bytes: int
    peaks: tuple[PhasePeak, ...]
    end_bytes: tuple[int, ...]  # live after each step of training, to tell a leak by
    stayed: tuple[Stayed, ...]  # what steps left behind
    timeline: MeasuredTimeline | None
    notes: tuple[str, ...]

    def dumps(self) -> str:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told["peaks"] = [asdict(peak) for peak in self.peaks]
        told["stayed"] = [asdict(each) for each in self.stayed]
        told["timeline"] = None if self.timeline is None else _timeline_as_json(self.timeline)
        return json.dumps(told)

    @classmethod
    def loads(cls, text: str) -> Report:
        told: dict[str, Any] = json.loads(text)
        timeline = told["timeline"]
        return cls(
            device=told["device"],
            kind=told["kind"],
            baseline_bytes=told["baseline_bytes"],
            peaks=tuple(PhasePeak(**peak) for peak in told["peaks"]),
            end_bytes=tuple(told["end_bytes"]),
            stayed=tuple(
                Stayed(**{**each, "shape": None if each["shape"] is None else tuple(each["shape"])})
                for each in told["stayed"]
            ),
            timeline=None if timeline is None else _timeline_of_json(timeline),
            notes=tuple(told["notes"]),
        )


def _timeline_as_json(timeline: MeasuredTimeline) -> dict[str, Any]:
    reserved = timeline.reserved_bytes
    return {
        "seconds": timeline.seconds.tolist(),
        "live_bytes": timeline.live_bytes.tolist(),
        "reserved_bytes": None if reserved is None else reserved.tolist(),
        "marks": [list(mark) for mark in timeline.marks],
        "spikes": [asdict(spike) for spike in timeline.spikes],
    }


def _timeline_of_json(told: dict[str, Any]) -> MeasuredTimeline:
    reserved = told["reserved_bytes"]
    return MeasuredTimeline(
        seconds=np.asarray(told["seconds"], dtype=np.float64),
        live_bytes=np.asarray(told["live_bytes"], dtype=np.int64),
        reserved_bytes=None if reserved is None else np.asarray(reserved, dtype=np.int64),
        marks=tuple((point, label) for point, label in told["marks"]),
        spikes=tuple(Spike(**{**spike, "place": Place(**spike["place"])}) for spike in told["spikes"]),
    )
