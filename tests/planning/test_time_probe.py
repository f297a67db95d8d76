"""Timing shapes, with a clock that stands still but for what runs."""

import pytest
from tests.planning.test_time_shapes import linear

from brim.planning.costs import fit_time, time_shapes
from brim.planning.costs.timing import CALLS, Timing

SHAPES = ((1, 50), (8, 50), (1, 400), (4, 100), (64, 400), (8, 100))


class FakeDevice:
    """A floor of 10 ms and 1 ms a token; the first call of a shape takes ten times as long."""

    def __init__(self):
        self.now_s = 100.0
        self.calls = []

    def run(self, rows, length):
        first = (rows, length) not in self.calls
        self.calls.append((rows, length))
        self.now_s += (10 if first else 1) * (0.01 + 1e-3 * rows * length)

    def clock(self):
        return self.now_s


def timed(allowed_s, *, token_s=1e-3):
    device = FakeDevice()
    timing = Timing(shapes=SHAPES, allowed_s=allowed_s, reason="")
    samples = time_shapes(timing, device.run, device.clock, predicted=linear(token_s))
    return device, [(sample.rows, sample.length) for sample in samples], samples


def test_the_first_call_is_not_counted():
    device, shapes, samples = timed(1e6)
    assert shapes == list(SHAPES)
    assert device.calls == [shape for shape in SHAPES for _ in range(CALLS)]
    assert samples[0].seconds == pytest.approx((0.06,) * (CALLS - 1))
    assert fit_time(samples, linear(1e-3)).seconds(1000, 100) == pytest.approx(1.01, rel=0.02)


def test_what_cannot_be_afforded_is_left_out():
    _, shapes, _ = timed(60.0)
    assert shapes == [shape for shape in SHAPES if shape != (64, 400)]


def test_an_estimate_that_was_too_low_is_corrected_by_what_was_measured():
    """By it, 64 rows of 400 would take a tenth of what they take."""
    _, shapes, _ = timed(60.0, token_s=1e-4)
    assert (64, 400) not in shapes


def test_it_ends_when_the_time_is_up():
    _, shapes, _ = timed(0.1)
    assert shapes == [(1, 50)]


def test_what_a_run_raises_is_passed_on():
    def run(rows, length):
        raise MemoryError

    with pytest.raises(MemoryError):
        time_shapes(Timing(shapes=SHAPES, allowed_s=1.0, reason=""), run, lambda: 0.0, predicted=linear(1e-3))
