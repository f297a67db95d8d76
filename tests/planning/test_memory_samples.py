"""Surfaces through few samples, against the functions that were sampled."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.properties import examples

from brim.planning.costs import Sample, passing, region, sampled
from brim.planning.costs.sampling import Region, round_length, round_rows

MIB = 2**20


def peak_of(*, token=3000, score=0, update=40 * MIB, static=500 * MIB, chunk=None, position=20_000, recompute=9000):
    """A step's peak as it is: the most of an update, of the loss's logits and of a backward pass."""

    def peak(rows, tokens):
        num_tokens, positions = rows * tokens, rows * (tokens - 1)
        logits = position * (positions if chunk is None else min(positions, chunk))
        forward = token * num_tokens + score * num_tokens * tokens + logits
        backward = (token + recompute) * num_tokens + 2 * score * num_tokens * tokens
        return static + max(update, forward, backward)

    return peak


def where(**given):
    usual = {"longest": 2048, "short": 96, "most_rows": 32, "cap_bytes": 900 * MIB, "chunk_positions": None}
    return Region(**{**usual, **given})


def traced(peak):
    asked = []

    def call(rows, tokens):
        asked.append((rows, tokens))
        return peak(rows, tokens)

    return call, asked


def errors(surface, peak, region):
    """(truth, surface over truth less 1) of every shape that fits."""
    tokens = np.unique(np.geomspace(2, region.longest, 40).astype(int))
    rows = np.arange(1, region.most_rows + 1)[:, None]
    truth = np.array([[peak(int(row), int(length)) for length in tokens] for row in rows[:, 0]])
    fits = truth <= region.cap_bytes
    return truth[fits], (surface(rows, tokens) / truth - 1)[fits]


@pytest.mark.parametrize("score", [0, 2, 40], ids=["flash", "some scores", "scores"])
@pytest.mark.parametrize("chunk", [None, 300, 3000], ids=["whole", "small chunk", "large chunk"])
@pytest.mark.parametrize("cap_mib", [600, 900, 4000])
def test_a_surface_is_never_much_below_and_close_where_the_cap_is(score, chunk, cap_mib):
    peak = peak_of(score=score, chunk=chunk)
    area = where(cap_bytes=cap_mib * MIB, chunk_positions=chunk)
    call, asked = traced(peak)
    surface = sampled(call, area)
    truth, off = errors(surface, peak, area)
    assert off.min() >= -0.005
    # A chunk that two of the longest rows fill, and one does not, is full somewhere between them.
    near = 0.14 if chunk == 3000 and score == 40 else 0.05
    assert off[truth >= 0.9 * area.cap_bytes].max(initial=0) <= near
    assert off.max() <= 0.15
    assert len(asked) == len(set(asked))
    assert len(asked) <= 14


def test_two_samples_and_a_tiny_one_do_where_everything_fits():
    call, asked = traced(peak_of())
    sampled(call, where(cap_bytes=2**50))
    assert asked == [(1, 2), (1, 2048), (32, 2048)]


def test_one_length_is_one_line():
    call, asked = traced(peak_of())
    surface = sampled(call, where(short=2048))
    assert surface.lengths == (2048,)
    assert {tokens for _, tokens in asked} == {2, 2048}


def test_a_longest_row_that_does_not_fit_is_sampled_alone():
    call, asked = traced(peak_of())
    surface = sampled(call, where(cap_bytes=510 * MIB, most_rows=1, short=2048))
    assert asked == [(1, 2), (1, 2048)]
    assert float(surface(1, 2048)) == peak_of()(1, 2048)


@given(
    rows=st.integers(1, 32),
    tokens=st.integers(2, 2048),
    share=st.floats(0.8, 1.2),
    score=st.sampled_from([0, 40]),
)
@examples(50)
def test_a_surface_goes_through_one_more_sample_and_never_falls(rows, tokens, share, score):
    peak = peak_of(score=score)
    before = sampled(peak, where())
    sample = Sample(rows=rows, tokens=tokens, peak_bytes=int(share * peak(rows, tokens)))
    after = passing(before, sample)
    assert float(after(rows, tokens)) == pytest.approx(sample.peak_bytes, rel=1e-9)
    along = after(np.arange(1, 200), tokens)
    assert np.all(np.diff(along) >= 0)
    if share >= 1.1:
        assert np.all(along >= before(np.arange(1, 200), tokens) - 1)


def test_lengths_and_rows_are_rounded_up_so_that_data_alike_share_samples():
    assert [round_length(tokens) for tokens in (1, 64, 65, 97, 129, 193, 1000)] == [64, 64, 96, 128, 192, 256, 1024]
    assert [round_rows(rows) for rows in (1, 2, 3, 4, 5, 7, 9, 13, 17)] == [1, 2, 3, 4, 6, 8, 12, 16, 24]


@pytest.mark.parametrize(("context", "longest"), [(None, 1472), (1450, 1450), (1417, 1417), (8192, 1472)])
def test_the_longest_row_is_rounded_within_the_context(context, longest):
    lengths = [17] * 3 + [100] * 60 + [300] * 30 + [1417]
    found = region(lengths, most_rows=32, cap_bytes=1, context=context, chunk_positions=5)
    assert found == where(longest=longest, short=128, cap_bytes=1, chunk_positions=5)


def test_rows_that_are_too_short_to_matter_are_left_out():
    """With two rows at most, those of fewer than half of the longest row's tokens fit if it does."""
    found = region([10] * 99 + [1000], most_rows=2, cap_bytes=1, context=None, chunk_positions=None)
    assert (found.short, found.longest) == (512, 1024)
