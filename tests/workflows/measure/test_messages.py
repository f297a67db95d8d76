"""Messages between processes, and leaks."""

from __future__ import annotations

import json
from pathlib import Path

from brim.workflows.measure import PhasePeak
from brim.workflows.measure.messages import Report, Request, as_json, of_json, rise_per_step


def test_a_request_and_a_report_come_back_equal(asked):
    request = asked(
        {"adapter": {"type": "lora", "target_modules": ["q_proj"]}, "precision": "bf16-true"},
        step_lengths=((3, 4), (5, 6)),
    )
    back = of_json(Request, json.loads(json.dumps(as_json(request))))
    assert back == request
    assert back.config.trainer.model_fields_set == request.config.trainer.model_fields_set
    assert isinstance(back.folder.path, Path)
    report = Report(
        device="cpu",
        kind="cpu",
        baseline_bytes=1,
        peaks=(PhasePeak(phase="train", step=1, total_bytes=10, end_bytes=5, baseline_bytes=1),),
        notes=("a note",),
    )
    assert of_json(Report, json.loads(json.dumps(as_json(report)))) == report


def test_when_live_bytes_count_as_rising_from_step_to_step():
    for end_bytes, tolerance_bytes, rise in (
        ([100, 900, 1000, 1100, 1350], 0, 100),  # every step after the first; the median
        ([100, 900, 900, 900, 900], 0, None),  # the first step bears what stays for good
        ([0, 10, 20, 30, 30, 40], 0, None),  # one step that does not rise is enough
        ([0, 10, 20, 30], 0, None),  # two rises are too few
        ([0, 10, 20, 30, 40], 0, 10),
        ([0, 512, 1024, 1536, 2048], 512, None),  # within the rounding
        ([0, 512, 1024, 1536, 2048], 511, 512),
        ([], 0, None),
    ):
        assert rise_per_step(end_bytes, tolerance_bytes=tolerance_bytes) == rise, end_bytes
