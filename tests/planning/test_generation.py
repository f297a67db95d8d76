"""What generation takes for every shape from a few traces, its waves under a cap, and its engine."""

import json
from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.infer.costs_by_hand import costs
from tests.planning.planned import traces_of

from brim.infer.engines import CacheShape, FixedRoom, MemoryRoom
from brim.memory.closed_form import forward_bound
from brim.memory.devices import Budget
from brim.memory.devices.device import cpu_speed
from brim.memory.events import Work, WorkCount, WorkPlace
from brim.planning.costs import CacheModel, PassTimes, SlotsGeneration, StaticGeneration
from brim.planning.costs.time import law_through
from brim.planning.generation import cut, recut, seconds, waves
from brim.planning.request import GenerationRequest

LENGTHS = np.array([30] * 40 + [90] * 40 + [300] * 20)
NEW_TOKENS = 20
LAYERS, HEADS_KV, HEAD = 3, 2, 8


def caches_of(
    folder, *, kind=SlotsGeneration, attention="sdpa", device="cpu", family="llama", packing=False, **generation
):
    """Traces of generation, and what was asked for."""
    config = {
        "trainer": {"type": "none", "packing": packing},
        "model_parameters": {"attn_implementation": attention},
        "generation": {"max_new_tokens": NEW_TOKENS, "do_sample": False, **generation},
    }
    return traces_of(kind, folder, "generate", device=device, family=family, layers=LAYERS, **config)


def sample_of(caches, shape):
    return caches.find(astuple(shape)).numbers


def traced_peak(sample):
    return sample["held"] + max(sample["prefill"], sample["step"])


@pytest.mark.parametrize(
    ("device", "packing", "element_bytes"), [("cpu", False, 4), ("cpu", True, 4), ("a10", False, 2), ("a10", True, 2)]
)
def test_the_cache_takes_what_its_cells_hold_and_lies_where_a_trace_finds_it(tmp_path, device, packing, element_bytes):
    caches, asked = caches_of(tmp_path, device=device, packing=packing)
    limits = {"max_new_tokens": NEW_TOKENS, "most_rows": 64, "cap_bytes": 10**9, "context_length": 4096}
    model = CacheModel.of(caches, LENGTHS, **limits)
    found = model.costs
    assert caches.num_traced == 5
    assert found.cell_bytes == pytest.approx(2 * LAYERS * HEADS_KV * HEAD * element_bytes, rel=0.001)
    random = np.random.default_rng(0)
    for _ in range(2):
        rows, prompt = int(random.integers(9, 60)), int(random.integers(40, 290))
        shape = CacheShape(rows=rows, columns=prompt + NEW_TOKENS - 1, prompts=1, prompt_tokens=prompt)
        sample = sample_of(caches, shape)
        assert -0.001 <= float(found.peak_bytes(rows, shape.columns)) / traced_peak(sample) - 1 <= 0.05, shape
    # After one more trace the costs are exact there.
    exact = model.verified(shape).costs
    assert float(exact.peak_bytes(rows, shape.columns)) == pytest.approx(traced_peak(sample), abs=found.cell_bytes)
    # Several prompts fill a packed pass; no bound in closed form is below it.
    assert found.is_packed == packing
    if packing:
        several = found.with_passes_of(5 * prompt + 3, longest=prompt)
        sample = sample_of(caches, replace(shape, prompts=5))
        assert -0.001 <= float(several.peak_bytes(rows, shape.columns)) / traced_peak(sample) - 1 <= 0.05
        closed = forward_bound(asked.config, asked.folder.config).generation([prompt], static_bytes=0, prefill_tokens=1)
        closed = replace(closed, is_packed=True).with_passes_of(5 * prompt, longest=prompt)
        assert traced_peak(sample) - sample["loaded"] <= float(closed.peak_bytes(rows, shape.columns))


