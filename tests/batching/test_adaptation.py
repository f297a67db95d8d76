"""The batch that follows the noise scale: each move by exact sequences of measurements."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.batching import Adaptation, NoiseScale


def noise(rows, num_measurements=5):
    return NoiseScale(num_measurements=num_measurements, squared_gradient=1.0, gradient_variance=float(rows))


def sizes(adaptation, scales):
    """The size after each measurement."""
    seen = []
    for rows in scales:
        adaptation = adaptation.after(noise(rows))
        seen.append(adaptation.size)
    return seen


def adaptation(size, smallest=32, largest=256):
    return Adaptation(size=size, smallest=smallest, largest=largest)


@pytest.mark.parametrize(
    ("smallest", "largest", "ladder"),
    [
        (32, 256, (32, 64, 128, 256)),
        (32, 200, (32, 64, 128, 200)),
        (3, 20, (3, 6, 12, 20)),
        (8, 9, (8, 9)),
        (8, 8, (8,)),
        (1, 2, (1, 2)),
    ],
)
def test_the_ladder_doubles_and_ends_at_the_largest(smallest, largest, ladder):
    assert adaptation(smallest, smallest, largest).ladder == ladder


@pytest.mark.parametrize(
    ("start", "scales", "expected"),
    [
        (64, [128] * 4, [64, 64, 128, 128]),  # at least the next rung, three times in a row
        (64, [127.9] * 9, [64] * 9),
        (64, [32] * 3, [64, 64, 32]),
        (64, [32.1] * 9, [64] * 9),
        (64, [500, 500, 100, 500, 500, 500], [64] * 5 + [128]),  # once undecided: votes begin anew
        (64, [500, 500, 20, 500, 500, 500], [64] * 5 + [128]),
        (64, [500] * 7, [64, 64, 128, 128, 128, 256, 256]),  # and after a move
        (64, [1e9] * 12, [64, 64, 128, 128, 128, 256] + [256] * 6),
        (256, [0] * 12, [256, 256, 128, 128, 128, 64, 64, 64, 32, 32, 32, 32]),
        (64, [128, 128, 128, 65, 65, 65, 65], [64, 64] + [128] * 5),  # not back within a factor of two
        (64, [128, 128, 128, 64, 64, 64], [64, 64, 128, 128, 128, 64]),
        (48, [64] * 3, [48, 48, 64]),  # from between two rungs
        (48, [32] * 3, [48, 48, 32]),
        (48, [63] * 9, [48] * 9),
    ],
)
def test_moves(start, scales, expected):
    assert sizes(adaptation(start), scales) == expected


def test_the_last_rung_need_not_be_a_doubling():
    assert sizes(adaptation(128, 32, 200), [200] * 3) == [128, 128, 200]
    assert sizes(adaptation(200, 32, 200), [128] * 3) == [200, 200, 128]


def test_nothing_moves_before_the_noise_scale_is_known():
    now = adaptation(64)
    for number in range(1, 8):
        now = now.after(noise(1e6, num_measurements=number))
        assert now.size == (128 if number == 7 else 64)


def test_where_there_is_nothing_but_noise_the_batch_grows_and_where_there_is_none_it_shrinks():
    all_noise = NoiseScale(num_measurements=9, squared_gradient=-0.1, gradient_variance=1.0)
    all_signal = NoiseScale(num_measurements=9, squared_gradient=1.0, gradient_variance=-0.1)
    up = down = adaptation(64)
    for _ in range(3):
        up, down = up.after(all_noise), down.after(all_signal)
    assert (up.size, down.size) == (128, 32)


@given(
    scales=st.lists(st.sampled_from([0, 10, 32, 40, 64, 90, 128, 300, 1000]), max_size=40),
    smallest=st.integers(1, 64),
    factor=st.integers(1, 20),
)
def test_a_saved_one_goes_on_the_same_and_stays_within_its_bounds(scales, smallest, factor):
    largest = smallest * factor - factor // 2
    one = other = adaptation(smallest, smallest, max(smallest, largest))
    for rows in scales:
        before = one.size
        one = one.after(noise(rows))
        other = Adaptation.from_dict(json.loads(json.dumps(other.as_dict()))).after(noise(rows))
        assert one == other
        assert one.size in one.ladder
        assert one.size == before or abs(one.ladder.index(one.size) - one.ladder.index(before)) == 1
