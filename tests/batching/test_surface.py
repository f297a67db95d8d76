"""Interpolation between samples of a micro-batch's shape."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.batching.cost_examples import LENGTHS, TOKENS, costs, jagged_surfaces, surface

from brim.batching import Costs, Surface

TWO = Surface(base=10.0, lengths=(10, 30), tokens=((20, 100), (60, 90)), values=((30.0, 190.0), (130.0, 250.0)))


@pytest.mark.parametrize(
    ("rows", "length", "value"),
    [
        (2, 10, 30),  # samples
        (10, 10, 190),
        (3, 30, 250),
        (1, 10, 20),  # between no tokens and the first
        (1, 30, 70),
        (6, 10, 110),  # between two
        (11, 10, 210),  # beyond the last: its slope goes on
        (5, 30, 490),
        (3, 20, (110 + 130) / 2),  # 60 tokens: between the two lengths
        (4, 5, 30),  # shorter than any: the shortest's line
        (2, 45, 250),  # longer than any: the longest's
    ],
)
def test_values(rows, length, value):
    assert TWO(rows, length) == pytest.approx(value, rel=1e-15)


@given(
    surface=jagged_surfaces(),
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_a_table_is_the_same_as_one_call_for_each(surface, rows, lengths):
    table = surface(np.array(rows), np.array(lengths)[:, None])
    assert table.shape == (len(lengths), len(rows))
    for line, length in zip(table, lengths, strict=True):
        assert line.tolist() == [float(surface(number, length)) for number in rows]


@given(surface=jagged_surfaces(), length=st.integers(1, 150), rows=st.integers(1, 300))
def test_straight_between_kinks(surface, length, rows):
    low, high = rows * length, (rows + 2) * length
    if not np.any((surface.kinks > low) & (surface.kinks < high)):
        middle = float(surface(rows, length) + surface(rows + 2, length)) / 2
        assert float(surface(rows + 1, length)) == pytest.approx(middle, rel=1e-9)


def test_kinks_are_those_of_all_lengths():
    assert TWO.kinks.tolist() == [20, 60, 90, 100]
    assert surface(0.0, [[1] * 4] * len(LENGTHS)).kinks.tolist() == list(TOKENS)


@given(costs=costs(), rows=st.integers(1, 99), length=st.integers(1, 150))
def test_costs_through_json(costs, rows, length):
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert again == costs
    assert again.peak_bytes(rows, length) == costs.peak_bytes(rows, length)


def test_what_was_measured_scales_what_the_shape_adds():
    costs = Costs(peak=TWO, static_bytes=6, time=TWO, scale=1.5)
    assert costs.peak_bytes([2, 10], 10).tolist() == [6 + 1.5 * 24, 6 + 1.5 * 184]
    assert costs.seconds([2, 10], 10).tolist() == [30, 190]
