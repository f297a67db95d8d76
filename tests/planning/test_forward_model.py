"""What scoring takes, from a few traces, against traces of the shapes themselves and the closed form's bound."""

import numpy as np
import pytest
from tests.memory.tiny_architectures import write_folder

import brim.memory.predict as memory
from brim.memory import ConfigWorkload, cpu_device, device_speed, find_device
from brim.memory.closed_form import read_architecture, settings_of
from brim.memory.cuda import CudaTarget
from brim.planning.costs import (
    ForwardShapes,
    beside,
    closed_costs,
    forward_model,
    verified_forward as verified,
    weight_bytes,
)
from brim.planning.costs.forward import bytes_of_token

MIB = 2**20
LENGTHS = np.array([40] * 20 + [120] * 50 + [150] * 60 + [300] * 25)


def shapes_of(folder, *, device="cpu", family="llama", cache_folder=None, **keys):
    changes = {"vocab_size": 2000, "num_hidden_layers": 2, "max_position_embeddings": 4096} if family == "llama" else {}
    model = write_folder(folder / family, family, **changes)
    asked = memory.ask({"base_model": str(model), **keys}, phase="evaluate", device=device, memory_bytes=None)
    found = cpu_device() if device == "cpu" else find_device(device)
    target = None if found.is_cpu else CudaTarget(compute_capability=found.capability)
    workload = ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target)
    return ForwardShapes(workload, found, cache_folder=cache_folder), asked


WAYS = {
    "cpu, whole logits": ("cpu", {"trainer": {"type": "none", "chunked_loss": False}}),
    "t4, chunks": ("t4", {"trainer": {"type": "none", "chunked_loss": True}}),
}


@pytest.mark.parametrize(("device", "keys"), WAYS.values(), ids=WAYS)
def test_between_the_samples_the_surface_is_what_a_trace_finds(tmp_path, device, keys):
    shapes, _ = shapes_of(tmp_path, device=device, **keys)
    speed = device_speed(shapes.device)
    model = forward_model(shapes, LENGTHS, cap_bytes=40 * MIB, context_length=4096, speed=speed)
    assert shapes.num_traced <= 10
    costs = model.costs
    assert costs.static_bytes <= shapes.peak_bytes(1, 2)
    random = np.random.default_rng(0)
    for _ in range(2):
        tokens = int(random.integers(60, 300))
        rows = max(model.useful_tokens // tokens // 2, 1)
        truth = shapes.peak_bytes(rows, tokens)
        assert -0.005 <= float(costs.peak_bytes(rows, tokens)) / truth - 1 <= 0.1, (rows, tokens)
    exact = verified(model, shapes, rows=7, tokens=111).costs
    assert float(exact.peak_bytes(7, 111)) == shapes.peak_bytes(7, 111)
    more = beside(costs, MIB)
    assert float(more.peak_bytes(3, 100)) == float(costs.peak_bytes(3, 100)) + MIB
    assert more.static_bytes == costs.static_bytes + MIB


def test_what_was_traced_is_not_traced_again(tmp_path):
    def model_of(shapes):
        return forward_model(shapes, LENGTHS, cap_bytes=10**9, context_length=4096, speed=device_speed(shapes.device))

    first, _ = shapes_of(tmp_path, device="t4", cache_folder=tmp_path / "cache")
    model = model_of(first)
    overhead_bytes = first.overhead_bytes([(4, 128), (1, 300)])
    first.save()
    again, _ = shapes_of(tmp_path, device="t4", cache_folder=tmp_path / "cache")
    assert model_of(again) == model
    assert again.overhead_bytes([(4, 128), (1, 300)]) == overhead_bytes
    assert again.num_traced == 0
    other, _ = shapes_of(tmp_path, device="t4", cache_folder=tmp_path / "cache", precision="fp32")
    assert other.known.peaks_bytes == {}


def test_the_allocator_needs_something_beyond_what_is_allocated(tmp_path):
    shapes, _ = shapes_of(tmp_path, device="t4", trainer={"type": "none", "chunked_loss": False})
    peak_bytes = max(shapes.peak_bytes(8, 128), shapes.peak_bytes(2, 300))
    assert 0 <= shapes.overhead_bytes([(8, 128), (2, 300)]) < peak_bytes
    cpu, _ = shapes_of(tmp_path)
    assert cpu.overhead_bytes([(8, 128)]) == 0


BOUND = {
    "llama": "sdpa",
    "gemma2": "eager",
    "mixtral": "eager",
    "qwen3_moe": "sdpa",
    "phi": "sdpa",
    "gpt_neox": "eager",
    "gpt2": "sdpa",
}


@pytest.mark.parametrize(("family", "attention"), BOUND.items())
def test_the_closed_form_is_never_below_a_trace(tmp_path, family, attention):
    keys = {"model_parameters": {"attn_implementation": attention}, "trainer": {"type": "none", "chunked_loss": False}}
    shapes, asked = shapes_of(tmp_path, family=family, **keys)
    rows, tokens = 6, 60
    added = shapes.peak_bytes(rows, tokens) - shapes.basics.static_bytes
    settings = settings_of(asked.config, asked.folder.config, phase="evaluate", batch_size=1, sequence_length=tokens)
    bound = rows * tokens * bytes_of_token(read_architecture(asked.folder.config), settings, tokens)
    assert added <= bound <= 20 * added


def test_the_closed_form_has_weights_and_time_of_the_traces_order(tmp_path):
    shapes, asked = shapes_of(tmp_path)
    speed = device_speed(shapes.device)
    traced = forward_model(shapes, LENGTHS, cap_bytes=10**9, context_length=4096, speed=speed).costs
    weights = weight_bytes(asked.config, asked.folder.config)
    assert weights == pytest.approx(traced.static_bytes, rel=0.01)
    closed = closed_costs(asked.config, asked.folder.config, LENGTHS, static_bytes=weights, speed=speed)
    for rows, tokens in ((1, 40), (8, 150), (20, 300)):
        assert 0.2 <= float(closed.seconds(rows, tokens) / traced.seconds(rows, tokens)) <= 2
        assert closed.peak_bytes(rows, tokens) >= traced.peak_bytes(rows, tokens)


def test_an_architecture_that_is_not_known_has_no_closed_form(tmp_path):
    shapes, asked = shapes_of(tmp_path)
    config = {**asked.folder.config, "model_type": "unheard_of"}
    assert closed_costs(asked.config, config, [4], static_bytes=1, speed=device_speed(shapes.device)) is None
    assert closed_costs(asked.config, {}, [4], static_bytes=1, speed=device_speed(shapes.device)) is None
