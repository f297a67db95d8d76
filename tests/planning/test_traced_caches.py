"""What generation takes for every shape from a few traces, against traces of the shapes themselves."""

from __future__ import annotations

import numpy as np
import pytest
from tests.memory.tiny_architectures import write_folder

import brim.memory.predict as memory
from brim.infer.engines import CacheShape
from brim.memory import ConfigWorkload, cpu_device, find_device
from brim.memory.cuda import CudaTarget
from brim.planning.costs import (
    TracedCaches,
    cache_model,
    cache_region,
    closed_cache_costs,
    verified_cache_costs as verified,
)

LENGTHS = np.array([30] * 40 + [90] * 40 + [300] * 20)
NEW_TOKENS = 20
LAYERS, HEADS_KV, HEAD = 3, 2, 8


LLAMA = {"num_hidden_layers": LAYERS, "vocab_size": 2000, "max_position_embeddings": 4096}


def asked_of(folder, device="cpu", *, family="llama", attention="sdpa", **generation):
    model = write_folder(folder / family, family, **(LLAMA if family == "llama" else {}))
    config = {
        "base_model": str(model),
        "trainer": {"type": "none"},
        "model_parameters": {"attn_implementation": attention},
        "generation": {"max_new_tokens": NEW_TOKENS, "do_sample": False, **generation},
    }
    return memory.ask(config, phase="generate", device=device, memory_bytes=None)


def caches_of(folder, device="cpu", *, is_slots=True, cache_folder=None, **given):
    asked = asked_of(folder, device, **given)
    found = cpu_device() if device == "cpu" else find_device(device)
    target = None if found.is_cpu else CudaTarget(compute_capability=found.capability or (8, 0))
    workload = ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target)
    return TracedCaches(workload, found, is_slots=is_slots, cache_folder=cache_folder)


def model_of(caches, *, is_slots=True, most_rows=64):
    region = cache_region(
        LENGTHS, max_new_tokens=NEW_TOKENS, most_rows=most_rows, cap_bytes=10**9, context=4096, is_slots=is_slots
    )
    return cache_model(caches.sample, region)


def traced_peak(sample):
    return sample.held_bytes + max(sample.prefill_bytes, sample.step_bytes)


@pytest.mark.parametrize(("device", "element_bytes"), [("cpu", 4), ("a10", 2)])
def test_the_cache_takes_what_its_cells_hold_and_between_the_samples_lies_what_a_trace_finds(
    tmp_path, device, element_bytes
):
    caches = caches_of(tmp_path, device)
    costs = model_of(caches).costs
    assert caches.num_traced == 5
    assert costs.cell_bytes == pytest.approx(2 * LAYERS * HEADS_KV * HEAD * element_bytes, rel=0.001)
    random = np.random.default_rng(0)
    for _ in range(2):
        rows, prompt = int(random.integers(9, 60)), int(random.integers(40, 290))
        shape = CacheShape(rows=rows, columns=prompt + NEW_TOKENS - 1, prompts=1, prompt_tokens=prompt)
        truth = traced_peak(caches.sample(shape))
        assert -0.001 <= float(costs.peak_bytes(rows, shape.columns)) / truth - 1 <= 0.05, shape


def test_after_one_more_trace_the_costs_are_exact_there(tmp_path):
    caches = caches_of(tmp_path)
    costs = model_of(caches).costs
    sample = caches.sample(CacheShape(rows=17, columns=150, prompts=1, prompt_tokens=131))
    found = verified(costs, sample)
    assert float(found.peak_bytes(17, 150)) == pytest.approx(traced_peak(sample), abs=costs.cell_bytes)


def test_what_was_traced_is_found_again_and_a_damaged_file_is_not_believed(tmp_path):
    shape = CacheShape(rows=2, columns=30, prompts=1, prompt_tokens=11)
    first = caches_of(tmp_path, cache_folder=tmp_path / "cache")
    sample = first.sample(shape)
    first.save()
    second = caches_of(tmp_path, cache_folder=tmp_path / "cache")
    assert second.has_samples
    assert second.sample(shape) == sample
    assert second.num_traced == 0
    (file,) = (tmp_path / "cache" / "generation-traces").iterdir()
    file.write_text(file.read_text().replace('"rows": 2', '"rows": 3'))
    third = caches_of(tmp_path, cache_folder=tmp_path / "cache")
    assert not third.has_samples
    assert third.note is not None
    assert "damaged" in third.note


def test_the_allocator_needs_more_than_is_allocated_on_a_gpu_alone(tmp_path):
    shape = CacheShape(rows=4, columns=60, prompts=2, prompt_tokens=41)
    assert caches_of(tmp_path).overhead_bytes([shape]) == 0
    on_gpu = caches_of(tmp_path, "t4")
    assert 0 < on_gpu.overhead_bytes([shape]) < 64 * 2**20
    traced = on_gpu.num_traced
    assert on_gpu.overhead_bytes([shape]) == on_gpu.overhead_bytes([shape])
    assert on_gpu.num_traced == traced


def test_the_cache_of_transformers_generate_grows_and_beams_have_one_each(tmp_path):
    shape = CacheShape(rows=4, columns=60, prompts=4, prompt_tokens=40)
    one, three = (caches_of(tmp_path / str(beams), is_slots=False, num_beams=beams).sample(shape) for beams in (1, 3))
    cache_bytes = 4 * 59 * 2 * LAYERS * HEADS_KV * HEAD * 4
    assert one.held_bytes == one.loaded_bytes
    assert one.prefill_bytes == 0
    assert one.step_bytes > cache_bytes
    assert three.step_bytes > 3 * cache_bytes


WAYS = {
    "beams": {"num_beams": 3},
    "beams that sample": {"num_beams": 2, "do_sample": True, "top_p": 0.9, "temperature": 0.7},
    "one": {"repetition_penalty": 1.2},
    "guidance": {"guidance_scale": 1.5},
}
FAMILIES = {"llama": "sdpa", "gemma2": "eager", "qwen3_moe": "sdpa", "gpt_neox": "eager", "gpt2": "sdpa"}


@pytest.mark.parametrize(
    ("family", "way"), [*(("llama", way) for way in WAYS), *((family, "beams") for family in [*FAMILIES][1:])]
)
def test_the_closed_form_of_transformers_generate_is_never_below_a_trace(tmp_path, family, way):
    given = {"family": family, "attention": FAMILIES[family], **WAYS[way]}
    caches, asked = caches_of(tmp_path, is_slots=False, **given), asked_of(tmp_path, **given)
    costs = closed_cache_costs(
        asked.config, asked.folder.config, [10, 40], static_bytes=0, prefill_tokens=512, is_slots=False
    )
    for rows, prompt in ((1, 40), (6, 10)):
        columns = prompt + NEW_TOKENS
        added = caches.sample(CacheShape(rows=rows, columns=columns, prompts=rows, prompt_tokens=prompt)).step_bytes
        assert added <= float(costs.peak_bytes(rows, columns)) <= 20 * added, (rows, prompt)
