"""The searches, on pure `fits`: exact sequences of probes, and what holds whatever `fits` answers."""

from functools import partial
from math import floor, log2

import pytest
from hypothesis import given, strategies as st
from tests.properties import examples

from brim.batching.memory import Probe, find_batch_size
from brim.batching.memory.finder import MOST_CORRECTIONS, WORTH_A_PROBE
from brim.errors import InputError, NothingFitsError, ProbeError

WAYS = ("predict", "linear", "binary", "doubling", "halving")


class Device:
    """Runs out of memory above `capacity` bytes. static and each: bytes without rows, and of a row."""

    def __init__(self, capacity, *, static=1000, each=10, shows_peaks=True):
        self.capacity, self.static, self.each, self.shows_peaks = capacity, static, each, shows_peaks
        self.sizes = []

    def peak(self, size):
        return self.static + self.each * size

    def __call__(self, size):
        self.sizes.append(size)
        fits = self.peak(size) <= self.capacity
        return probe_of(size, fits=fits, steps=int(fits), peak_bytes=self.peak(size) if self.shows_peaks else None)


def probe_of(size, *, fits, steps=1, peak_bytes=None):
    outcome = "fits" if fits else "out_of_memory"
    return Probe(size=size, steps=steps, outcome=outcome, peak_bytes=peak_bytes if fits else None, seconds=0.0)


def search(capacity, *, shows_peaks=True, most=100, **settings):
    """Search on a new device; what was found, and the sizes that were tried."""
    device = Device(capacity, shows_peaks=shows_peaks)
    return find_batch_size(device, most=most, **settings), device.sizes


def test_halving_doubling_and_binary_by_hand():
    found, tried = search(1230, how="halving")
    assert (found.size, found.num_out_of_memory, tried) == (12, 3, [100, 50, 25, 12])
    # As many chunks keep the effective batch.
    assert (found.num_chunks(100), found.num_chunks(96), found.num_chunks(1)) == (9, 8, 1)
    assert found.reason == "halved from 100; 12 ran and fitted with a peak of 1.1 KiB; 4 probes"
    for capacity, settings, size, tried in [
        (1230, {}, 16, [1, 2, 4, 8, 16, 32]),  # it stops at the first failure or at most
        (5000, {"most": 12, "start": 3}, 12, [3, 6, 12]),
        (1030, {"start": 20}, 2, [20, 10, 5, 2]),
    ]:
        found, seen = search(capacity, how="doubling", **settings)
        assert (found.size, seen) == (size, tried)
    found, tried = search(1230, how="binary")
    assert (found.size, tried) == (23, [50, 25, 12, 18, 21, 23, 24])
    found, tried = search(1230, how="binary", start=20)
    assert (found.size, tried[0]) == (23, 20)
    rounded = {"power_of_two": True, "bytes_of": Device(0).peak, "limit_bytes": 1230}
    assert [search(1230, how=how, **rounded)[0].size for how in WAYS] == [16] * 5
    # A larger size that fits above one that fails is never forgotten.
    fits = {8: False, 9: True}
    odd = partial(find_batch_size, lambda size: probe_of(size, fits=fits.get(size, size < 8)), how="binary", most=9)
    assert (odd(start=9).size, odd().size) == (9, 7)


def test_linear_finds_the_maximum_without_running_out_of_memory():
    found, tried = search(1234, how="linear", limit_bytes=1234)
    assert (found.size, found.num_out_of_memory, tried) == (23, 0, [1, 2, 23])
    assert found.reason == (
        "along the line through the peaks of sizes 1 and 2; 23 ran and fitted with a peak of 1.2 KiB of 1.2 KiB; "
        "3 probes"
    )
    for capacity, most, expected in [(1010, 100, [1, 2]), (5000, 1, [1])]:  # only one row fits, or is there
        found, tried = search(capacity, how="linear", most=most, limit_bytes=capacity)
        assert (found.size, tried) == (1, expected)
    found, tried = search(1230, limit_bytes=1230)  # without a prediction the default does the same
    assert tried == [1, 2, 23]
    assert found.reason.startswith("nothing was predicted, so along the line through the peaks of sizes 1 and 2;")


def test_linear_goes_on_from_a_peak_that_does_not_grow_yet_and_doubles_where_nothing_is_measured():
    class Update(Device):
        def peak(self, size):  # the optimizer's step takes more than the pass of a few rows
            return max(1100, 1000 + 10 * size)

    device = Update(1500)
    found = find_batch_size(device, how="linear", most=1000, limit_bytes=1500)
    assert device.sizes == [1, 2, 4, 8, 16, 61, 31, 50]
    assert (found.size, found.num_out_of_memory) == (50, 1)
    found, tried = search(1230, shows_peaks=False, how="linear", limit_bytes=1230)
    assert (found.size, tried) == (16, [1, 2, 4, 8, 16, 32])
    assert "doubled from 1, since peaks are not measured" in found.reason
    assert "since there is no limit in bytes" in search(1230, how="linear")[0].reason