def test_the_cache_of_transformers_generate_grows_and_beams_have_one_each(tmp_path):
    shape = CacheShape(rows=4, columns=60, prompts=4, prompt_tokens=40)
    one, three = (sample_of(caches_of(tmp_path, kind=StaticGeneration, num_beams=beams)[0], shape) for beams in (1, 3))
    cache_bytes = 4 * 59 * 2 * LAYERS * HEADS_KV * HEAD * 4
    assert one["held"] == one["loaded"]
    assert one["prefill"] == 0
    assert one["step"] > cache_bytes
    assert three["step"] > 3 * cache_bytes


BOUND = {
    "llama, beams": {"num_beams": 3},
    "llama, beams that sample": {"num_beams": 2, "do_sample": True, "top_p": 0.9, "temperature": 0.7},
    "llama, one": {"repetition_penalty": 1.2},
    "llama, guidance": {"guidance_scale": 1.5},
    "gemma2": {"attention": "eager", "num_beams": 3},
    "qwen3_moe": {"num_beams": 3},
}


@pytest.mark.parametrize("name", BOUND)
def test_the_closed_form_of_transformers_generate_is_never_below_a_trace(tmp_path, name):
    caches, asked = caches_of(tmp_path, kind=StaticGeneration, family=name.split(",")[0], **BOUND[name])
    how = {"static_bytes": 0, "prefill_tokens": 512, "is_slots": False}
    closed = forward_bound(asked.config, asked.folder.config).generation([10, 40], **how)
    for rows, prompt in ((1, 40), (6, 10)):
        columns = prompt + NEW_TOKENS
        shape = CacheShape(rows=rows, columns=columns, prompts=rows, prompt_tokens=prompt)
        added = sample_of(caches, shape)["step"]
        assert added <= float(closed.peak_bytes(rows, columns)) <= 20 * added, (rows, prompt)


ROWS = np.array([20] * 6 + [10] * 6)
# 1 GFLOP a second: 1000 FLOPs for each token are a microsecond; nothing else takes time.
SPEED = cpu_speed(1e9, 1e18, source="by hand")


def law(fixed_flops, token_flops):
    place = WorkPlace("decode", 0, "mlp", "aten::mm", "matrix", "float32")

    def work(tokens):
        return WorkCount(places={place: Work(fixed_flops + token_flops * tokens, 0, 0)})

    return law_through([(tokens, length, work(tokens)) for tokens, length in ((1, 10), (100, 10), (100, 40))])


TIMES = PassTimes(prefill=law(0, 1000), step=law(8000, 1000), speed=SPEED)


def plan(cap_bytes, times=None, *, lengths=ROWS, fixed_rows=None):
    config = SimpleNamespace(generation=SimpleNamespace(max_new_tokens=11, num_beams=1))
    of = dict.fromkeys(("folder", "architecture", "device"))
    task = GenerationRequest(config=config, is_at_hand=True, lengths=lengths, fixed_rows=fixed_rows, **of)
    limits = {"limit_bytes": cap_bytes + 700, "outside_bytes": 500, "margin_bytes": 200}
    budget = Budget(device="cpu", limit_reason="by hand", margin_reason="by hand", **limits)
    return cut(task, budget, costs(), "by hand", source="traced", cap_bytes=cap_bytes, times=times)


def test_waves_take_the_longest_first_and_keep_the_cache_of_the_first():
    """1000 + 2 × 30 × R + 130 × R under 1600: three rows, 90 cells; beside them 120 × R: three rows again."""
    found = waves(ROWS, MemoryRoom(costs(), cap_bytes=1600), response_columns=10)
    assert found.rows.tolist() == [3, 3, 3, 3]
    assert found.columns.tolist() == [30, 30, 20, 20]
    assert found.at(0) == found.at(5) == (3, 30)
    assert found.at(6) == (3, 20)


