"""Rows come, go and are moved, and each keeps its own keys and values."""

import numpy as np
import torch

from brim.infer.engines.cache import RowCache

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


def test_a_prompt_is_seen_whole_and_then_its_window():
    cache = RowCache(2, rows=3, columns=10)
    mirror = Mirror(cache)
    cache.lay_out(columns=10, end=4)
    mirror.enter([4, 2, 1])
    assert (cache.starts, cache.end, cache.base) == ([0, 2, 3], 4, 0)
    mirror.step()
    mirror.leave(0)  # the last row takes its slot, and the longest no longer widens the window
    assert (cache.starts, cache.base) == ([3, 2], 2)
    mirror.step()


def test_columns_are_moved_to_the_front_when_they_are_used_up():
    cache = RowCache(1, rows=2, columns=4)
    mirror = Mirror(cache)
    cache.lay_out(columns=4, end=3)
    mirror.enter([3])
    mirror.step()
    assert cache.end == cache.columns
    mirror.enter([2])
    mirror.leave(0)
    cache.lay_out(columns=4, end=cache.window)
    assert (cache.end, cache.starts) == (2, [0])
    mirror.step()


def test_shorter_rows_become_more_in_the_same_memory():
    cache = RowCache(1, rows=2, columns=12)
    mirror = Mirror(cache)
    cache.lay_out(columns=12, end=5)
    mirror.enter([5, 4])
    mirror.step()
    mirror.leave(0)
    cache.lay_out(columns=8, end=6)
    assert cache.rows == 3
    mirror.enter([2, 1])
    mirror.step()


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


def test_a_mask_is_sized_as_older_transformers_ask_for_it_too():
    cache = RowCache(1, rows=2, columns=8)
    mirror = Mirror(cache)
    cache.lay_out(columns=8, end=3)
    mirror.enter([3, 2])
    assert cache.layers[0].get_mask_sizes(torch.arange(3, 5)) == cache.layers[0].get_mask_sizes(2) == (5, 0)
    assert cache.layers[0].get_max_cache_shape() == -1
