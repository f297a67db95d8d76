"""A cache's rows come, go and are moved, and keep their keys and values; what it takes, and how many rows have room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.infer.costs_by_hand import costs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from brim.batching import Surface
from brim.infer.engines import FixedRoom, MemoryRoom
from brim.infer.engines.cache import RowCache, attending_in_windows, row_windows

CPU = torch.device("cpu")
HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 5  # as where keys and values differ in size


class Mirror:
    """The oracle: each row's tokens in a list of its own."""

    def __init__(self, cache):
        self.cache = cache
        self.rows = []
        self.next = 1.0

    def states(self, count, tokens):
        numbers = torch.arange(self.next, self.next + count * tokens).view(count, 1, tokens, 1)
        self.next += count * tokens
        return numbers.expand(count, HEADS, tokens, KEY_SIZE), -numbers.expand(count, HEADS, tokens, VALUE_SIZE)

    def enter(self, lengths):
        keys, values = self.states(len(lengths), max(lengths))
        self.cache.begin_prefill(lengths)
        for layer in range(len(self.cache.layers)):
            seen = self.cache.update(keys, values, layer)
            assert torch.equal(seen[0], keys)
            assert torch.equal(seen[1], values)
        self.cache.end_prefill(lengths)
        self.rows += [keys[i, 0, max(lengths) - n :, 0].tolist() for i, n in enumerate(lengths)]

    def step(self):
        keys, values = self.states(len(self.rows), 1)
        for row, number in zip(self.rows, keys[:, 0, 0, 0].tolist(), strict=True):
            row.append(number)
        for layer in range(len(self.cache.layers)):
            assert self.cache.get_mask_sizes(1, layer) == (self.cache.window + 1, 0)
            seen_keys, seen_values = self.cache.update(keys, values, layer)
            self.check(seen_keys, seen_values)
        self.cache.end_step()

    def check(self, keys, values):
        assert keys.shape == (len(self.rows), HEADS, self.cache.window + 1, KEY_SIZE)
        assert values.shape == (len(self.rows), HEADS, self.cache.window + 1, VALUE_SIZE)
        for number, row in enumerate(self.rows):
            expected = torch.tensor(row)[None, :, None]
            assert torch.equal(keys[number, :, -len(row) :], expected.expand(HEADS, -1, KEY_SIZE))
            assert torch.equal(values[number, :, -len(row) :], -expected.expand(HEADS, -1, VALUE_SIZE))

    def leave(self, slot):
        last = self.rows.pop()
        if slot < len(self.rows):
            self.rows[slot] = last
        self.cache.remove(slot)


