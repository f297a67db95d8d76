"""Messages between processes, leaks, and tensors that stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from brim.memory.events import Place
from brim.workflows.measure import PhasePeak, Stayed
from brim.workflows.measure.messages import (
    MeasuredTimeline,
    Report,
    Request,
    Spike,
    as_json,
    of_json,
    rise_per_step,
)
from brim.workflows.measure.record import living


def test_a_request_and_a_report_come_back_equal(asked, tmp_path):
    request = asked(
        {"adapter": {"type": "lora", "target_modules": ["q_proj"]}, "precision": "bf16-true"},
        snapshot=tmp_path / "snapshot.pickle",
        step_lengths=((3, 4), (5, 6)),
    )
    back = of_json(Request, json.loads(json.dumps(as_json(request))))
    assert back == request
    assert back.config.trainer.model_fields_set == request.config.trainer.model_fields_set
    assert isinstance(back.folder.path, Path)
    place = Place("forward", 0, "model.layers.0", "aten.mm")
    report = Report(
        device="cpu",
        kind="cpu",
        baseline_bytes=1,
        peaks=(PhasePeak(phase="train", step=1, total_bytes=10, end_bytes=5, baseline_bytes=1),),
        end_bytes=(5, 6),
        stayed=(Stayed(count=1, num_bytes=4, shape=(1, 2), dtype="float32", made_at=""),),
        timeline=MeasuredTimeline(
            live_bytes=(1, 2), marks=((0, "step 1"),), spikes=(Spike(point=1, live_bytes=2, place=place),)
        ),
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


# Which tensors stay, and what a graph keeps


@pytest.mark.usefixtures("few_objects")
def test_a_tensor_that_stays_is_named_with_its_shape_and_the_operator_that_made_it():
    before = living()
    kept = [torch.ones(3, 1000) for _ in range(2)]
    found = living().since(before)
    assert found == (Stayed(count=2, num_bytes=24_000, shape=(3, 1000), dtype="float32", made_at=""),)
    kept.clear()
    assert living().since(before) == ()
    whole = torch.ones(1000)
    part = whole[10:]  # a view counts once
    assert sum(each.num_bytes for each in living().since(before)) == 4000
    del part
    [named] = living({whole.untyped_storage().data_ptr(): "forward, lm_head, aten.mm"}).since(before)
    assert named.made_at == "forward, lm_head, aten.mm"


@pytest.mark.usefixtures("few_objects")
def test_what_a_graph_saves_is_found_though_python_cannot_see_it():
    weight = torch.ones(500, requires_grad=True)
    before = living()
    loss = weight.exp().sum()
    found = living().since(before)
    assert {each.num_bytes for each in found} == {4, 2000}  # the loss, and exp's result, which its graph keeps
    loss.backward()
    # The gradient has come, the result has gone.
    assert [each.num_bytes for each in living().since(before)] == [2000, 4]
