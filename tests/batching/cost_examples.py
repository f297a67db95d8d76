"""Costs that tests cut by: drawn at random with the properties that surfaces have, or without them."""

import hypothesis.strategies as st
import numpy as np

from brim.batching import ByLength, Costs, Surface

LENGTHS = (8, 32, 100)
TOKENS = (32, 100, 400, 1600)


def surface(base, slopes_by_length):
    """Samples at TOKENS for each of LENGTHS, from the slopes of the pieces."""
    steps = np.diff((0, *TOKENS))
    return Surface(
        base=base,
        lengths=LENGTHS,
        tokens=(TOKENS,) * len(LENGTHS),
        values=tuple(tuple(float(v) for v in base + np.cumsum(steps * slopes)) for slopes in slopes_by_length),
    )


@st.composite
def convex_surfaces(draw):
    """Slopes rise along the tokens and along the length: what the Monge condition asks for."""
    base = draw(st.integers(0, 200))
    rises = draw(st.lists(st.integers(0, 4), min_size=len(TOKENS), max_size=len(TOKENS)))
    by_length = [np.array(rises).cumsum()]
    for _ in LENGTHS[1:]:
        more = draw(st.lists(st.integers(0, 3), min_size=len(TOKENS), max_size=len(TOKENS)))
        by_length.append(by_length[-1] + np.array(more).cumsum())
    return surface(float(base), by_length)


@st.composite
def rising_surfaces(draw):
    """Values rise along the tokens and along the length, and bend as they like."""
    base = draw(st.integers(0, 200))
    by_length = [np.array(draw(st.lists(st.integers(0, 5), min_size=len(TOKENS), max_size=len(TOKENS))))]
    for _ in LENGTHS[1:]:
        by_length.append(by_length[-1] + draw(st.lists(st.integers(0, 3), min_size=4, max_size=4)))
    return surface(float(base), by_length)


@st.composite
def jagged_surfaces(draw):
    """Peaks that rise and fall."""
    pieces = st.lists(st.integers(-3, 6), min_size=len(TOKENS), max_size=len(TOKENS))
    return surface(100.0, [np.array(draw(pieces)) for _ in LENGTHS])


@st.composite
def costs(draw, peak=None, time=None):
    """Costs with room for memory and time to disagree."""
    return Costs(
        peak=draw(rising_surfaces() if peak is None else peak),
        static_bytes=draw(st.integers(0, 100)),
        time=draw(convex_surfaces() if time is None else time),
        scale=draw(st.sampled_from([0.5, 1.0, 1.3])),
    )


def linear_costs(*, bytes_per_token=10, static_bytes=1000, seconds=1.0, seconds_per_token=0.01, scale=1.0):
    """Peak: static_bytes + bytes_per_token · tokens. Time: seconds + seconds_per_token · tokens."""
    return Costs(
        peak=Surface(
            base=static_bytes, lengths=(16,), tokens=((16,),), values=((static_bytes + bytes_per_token * 16.0,),)
        ),
        static_bytes=static_bytes,
        time=Surface(base=seconds, lengths=(16,), tokens=((16,),), values=((seconds + seconds_per_token * 16,),)),
        scale=scale,
    )


def cut(lengths, **settings):
    """The micro-batches of one effective batch."""
    return ByLength(**settings).cut(lengths)
