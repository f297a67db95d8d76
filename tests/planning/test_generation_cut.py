"""A job in waves under a cap, in numbers that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.infer.costs_by_hand import costs

from brim.infer.engines import FixedRoom, MemoryRoom
from brim.memory import Budget
from brim.memory.device import cpu_speed
from brim.memory.trace import Work, WorkCount, WorkPlace
from brim.planning.costs import PassTimes, PrefillTokens, prefill_tokens
from brim.planning.costs.time import law_through
from brim.planning.generation_plan import GenerationTask, cut, recut, seconds, waves

LENGTHS = np.array([20] * 6 + [10] * 6)
PASSES = PrefillTokens(tokens=40, reason="by hand")
# 1 GFLOP a second: 1000 FLOPs for each token are a microsecond; nothing else takes time.
SPEED = cpu_speed(1e9, 1e18, source="by hand")


def law(fixed_flops, token_flops):
    place = WorkPlace("decode", 0, "mlp", "aten::mm", "matrix", "float32")

    def work(tokens):
        return WorkCount(places={place: Work(fixed_flops + token_flops * tokens, 0, 0)})

    return law_through([(tokens, length, work(tokens)) for tokens, length in ((1, 10), (100, 10), (100, 40))])


TIMES = PassTimes(prefill=law(0, 1000), step=law(8000, 1000), speed=SPEED)


def task(**given):
    return GenerationTask(
        **{
            "lengths": LENGTHS,
            "max_new_tokens": 11,
            "num_beams": 1,
            "fixed_rows": None,
            "engine": "slots",
            "engine_reason": "",
            **given,
        }
    )


def budget(reserved_bytes):
    return Budget(
        device="cpu",
        limit_bytes=reserved_bytes + 700,
        outside_bytes=500,
        margin_bytes=200,
        limit_reason="by hand",
        margin_reason="by hand",
    )


def plan(cap_bytes, times=None, **given):
    return cut(task(**given), budget(cap_bytes), costs(), PASSES, source="traced", cap_bytes=cap_bytes, times=times)


def test_waves_take_the_longest_first_and_keep_the_cache_of_the_first():
    """1000 + 2 × 30 × R + 130 × R under 1600: three rows, 90 cells; beside them 120 × R: three rows again."""
    found = waves(LENGTHS, MemoryRoom(costs(), cap_bytes=1600), response_columns=10)
    assert found.rows.tolist() == [3, 3, 3, 3]
    assert found.columns.tolist() == [30, 30, 20, 20]
    assert found.at(0) == found.at(5) == (3, 30)
    assert found.at(6) == (3, 20)


def test_a_wave_reads_its_prompts_in_passes_and_writes_all_tokens():
    """Of 3 rows of 20: 2 passes of 40; of 3 of 10: one pass of 30. A step of 3 rows is 8 + 3 microseconds."""
    found = waves(LENGTHS, FixedRoom(3, prefill_tokens=40), response_columns=10)
    expected = 2 * (2 * 40e-6 + 10 * 11e-6) + 2 * (30e-6 + 10 * 11e-6)
    assert seconds(found, costs(), TIMES) == pytest.approx(expected)


def test_memory_decides_where_it_is_scarce():
    found = plan(1600)
    assert (found.rows, found.memory_rows, found.rows_reason) == (3, 3, "as many as there is memory for")
    assert [(shape.first_row, shape.rows, shape.columns) for shape in found.shapes] == [(0, 3, 30), (6, 3, 20)]
    assert found.shapes[0].peak_bytes == 1000 + 2 * 90 + 400
    assert found.total_bytes == 1580 + 500
    assert found.fits
    assert not found.is_ample


def test_all_rows_run_together_where_they_fit():
    found = plan(100_000)
    assert (found.rows, found.rows_reason) == (12, "all rows together")
    assert found.is_ample
    assert isinstance(found.room(), MemoryRoom)


def test_rows_that_hardly_save_time_are_not_taken():
    """A token of a row takes (8 + R) / R microseconds; of 4,096 rows 1.002, and of 364 rows 2% more."""
    many = np.full(5000, 20)
    found = plan(10**9, TIMES, lengths=many)
    assert found.most_rows == found.rows == 385  # 13 waves, where 364 would leave some for a 14th
    assert found.rows_reason == "with more of them a token of a row takes hardly less time"


def test_a_number_by_hand_is_taken_whatever_fits():
    found = plan(1600, fixed_rows=5)
    assert (found.rows, found.memory_rows, found.rows_reason) == (5, 3, "a number by hand")
    assert not found.fits
    assert found.room().rows(30) == 5


def test_a_longest_prompt_that_does_not_fit_alone_is_told():
    found = plan(1100)
    assert (found.rows, found.fits) == (1, False)


def test_after_what_the_device_has_shown_the_waves_are_others():
    before = plan(1600, TIMES)
    after = recut(before, LENGTHS, replace(before.costs, scale=2.0), cap_bytes=1600)
    assert (after.rows, after.memory_rows) == (1, 1)
    assert after.seconds == pytest.approx(3 * before.seconds)
    assert after.total_bytes == after.shapes[0].peak_bytes + 500


def test_the_plan_is_json_without_its_costs():
    saved = json.loads(json.dumps(plan(1600).as_dict()))
    assert "costs" not in saved
    assert saved["shapes"][0] == {"first_row": 0, "rows": 3, "columns": 30, "peak_bytes": 1580}


def test_passes_over_prompts_are_as_large_as_pays_and_leave_the_memory_to_rows():
    """Of 10 bytes a token, 10% of what is beside the weights are 512 tokens of 51,200 bytes."""
    steep = replace(TIMES, prefill=law(100_000, 1000))
    roomy = prefill_tokens(costs(), steep, cap_bytes=10**9, longest=20, usual=20)
    assert (roomy.tokens, roomy.reason) == (1024, "larger passes read prompts hardly faster")
    scarce = prefill_tokens(costs(), steep, cap_bytes=1000 + 51_200, longest=20, usual=20)
    assert scarce.tokens == 512
    assert scarce.reason.startswith("passes over prompts take no more than 10%")
    long_prompts = prefill_tokens(costs(), steep, cap_bytes=1000 + 51_200, longest=900, usual=900)
    assert long_prompts.tokens == 512  # a prompt of 900 passes alone anyway
