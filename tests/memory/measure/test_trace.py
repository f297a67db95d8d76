"""Reading PyTorch's record of its CUDA allocator, from records made by hand."""

from __future__ import annotations

from brim.memory.trace import Place
from brim.workflows.measure import Stayed
from brim.workflows.measure.record import curve, line_of, stayed, stream

MIB = 2**20


def entry(action, addr, size, time_us=0, frames=()):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": list(frames), "stream": 0}


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


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


def test_expandable_segments_grow_and_shrink():
    trace = [
        entry("segment_map", 0, 20 * MIB),
        entry("segment_map", 20 * MIB, 2 * MIB),
        entry("segment_unmap", 0, 20 * MIB),
    ]
    assert curve(trace, allocated_bytes=0, reserved_bytes=0).reserved_bytes.tolist() == [20 * MIB, 22 * MIB, 2 * MIB]


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
    frames = [
        frame("/site-packages/torch/nn/functional.py", 12, "linear"),
        frame("/site-packages/transformers/models/llama/modeling_llama.py", 180, "forward"),
        frame("/home/train.py", 3, "main"),
    ]
    assert line_of(entry("alloc", 0, 1, frames=frames)) == "modeling_llama.py:180 (forward)"
    assert line_of(entry("alloc", 0, 1, frames=frames[:1])) == "functional.py:12 (linear)"
    assert line_of(entry("alloc", 0, 1)) == ""