def test_a_wave_reads_its_prompts_in_passes_and_writes_all_tokens():
    """Of 3 rows of 20: 2 passes of 40; of 3 of 10: one pass of 30. A step of 3 rows is 8 + 3 microseconds."""
    found = waves(ROWS, FixedRoom(3, prefill_tokens=40), response_columns=10)
    expected = 2 * (2 * 40e-6 + 10 * 11e-6) + 2 * (30e-6 + 10 * 11e-6)
    assert seconds(found, costs(), TIMES) == pytest.approx(expected)


def test_memory_decides_where_it_is_scarce():
    found = plan(1600)
    assert (found.rows, found.memory_rows, found.rows_reason) == (3, 3, "as many as there is memory for")
    assert [(shape.first_row, shape.rows, shape.columns) for shape in found.shapes] == [(0, 3, 30), (6, 3, 20)]
    assert found.shapes[0].peak_bytes == 1000 + 2 * 90 + 400
    assert found.total_bytes == 1580 + 500
    assert (found.fits, found.is_ample) == (True, False)
    saved = json.loads(json.dumps(found.as_dict()))
    assert "costs" not in saved
    assert saved["shapes"][0] == {"first_row": 0, "rows": 3, "columns": 30, "peak_bytes": 1580}
    exact = plan(1580)  # to the byte
    assert (exact.rows, exact.fits) == (3, True)
    alone = plan(1100)  # the longest prompt does not fit alone
    assert (alone.rows, alone.fits) == (1, False)


def test_all_rows_run_together_where_they_fit_but_not_those_that_hardly_save_time():
    found = plan(100_000)
    assert (found.rows, found.rows_reason, found.is_ample) == (12, "all rows together", True)
    assert isinstance(found.room(), MemoryRoom)
    # A token of a row takes (8 + R) / R microseconds; of 4,096 rows 1.002, and of 364 rows 2% more.
    found = plan(10**9, TIMES, lengths=np.full(5000, 20))
    assert found.most_rows == found.rows == 385  # 13 waves, where 364 would leave some for a 14th
    assert found.rows_reason == "more rows would hardly save time"
    # A configured number is taken whatever fits.
    found = plan(1600, fixed_rows=5)
    assert (found.rows, found.memory_rows, found.rows_reason) == (5, 3, "as configured")
    assert not found.fits
    assert found.room().rows(30) == 5


def test_after_what_the_device_has_shown_the_waves_are_others():
    before = plan(1600, TIMES)
    after = recut(before, ROWS, replace(before.costs, scale=2.0), cap_bytes=1600)
    assert (after.rows, after.memory_rows) == (1, 1)
    assert after.seconds == pytest.approx(3 * before.seconds)
    assert after.total_bytes == after.shapes[0].peak_bytes + 500


def test_passes_over_prompts_are_as_large_as_pays_and_leave_the_memory_to_rows():
    """Of 10 bytes a token, 10% of what is beside the weights are 512 tokens of 51,200 bytes."""
    steep, scarce = replace(TIMES, prefill=law(100_000, 1000)), 1000 + 51_200
    for cap_bytes, tokens, expected, reason in (
        (10**9, 20, 1024, "larger passes read prompts hardly faster"),
        (scarce, 20, 512, "passes over prompts take no more than 10%"),
        (scarce, 900, 512, "passes over prompts take no more than 10%"),  # a prompt of 900 passes alone anyway
    ):
        found, why = steep.tokens_that_fit(costs(), cap_bytes=cap_bytes, longest=tokens, usual=tokens)
        assert found == expected
        assert why.startswith(reason)
    # Small products of a GPU are slow, which the law does not know: there packed prompts, without masks, fill 4,096.
    on_gpu = replace(steep, speed=replace(SPEED, is_asynchronous=True))
    for is_packed, expected in ((True, 4096), (False, 1024)):
        how = {"cap_bytes": 10**9, "longest": 900, "usual": 20}
        found, why = on_gpu.tokens_that_fit(costs(is_packed=is_packed), **how)
        assert (found, "with which a GPU is busy" in why) == (expected, is_packed)
