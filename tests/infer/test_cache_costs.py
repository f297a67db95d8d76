"""A cache's peak from its parts, in numbers that can be checked by hand."""

import numpy as np
from tests.infer.costs_by_hand import costs

from brim.batching import Surface


def test_the_cache_is_there_in_every_pass_and_the_larger_pass_counts():
    found = costs()
    # Of prompts of 20 tokens, two are read together: 400 bytes; a step of 4 rows takes 4 × 130.
    assert found.prompts_of_pass(4, 20) == 2
    assert found.peak_bytes(4, 30) == 1000 + 2 * 4 * 30 + 520
    assert found.peak_bytes(2, 30) == 1000 + 2 * 2 * 30 + 400
    assert found.peak_bytes(1, 30) == 1000 + 2 * 30 + 200


def test_a_prompt_longer_than_a_pass_is_read_alone():
    assert costs(prefill_tokens=5).prompts_of_pass([1, 9], 20).tolist() == [1, 1]
    assert costs(prefill_tokens=5).peak_bytes(3, 30) == 1000 + 2 * 3 * 30 + 390


def test_of_shorter_prompts_more_are_read_together():
    """40 of one token, at 50 bytes each, where two of 20 take 400."""
    steep = Surface(base=0.0, lengths=(1, 20), tokens=((1, 100), (20, 2000)), values=((50.0, 5000.0), (200.0, 20000.0)))
    nothing = Surface(base=0.0, lengths=(10,), tokens=((1, 2),), values=((0.0, 0.0),))
    assert costs(prefill=steep, step=nothing).peak_bytes(40, 30) == 1000 + 2 * 40 * 30 + 400
    assert costs(prefill=steep, step=nothing, shortest_tokens=1).peak_bytes(40, 30) == 1000 + 2 * 40 * 30 + 2000


def test_cells_that_are_there_count_whatever_is_made_of_them():
    assert costs().peak_bytes(2, 30, cells=100) == 1000 + 2 * 100 + 400
    assert costs().peak_bytes(2, 30, cells=10) == costs().peak_bytes(2, 30)


def test_a_measured_scale_is_of_what_the_shape_adds():
    assert costs(scale=1.5).peak_bytes(4, 30) == 1000 + 1.5 * (240 + 520)


def test_many_rows_are_asked_for_at_once():
    found = costs()
    rows = np.arange(1, 9)
    assert found.peak_bytes(rows, 30).tolist() == [float(found.peak_bytes(int(row), 30)) for row in rows]
