"""The peak of every shape from a few traces, against traces of the shapes themselves."""

import numpy as np
import pytest
from tests.planning.planned import shapes_of

from brim.memory.allocator import CachingAllocator, Heap, replay
from brim.memory.trace import compose_training
from brim.models import chunked_loss
from brim.planning.candidates import memory_model, verified_memory as verified

MIB = 2**20
LENGTHS = np.array([120] * 50 + [150] * 60 + [300] * 25)


@pytest.fixture
def small_chunks(monkeypatch):
    """So that a chunk is full after 300 positions, not after 16,777."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 300 * 4 * 2000)
    monkeypatch.setattr(chunked_loss, "TRAINED_HEAD_FACTOR", 1)


def model_of(shapes, cap_mib):
    return memory_model(shapes, LENGTHS, most_rows=32, cap_bytes=cap_mib * MIB, context_length=4096)


LORA = {"adapter": {"type": "lora", "r": 4}}
WAYS = {
    "cpu, whole logits": ("cpu", {"chunked_loss": False}),
    "t4, chunks, scores": ("t4", {"chunked_loss": True, "model_parameters": {"attn_implementation": "eager"}}),
}


@pytest.mark.parametrize(("device", "given"), WAYS.values(), ids=WAYS)
def test_between_the_samples_the_surface_is_what_a_trace_finds(tmp_path, small_chunks, device, given):
    """Off by little of the cap, since what is far below it fits anyway."""
    cap_bytes = 100 * MIB
    shapes = shapes_of(tmp_path, device=device, **given)
    model = model_of(shapes, 100)
    assert shapes.num_traced <= 10
    random = np.random.default_rng(0)
    for _ in range(2):
        tokens = int(random.integers(100, 300))
        rows = int(np.count_nonzero(model.peak(np.arange(1, 33), tokens) <= cap_bytes))
        truth = shapes.peak_bytes(rows, tokens)
        assert -0.005 <= (float(model.peak(rows, tokens)) - truth) / cap_bytes <= 0.05, (rows, tokens)


@pytest.mark.parametrize(("device", "given"), [("cpu", {}), ("t4", LORA)], ids=["cpu", "t4"])
def test_peaks_are_those_of_the_composed_step(tmp_path, device, given):
    """With the optimizer's state, gradients and workspaces: what the simulated allocator counts in the second step."""
    shapes = shapes_of(tmp_path, device=device, **given)
    recording = shapes.recording(3, 80)
    stream = compose_training([recording, recording], shapes.optimizer, micro_batches=2)
    stream = shapes.on_device(stream, recording)
    allocated = replay(stream, Heap() if device == "cpu" else CachingAllocator()).allocated_bytes
    marks = {label: position for position, label in stream.marks}
    basics = shapes.basics
    steady = slice(marks["step 2, micro-batch 1"], marks["step 2: optimizer"])
    # Beside blocks that are not split, by less than 1 MiB in all here.
    exact = {"rel": 0} if device == "cpu" else {"abs": MIB}
    assert shapes.peak_bytes(3, 80) == pytest.approx(allocated[steady].max(), **exact)
    assert basics.static_bytes == pytest.approx(allocated[marks["step 2, micro-batch 2"] - 1], **exact)
    assert basics.update_bytes == pytest.approx(allocated[marks["step 2: optimizer"] :].max(), **exact)
    first = slice(marks["step 1: optimizer"], marks["step 2, micro-batch 1"])
    assert basics.first_update_bytes == pytest.approx(allocated[first].max(), **exact)
    assert basics.load_bytes == allocated[: marks["step 1, micro-batch 1"]].max()


def test_state_is_what_adam_keeps(tmp_path):
    shapes = shapes_of(tmp_path, precision="fp32", optimizer={"type": "adamw"})
    weights = sum(weight.elements for weight in shapes.recording(1, 2).weights)
    # Two averages a weight; the step counters are small tensors on the CPU.
    assert shapes.basics.state_bytes == 2 * 4 * weights
    assert shapes.basics.chunk_positions == chunked_loss.chunk_rows(2000, head_trains=True)
    assert shapes_of(tmp_path, chunked_loss=False).basics.chunk_positions is None


def test_a_verified_shape_is_exact_and_others_are_not_lowered_below_it(tmp_path):
    shapes = shapes_of(tmp_path, chunked_loss=False)
    before = model_of(shapes, 10_000)
    after = verified(before, shapes, rows=5, tokens=333)
    assert float(after.peak(5, 333)) == shapes.peak_bytes(5, 333)
    assert float(after.peak(6, 333)) >= shapes.peak_bytes(5, 333)


def test_steps_of_one_micro_batch_find_no_gradients(tmp_path):
    several = shapes_of(tmp_path)
    single = shapes_of(tmp_path, effective_batch_size=1)
    gradients = sum(4 * weight.elements for weight in several.recording(1, 2).weights)
    assert several.basics.static_bytes - single.basics.static_bytes == gradients
    assert single.peak_bytes(1, 100) < several.peak_bytes(1, 100)


def test_what_was_traced_is_not_traced_again(tmp_path):
    first = shapes_of(tmp_path, cache_folder=tmp_path / "cache")
    model = model_of(first, 10_000)
    again = shapes_of(tmp_path, cache_folder=tmp_path / "cache")
    assert model_of(again, 10_000) == model
    assert again.work(1, 2) == first.work(1, 2)
    assert again.num_traced == 0
    other = shapes_of(tmp_path, cache_folder=tmp_path / "cache", enable_gradient_checkpointing=True)
    assert other.known.peaks_bytes == {}
