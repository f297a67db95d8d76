"""Durations of a run in samples."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from brim.data.tokens import rows_of_step
from brim.train.schedule import RunClock
from brim.units import parse_duration

LENGTHS = np.array([3, 5, 2, 7])


def clock(lengths=LENGTHS, **changes):
    return RunClock(**{"lengths": lengths, "seed": 1, "total_samples": 1600, "final_size": 16, **changes})


@pytest.mark.parametrize(
    ("text", "samples"),
    [("5sp", 5), ("10ba", 160), ("2ep", 8), ("0.3ep", 2), ("0.1dur", 160), ("0.33333dur", 534), ("0tok", 0)],
)
def test_every_unit_comes_to_samples(text, samples):
    assert clock().samples(parse_duration(text)) == samples


def test_whole_epochs_of_tokens_are_whole_epochs():
    assert clock().samples(parse_duration("17tok")) == 4
    assert clock().samples(parse_duration("17000000tok")) == 4_000_000


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seed=st.integers(0, 5),
    num_tokens=st.integers(1, 300),
)
def test_tokens_are_counted_in_the_order_in_which_rows_are_taken(lengths, seed, num_tokens):
    samples = tokens = 0
    while tokens < num_tokens:
        _, (row,) = rows_of_step(num_rows=len(lengths), seed=seed, consumed_samples=samples, size=1)
        samples, tokens = samples + 1, tokens + lengths[row]
    assert clock(np.array(lengths), seed=seed).samples(parse_duration(f"{num_tokens}tok")) == samples