@pytest.mark.parametrize(
    ("factor", "sizes"),  # predicted over true bytes of what the rows add; 10,000 rows fit
    [
        (0.5, [20_000, 10_000]),
        (0.8, [12_500, 6_250, 10_000]),
        (1.0, [10_000]),
        (1.01, [9_900]),  # within 2%
        (2.0, [5_000, 7_500, 10_000]),
    ],
)
def test_a_prediction_that_is_off_is_corrected_from_what_was_measured(factor, sizes):
    limits = {"most": 10**6, "limit_bytes": 101_000}
    found, tried = search(101_000, bytes_of=lambda size: 1000 + 10 * factor * size, **limits)
    assert (tried, found.size, found.num_out_of_memory) == (sizes, sizes[-1], int(factor < 1))


def test_a_lacking_constant_is_corrected_too_a_peak_above_the_limit_does_not_fit_and_a_margin_may_be_used():
    limits = {"most": 10**6, "limit_bytes": 101_000}
    found, tried = search(101_000, bytes_of=lambda size: 50_000 + 10 * size, **limits)
    assert tried == [5_100, 10_000]
    assert found.reason.startswith("predicted 5100, corrected by the measured peaks; 10000 ran")
    # The budget is smaller than the memory.
    found, tried = search(10**9, bytes_of=lambda size: 1000 + 5 * size, **limits)
    assert (tried, found.size, found.num_out_of_memory) == ([20_000, 10_000], 10_000, 0)
    assert search(10**9, how="binary", limit_bytes=1230)[0].size == 23
    # 10,000 rows fit; with 10,000 bytes free 9,000.
    limits["margin_bytes"] = 10_000
    assert search(101_000, bytes_of=Device(0).peak, **limits)[1] == [9_000]
    assert search(101_000, how="linear", **limits)[1] == [1, 2, 9_000]
    found, tried = search(101_000, bytes_of=lambda size: 1_000 + 9.5 * size, **limits)
    assert tried == [9_473]  # over the aim, under the limit
    assert found.reason == "predicted 9473; 9473 ran and fitted with a peak of 93.5 KiB of 98.6 KiB; 1 probe"


def test_without_peaks_a_prediction_is_verified_and_nothing_more():
    unseen = {"shows_peaks": False, "most": 10**6, "limit_bytes": 101_000}
    found, tried = search(101_000, predicted=lambda: 9_000, **unseen)
    assert tried == [9_000]
    assert "peaks are not measured, so whether more would fit is not known" in found.reason
    found, tried = search(101_000, predicted=11_000, **unseen)
    assert (found.size, tried) == (9_869, [11_000, 5_500, 7_778, 9_249, 10_086, 9_658, 9_869])


def test_one_row_that_does_not_fit_is_an_error_that_says_what_would_help():
    helps = ("activation checkpointing (0.8 GiB)", "rows of 512 tokens (0.7 GiB)")
    for how in WAYS:
        device = Device(1005)
        with pytest.raises(NothingFitsError) as raised:
            find_batch_size(device, how=how, most=7, predicted=5, limit_bytes=1005, helps=helps)
        (problem,) = raised.value.problems
        assert problem.what == "not even one row fits: batch size 1 ran out of memory, of 1005 B"
        assert problem.fix == "activation checkpointing (0.8 GiB); or rows of 512 tokens (0.7 GiB)"
        assert raised.value.exit_code == 2
        assert device.sizes[-1] == 1
    with pytest.raises(NothingFitsError, match=r"batch size 1 took 1010 B, of 1005 B\n(.|\n)*checkpointing, shorten"):
        find_batch_size(Device(10**9), most=7, predicted=5, limit_bytes=1005)


def test_the_peak_of_a_process_is_counted_above_what_it_had_before():
    probe = probe_of(4, fits=True, peak_bytes=900)
    assert probe.above(500, held_bytes=30).peak_bytes == 430
    unknown = (probe.above(None, held_bytes=30), probe_of(4, fits=False).above(500, held_bytes=30))
    assert [each.peak_bytes for each in unknown] == [None, None]


