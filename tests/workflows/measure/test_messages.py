"""Messages between processes, leaks, timelines, tensors that stay, and what is read from PyTorch's record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.memory.trace import Place
from brim.workflows.measure import PhasePeak, Stayed
from brim.workflows.measure.messages import MeasuredTimeline, Report, Request, Spike, rise_per_step, timeline
from brim.workflows.measure.record import curve, line_of, living, stayed, stream

MIB = 2**20


def test_a_request_comes_back_equal(asked, tmp_path):
    request = asked(
        {"adapter": {"type": "lora", "target_modules": ["q_proj"]}, "precision": "bf16-true"},
        snapshot=tmp_path / "snapshot.pickle",
        step_lengths=((3, 4), (5, 6)),
    )
    assert Request.of_json(json.loads(json.dumps(request.as_json()))) == request
    assert isinstance(Request.of_json(asked().as_json()).folder.path, Path)


def test_a_report_comes_back_equal():
    sizes = {"allocated_bytes": None, "reserved_bytes": None, "outside_bytes": None, "total_bytes": 10}
    report = Report(
        device="cpu",
        kind="cpu",
        baseline_bytes=1,
        peaks=(PhasePeak(phase="train", step=1, end_bytes=5, baseline_bytes=1, **sizes),),
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
    back = Report.of_json(json.loads(json.dumps(report.as_json())))
    assert back.timeline is not None
    assert back.timeline.live_bytes.tolist() == [1, 2]
    assert back.as_json() == report.as_json()
    assert (back.peaks, back.stayed, back.end_bytes, back.notes) == (report.peaks, report.stayed, (5, 6), ("a note",))
    assert back.timeline.spikes == report.timeline.spikes


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


# Marks and spikes of what was recorded in time


def test_each_part_has_its_first_highest_point():
    found = timeline(
        np.asarray([1_000, 3_000, 2_000, 4_000, 5_000]),
        np.asarray([10, 30, 20, 30, 5]),
        reserved_bytes=np.asarray([100, 300, 200, 400, 500]),
        marks=[(1_000, "step 1: forward"), (3_500, "step 1: backward"), (9_000, "after the end")],
        place_at=lambda time_ns: Place("forward", operator=str(time_ns)),
    )
    assert found.live_bytes.tolist() == [10, 20, 30, 30, 5]
    assert found.reserved_bytes is not None
    assert found.reserved_bytes.tolist() == [100, 200, 300, 400, 500]
    assert found.seconds.tolist() == [0, 1e-6, 2e-6, 3e-6, 4e-6]
    assert found.marks == ((0, "step 1: forward"), (3, "step 1: backward"))
    assert found.spikes == (
        Spike(point=2, live_bytes=30, place=Place("forward", operator="3000")),
        Spike(point=3, live_bytes=30, place=Place("forward", operator="4000")),
    )
    nothing = np.zeros(0, dtype=np.int64)
    found = timeline(nothing, nothing, reserved_bytes=None, marks=[(1, "load")], place_at=lambda time_ns: Place("load"))
    assert (len(found.seconds), found.marks, found.spikes) == (0, (), ())


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


# PyTorch's record of its CUDA allocator, from records made by hand


def entry(action, addr, size, time_us=0, frames=()):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": list(frames), "stream": 0}


TRACE = [
    entry("segment_alloc", 0, 2 * MIB, 10),
    entry("alloc", 0, 1000, 11),
    entry("alloc", 1024, 512, 12),
    entry("free_requested", 0, 1000, 13),
    entry("free_completed", 0, 1000, 13),
    entry("alloc", 0, 600, 14),
    entry("free_completed", 4096, 100, 15),  # was alive before
    entry("segment_free", 9 * MIB, 20 * MIB, 16),
]


def test_allocated_is_rounded_and_reserved_goes_by_segments():
    found = curve(TRACE, allocated_bytes=512, reserved_bytes=20 * MIB)
    assert found.allocated_bytes.tolist() == [512, 1536, 2048, 2048, 1024, 2048, 1536, 1536]
    assert found.reserved_bytes.tolist() == [22 * MIB] * 7 + [2 * MIB]
    assert found.times_us.tolist() == [10, 11, 12, 13, 13, 14, 15, 16]
    moves = (("segment_map", 0, 20 * MIB), ("segment_map", 20 * MIB, 2 * MIB), ("segment_unmap", 0, 20 * MIB))
    expandable = curve([entry(*move) for move in moves], allocated_bytes=0, reserved_bytes=0)
    assert expandable.reserved_bytes.tolist() == [20 * MIB, 22 * MIB, 2 * MIB]


def test_the_stream_numbers_storages_and_births_what_was_there_before():
    found = stream(TRACE, lambda each: Place("forward", operator=str(each["time_us"])))
    assert found.sizes == [100, 1000, 512, 600]
    assert found.storages == [0, 1, 2, ~1, 3, ~0]
    assert [place.operator for place in found.places] == ["", "11", "12", "13", "14", "15"]


def test_what_stayed_was_born_after_the_time_and_never_freed():
    where = {11: "attention", 12: "mlp", 14: "attention"}
    found = stayed([*TRACE, entry("alloc", 8192, 600, 14)], since_us=12, where=lambda each: where[each["time_us"]])
    assert found == (
        Stayed(count=2, num_bytes=1200, shape=None, dtype=None, made_at="attention"),
        Stayed(count=1, num_bytes=512, shape=None, dtype=None, made_at="mlp"),
    )


def test_the_line_is_the_innermost_outside_pytorch():
    lines = [
        ("/site-packages/torch/nn/functional.py", 12, "linear"),
        ("/site-packages/transformers/models/llama/modeling_llama.py", 180, "forward"),
        ("/home/train.py", 3, "main"),
    ]
    frames = [dict(zip(("filename", "line", "name"), each, strict=True)) for each in lines]
    assert line_of(entry("alloc", 0, 1, frames=frames)) == "modeling_llama.py:180 (forward)"
    assert line_of(entry("alloc", 0, 1, frames=frames[:1])) == "functional.py:12 (linear)"
    assert line_of(entry("alloc", 0, 1)) == ""
