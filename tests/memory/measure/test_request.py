"""A request and a report are the same on the other side of a process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from brim.memory.trace import Place
from brim.workflows.measure import PhasePeak, Stayed
from brim.workflows.measure.messages import MeasuredTimeline, Report, Request, Spike


def test_a_request_comes_back_equal(asked, tmp_path):
    request = asked(
        {"adapter": {"type": "lora", "target_modules": ["q_proj"]}, "precision": "bf16-true"},
        snapshot=tmp_path / "snapshot.pickle",
        step_lengths=((3, 4), (5, 6)),
    )
    assert Request.loads(request.dumps()) == request


def test_a_report_comes_back_equal():
    peak = PhasePeak(
        phase="train",
        step=1,
        allocated_bytes=None,
        reserved_bytes=None,
        outside_bytes=None,
        total_bytes=10,
        end_bytes=5,
        baseline_bytes=1,
    )
    report = Report(
        device="cpu",
        kind="cpu",
        baseline_bytes=1,
        peaks=(peak,),
        end_bytes=(5, 6),
        stayed=(Stayed(count=1, num_bytes=4, shape=(1, 2), dtype="float32", made_at=""),),
        timeline=MeasuredTimeline(
            seconds=np.asarray([0.0, 0.5]),
            live_bytes=np.asarray([1, 2]),
            reserved_bytes=None,
            marks=((0, "step 1: forward"),),
            spikes=(Spike(point=1, live_bytes=2, place=Place("forward", 0, "model.layers.0", "aten.mm")),),
        ),
        notes=("a note",),
    )
    back = Report.loads(report.dumps())
    assert back.timeline is not None
    assert back.timeline.live_bytes.tolist() == [1, 2]
    assert back.dumps() == report.dumps()
    assert (back.peaks, back.stayed, back.end_bytes, back.notes) == (report.peaks, report.stayed, (5, 6), ("a note",))
    assert back.timeline.spikes == report.timeline.spikes


def test_a_folder_without_a_tokenizer_is_told_as_such(asked):
    request = asked()
    assert isinstance(Request.loads(request.dumps()).folder.path, Path)