def test_errors_of_a_probe_and_arguments_that_make_no_sense():
    with pytest.raises(ProbeError, match="probe of batch size 4 says that it fits, and ran no step"):
        find_batch_size(lambda size: probe_of(size, fits=True, steps=0), how="halving", most=4)
    with pytest.raises(ProbeError, match="a probe of batch size 4 ran batch size 3"):
        find_batch_size(lambda size: probe_of(size - 1, fits=True), how="halving", most=4)
    error = KeyError("labels")

    def fits(size):
        raise error

    for how in WAYS:
        with pytest.raises(KeyError) as raised:
            find_batch_size(fits, how=how, most=4, predicted=2)
        assert raised.value is error
    asked = [({"how": "guess", "most": 0, "start": 0}, ["how is 'guess'", "most is 0", "start is 0"])]
    for settings, what in [*asked, *(({"most": most}, [f"most is {most!r}"]) for most in (2.5, "8", None))]:
        with pytest.raises(InputError) as refused:
            find_batch_size(Device(1), **settings)
        assert [problem.what for problem in refused.value.problems] == what


def most_probes(how, most, start):
    steps = floor(log2(most))
    if how == "halving":
        return 1 + floor(log2(min(start or most, most)))
    if how in ("doubling", "binary"):
        return 2 + steps + (how == "binary" and start is not None)
    return 4 + 2 * steps + MOST_CORRECTIONS


@examples(300)
@given(
    how=st.sampled_from(WAYS),
    most=st.integers(1, 200),
    start=st.none() | st.integers(1, 300),
    limit=st.none() | st.integers(0, 4000),
    others=st.fixed_dictionaries({"predicted": st.none() | st.integers(-5, 400), "power_of_two": st.booleans()}),
    curve=st.none() | st.tuples(st.integers(0, 500), st.integers(0, 50)),
    data=st.data(),
)
def test_whatever_the_probes_say_the_answer_was_executed_and_fitted(how, most, start, limit, others, curve, data):
    asked = []

    def fits(size):
        asked.append(size)
        peak = data.draw(st.none() | st.integers(0, 5000))
        return probe_of(size, fits=data.draw(st.booleans()), peak_bytes=peak)

    others["bytes_of"] = curve and (lambda size: curve[0] + curve[1] * size)
    try:
        found = find_batch_size(fits, how=how, most=most, start=start, limit_bytes=limit, **others)
    except NothingFitsError:
        assert 1 in asked
    else:
        chosen = next(probe for probe in found.probes if probe.size == found.size)
        assert chosen.outcome == "fits"
        assert limit is None or chosen.peak_bytes is None or chosen.peak_bytes <= limit
        assert [probe.size for probe in found.probes] == asked
    assert len(set(asked)) == len(asked)  # no size is tried twice
    assert all(1 <= size <= most for size in asked)
    assert not others["power_of_two"] or all(size.bit_count() == 1 for size in asked)
    assert len(asked) <= most_probes(how, most, start)


@examples(300)
@given(
    how=st.sampled_from(WAYS),
    most=st.integers(1, 3000),
    static=st.integers(0, 2000) | st.integers(0, 20),
    each=st.integers(1, 20),
    room=st.integers(1, 4000),
    factor=st.floats(0.3, 3),
)
def test_on_straight_peaks_each_way_comes_as_near_as_it_promises(how, most, static, each, room, factor):
    device = Device(static + each * room, static=static, each=each)
    largest = min(room, most)
    predicted = {"bytes_of": lambda size: static + factor * each * size, "limit_bytes": device.capacity}
    found = find_batch_size(device, how=how, most=most, **predicted)
    assert found.size <= largest
    if how == "binary" or (how == "linear" and static == 0):
        assert found.size == largest
    elif how in ("predict", "linear") and found.size * WORTH_A_PROBE < most:
        # What is left is less than 2% more rows would take.
        rows = (WORTH_A_PROBE - 1) * found.size + 1
        assert device.capacity - device.peak(found.size) <= rows * each * max(factor, 1)
    elif how in ("halving", "doubling"):
        assert largest <= 2 * found.size


@examples(200)
@given(room=st.integers(100, 2000), factor=st.floats(1.0, 3), noise=st.integers(0, 2**31))
def test_noise_in_the_peaks_costs_one_failure_at_most_and_little_of_the_size(room, factor, noise):
    """Peaks that are off by up to 0.2%, where half of the memory is static, and a limit that leaves 1% free."""
    device = Device(20 * room, static=10 * room, each=10)
    limit_bytes = int(device.capacity * 0.99)

    def noisy(size):
        probe = device(size)
        if probe.peak_bytes is None:
            return probe
        share = noise * size * 2654435761 % 2001 / 1000 - 1
        return probe_of(size, fits=True, peak_bytes=int(probe.peak_bytes * (1 + 0.002 * share)))

    found = find_batch_size(
        noisy, most=10**5, bytes_of=lambda size: device.static + 10 * factor * size, limit_bytes=limit_bytes
    )
    assert found.num_out_of_memory <= 1
    assert found.size >= 0.93 * room