def test_any_sequence_of_moves_keeps_every_row():
    generator = np.random.default_rng(0)
    for _ in range(30):
        cells, columns = 48, int(generator.integers(6, 13))
        cache = RowCache(1, rows=cells // columns, columns=columns, cells=cells)
        mirror = Mirror(cache)
        for _ in range(40):
            move = generator.integers(4)
            if move == 0 and mirror.rows:
                mirror.leave(int(generator.integers(len(mirror.rows))))
            elif move == 1:
                least = max(cache.window, 1)
                most = min(cells // max(len(mirror.rows), 1), 16)
                if least <= most:
                    columns = int(generator.integers(least, most + 1))
                    cache.lay_out(columns=columns, end=int(generator.integers(cache.window, columns + 1)))
            elif move == 2 and cache.rows > len(mirror.rows) and cache.end:
                count = int(generator.integers(1, cache.rows - len(mirror.rows) + 1))
                mirror.enter([int(generator.integers(1, cache.end + 1)) for _ in range(count)])
            elif mirror.rows and cache.end < cache.columns:
                mirror.step()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_every_slot_is_in_one_window_that_holds_all_it_needs(starts):
    windows = row_windows(starts)
    assert [slot for slots, _ in windows for slot in range(len(starts))[slots]] == list(range(len(starts)))
    for slots, unneeded in windows:
        assert unneeded == min(starts[slots]) - min(starts)
    neighbours = row_windows([5] * 8 + [9, 7] + [8] * 6 + [30])
    assert [unneeded for _, unneeded in neighbours] == [0, 2, 25]


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_in_parts_is_that_in_one(heads):
    starts = [0, 3, *range(2, 19), 20]
    torch.manual_seed(0)
    arguments = _arguments(starts, end=25, heads=heads)
    module: Any = SimpleNamespace(num_key_value_groups=heads // 2, is_causal=True)
    whole, _ = sdpa_attention_forward(module, **arguments, scaling=0.5)
    values = arguments["value"].clone()
    for first in range(0, len(starts), 8):  # where no row may look
        values[first : first + 8, :, : min(starts[first : first + 8]) - min(starts)] = torch.nan
    assert values.isnan().any()
    with attending_in_windows(starts, CPU):
        attended, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, **{**arguments, "value": values}, scaling=0.5)
    torch.testing.assert_close(attended, whole)


def test_transformers_own_attention_is_back_afterwards_and_stays_for_few_rows_and_gpus():
    with pytest.raises(RuntimeError, match="out of"), attending_in_windows(list(range(20)), CPU):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
        raise RuntimeError("out of memory")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    for num_rows, device in ((8, "cpu"), (20, "cuda")):
        with attending_in_windows(list(range(num_rows)), torch.device(device)):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_what_is_no_step_of_these_rows_is_attended_to_in_one():
    torch.manual_seed(0)
    starts = list(range(20))
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    for arguments in (_arguments(starts[:19], end=25, heads=2), _arguments(starts, end=25, heads=2, queries=3)):
        whole, _ = sdpa_attention_forward(module, **arguments)
        with attending_in_windows(starts, CPU):
            assert torch.equal(ALL_ATTENTION_FUNCTIONS["sdpa"](module, **arguments)[0], whole)


def _arguments(starts: list[int], *, end: int, heads: int, queries: int = 1) -> dict[str, torch.Tensor]:
    num_rows, window, size = len(starts), end - min(starts), 4
    columns = torch.arange(min(starts), end)
    return {
        "query": torch.randn(num_rows, heads, queries, size),
        "key": torch.randn(num_rows, 2, window, size),
        "value": torch.randn(num_rows, 2, window, size),
        "attention_mask": (columns >= torch.tensor(starts)[:, None])[:, None, None, :].expand(-1, -1, queries, -1),
    }


def test_the_cache_is_there_in_every_pass_and_the_larger_pass_counts():
    found = costs()
    # Of prompts of 20 tokens, two are read together: 400 bytes; a step of 4 rows takes 4 × 130.
    assert found.prompts_of_pass(4, 20) == 2
    assert found.peak_bytes(4, 30) == 1000 + 2 * 4 * 30 + 520
    assert found.peak_bytes(2, 30) == 1000 + 2 * 2 * 30 + 400
    assert found.peak_bytes(1, 30) == 1000 + 2 * 30 + 200
    assert found.peak_bytes(2, 30, cells=100) == 1000 + 2 * 100 + 400  # cells that are there count
    assert found.peak_bytes(2, 30, cells=10) == found.peak_bytes(2, 30)
    assert costs(scale=1.5).peak_bytes(4, 30) == 1000 + 1.5 * (240 + 520)  # of what the shape adds
    rows = np.arange(1, 9)
    assert found.peak_bytes(rows, 30).tolist() == [float(found.peak_bytes(int(row), 30)) for row in rows]


def test_a_prompt_longer_than_a_pass_is_read_alone_and_of_shorter_ones_more_are_read_together():
    """40 of one token, at 50 bytes each, where two of 20 take 400."""
    assert costs(prefill_tokens=5).prompts_of_pass([1, 9], 20).tolist() == [1, 1]
    assert costs(prefill_tokens=5).peak_bytes(3, 30) == 1000 + 2 * 3 * 30 + 390
    steep = Surface(base=0.0, lengths=(1, 20), tokens=((1, 100), (20, 2000)), values=((50.0, 5000.0), (200.0, 20000.0)))
    nothing = Surface(base=0.0, lengths=(10,), tokens=((1, 2),), values=((0.0, 0.0),))
    assert costs(prefill=steep, step=nothing).peak_bytes(40, 30) == 1000 + 2 * 40 * 30 + 400
    assert costs(prefill=steep, step=nothing, shortest_tokens=1).peak_bytes(40, 30) == 1000 + 2 * 40 * 30 + 2000


def test_packed_prompts_fill_a_pass_whose_tokens_are_whole_prompts_of_the_longest():
    packed = costs(is_packed=True)
    assert packed.prompts_of_pass([1, 2, 9], 30).tolist() == [1, 2, 2]  # one of 30, and shorter ones in its 10 tokens
    assert packed.peak_bytes(2, 40) == 1000 + 2 * 2 * 40 + 600
    passes = [packed.with_passes_of(tokens, longest=30).prefill_tokens for tokens in (100, 20)]
    assert passes == [90, 30]  # a prompt of 30 passes anyway
    assert costs().with_passes_of(100, longest=30).prefill_tokens == 100


def test_a_number_is_halved_and_never_below_one():
    room = FixedRoom(6, prefill_tokens=100)
    assert (room.rows(10), room.rows(1000, cells=5), room.prefill_tokens) == (6, 6, 100)
    room.shrink(rows=4, columns=10)
    assert (room.rows(10), room.prefill_tokens) == (2, 50)
    room.shrink(rows=2, columns=10)
    room.shrink(rows=1, columns=10)
    assert room.rows(10) == 1


def test_as_many_rows_as_the_cap_allows_but_one_at_least():
    for cap_bytes in (10, 1300, 1380, 1381, 1759, 1760, 1761, 10_000):
        found = MemoryRoom(costs(), cap_bytes=cap_bytes).rows(30)
        assert found == 1 or costs().peak_bytes(found, 30) <= cap_bytes
        assert costs().peak_bytes(found + 1, 30) > cap_bytes
    assert MemoryRoom(costs(), cap_bytes=10**9, most_rows=7).rows(30) == 7


def test_beside_cells_that_are_there_fewer_rows_fit_and_after_a_lack_of_memory_rows_add_less():
    room = MemoryRoom(costs(), cap_bytes=2000)
    # 1000 + 2 × 300 + 130 a row: three beside cells that are there, where without them five would fit.
    assert (room.rows(30), room.rows(30, cells=300)) == (5, 3)
    room.shrink(rows=5, columns=30)  # 1950 bytes were predicted: the 950 that rows add become 665
    assert (room.cap_bytes, room.rows(30), room.prefill_tokens) == (1665, 3, 20)
    room.shrink(rows=100, columns=30)  # more rows than the cap allows were never run
    assert room.cap_bytes == 1000 + int(0.7 * 665)
