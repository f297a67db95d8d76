"""The learning rate as a function of consumed samples."""

import math

import pytest
from hypothesis import assume, example, given, strategies as st
from tests.properties import examples

from brim.batching import constant, linear, stretches
from brim.errors import ConfigError
from brim.train import LearningRate
from brim.train.optimizer import require_room


def rates(schedule, batch, total):
    return [schedule(consumed_samples=c, batch_samples=batch) for c in range(0, total, batch)]


def test_without_a_decay_the_rate_is_constant():
    assert rates(LearningRate(peak=0.5, total_samples=8), 2, 8) == [0.5] * 4


def test_the_first_step_of_a_warm_up_learns_and_its_last_one_is_at_the_peak():
    schedule = LearningRate(peak=1.0, warmup_samples=8, total_samples=16)
    assert rates(schedule, 2, 16) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_linear_decay_starts_at_the_peak_and_would_reach_the_floor_after_the_last_step():
    schedule = LearningRate(peak=1.0, floor=0.2, decay="linear", total_samples=8)
    assert rates(schedule, 2, 8) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert schedule(consumed_samples=8, batch_samples=2) == 0.2


def test_a_cosine_is_half_way_down_at_half_time():
    schedule = LearningRate(peak=1.0, decay="cosine", warmup_samples=4, total_samples=12)
    assert rates(schedule, 4, 12) == pytest.approx([1.0, 1.0, 0.5])
    assert schedule(consumed_samples=10, batch_samples=1) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.75)))


def test_wsd_stays_up_and_falls_at_the_end():
    schedule = LearningRate(peak=1.0, decay="wsd", warmup_samples=2, decay_samples=4, total_samples=12)
    assert rates(schedule, 1, 12) == pytest.approx([0.5] + [1.0] * 8 + [0.75, 0.5, 0.25])


def test_the_clock_is_samples_so_the_batch_does_not_bend_the_decay():
    schedule = LearningRate(peak=1.0, decay="cosine", warmup_samples=8, total_samples=64)
    assert schedule(consumed_samples=32, batch_samples=8) == schedule(consumed_samples=32, batch_samples=16)


# NVIDIA-NeMo/Megatron-Bridge issue 2609: 100 iterations of 16 rows, warm-up 10, WSD over the last 20, and a ramp from 8
# rows to 16 over 160 samples. Counted in iterations, the warm-up took 20 of them, and the decay stopped half way.
BATCH = 16
REPORTED = LearningRate(
    peak=3e-4, floor=3e-5, decay="wsd", warmup_samples=10 * BATCH, decay_samples=20 * BATCH, total_samples=100 * BATCH
)
RAMP = linear(initial=8, final=BATCH, length_samples=160, increment=8)
NEVER_CUT = 10**9  # rows of an epoch


def steps(schedule, total):
    """(consumed samples, rows) of each step."""
    for each in stretches(schedule, num_rows=NEVER_CUT, total_samples=total):
        for first in range(each.first_sample, each.end_sample, each.size):
            yield first, min(each.size, each.end_sample - first)


def test_a_ramp_bends_neither_the_warm_up_nor_the_decay():
    plain, ramped = ((*steps(schedule, 1600),) for schedule in (constant(BATCH), RAMP))
    assert (len(plain), len(ramped)) == (100, 110)
    assert [rows for _, rows in ramped] == [8] * 20 + [16] * 90

    def by_sample(run):
        """The rate at the end of each step in the warm-up, at the beginning of each one after it."""
        return {
            consumed + rows if consumed + rows <= 160 else consumed: REPORTED(
                consumed_samples=consumed, batch_samples=rows
            )
            for consumed, rows in run
        }

    ours, theirs = by_sample(ramped), by_sample(plain)
    assert set(ours) > set(theirs)
    assert all(ours[sample] == rate for sample, rate in theirs.items())
    # And between them it lies on the same line.
    assert all(rate == pytest.approx(3e-4 * sample / 160) for sample, rate in ours.items() if sample < 160)
    assert max(sample for sample, rate in ours.items() if rate < 3e-4 and sample <= 160) == 152
    assert min(sample for sample, rate in ours.items() if rate < 3e-4 and sample > 160) == 1280 + BATCH
    assert ours[160] == ours[1280] == 3e-4
    assert ours[1440] == pytest.approx((3e-4 + 3e-5) / 2)
    assert REPORTED(consumed_samples=1600, batch_samples=BATCH) == 3e-5


@st.composite
def schedules(draw):
    total = draw(st.integers(2, 10_000))
    warmup = draw(st.integers(0, total - 1))
    decay = draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))
    peak = draw(st.floats(1e-6, 1e-1))
    floor = draw(st.floats(0, 1)) * peak
    assume(floor < peak)
    return LearningRate(
        peak=peak,
        floor=floor,
        decay=decay,
        warmup_samples=warmup,
        decay_samples=draw(st.integers(1, total - warmup)) if decay == "wsd" else 0,
        total_samples=total,
    )


# Half-way between neighbours lies no number: the fall of one sample is rounded away.
NEIGHBOURS = LearningRate(peak=0.0625, floor=math.nextafter(0.0625, 0), decay="wsd", decay_samples=2, total_samples=2)


@given(schedule=schedules(), rows=st.integers(1, 10_000), batch=st.integers(1, 10_000))
@example(schedule=NEIGHBOURS, rows=1, batch=1)
@examples(200)
def test_declared_ends_are_met_exactly_whatever_the_batches_are(schedule, rows, batch):
    peak, floor, warmup, total = schedule.peak, schedule.floor, schedule.warmup_samples, schedule.total_samples
    if warmup:
        batch = min(batch, warmup)
        assert schedule(consumed_samples=warmup - batch, batch_samples=batch) == peak  # ends the warm-up
        assert schedule(consumed_samples=0, batch_samples=warmup - 1) < peak
    assert schedule(consumed_samples=warmup, batch_samples=rows) == peak
    if schedule.decay == "wsd":
        falling = schedule.decay_samples
        assert schedule(consumed_samples=total - falling, batch_samples=rows) == peak
        begun = schedule(consumed_samples=total - falling + 1, batch_samples=rows)
        assert floor <= begun <= peak
        assert begun < peak or (peak - floor) / falling <= 2 * math.ulp(peak)
    assert schedule(consumed_samples=total, batch_samples=rows) == (peak if schedule.decay == "constant" else floor)


@given(size=st.integers(1, 10_000), consumed=st.integers(0, 1599), rows=st.integers(1, 64))
def test_without_a_scaling_and_at_the_final_size_nothing_changes(size, consumed, rows):
    keys = {"peak": 3e-4, "floor": 1e-5, "decay": "cosine", "warmup_samples": 160, "total_samples": 1600}
    plain = LearningRate(**keys)(consumed_samples=consumed, batch_samples=rows)
    for scaling in ("none", "sqrt", "linear"):
        schedule = LearningRate(**keys, scaling=scaling, final_size=size)
        assert schedule(consumed_samples=consumed, batch_samples=rows, size=size) == plain
    assert LearningRate(**keys)(consumed_samples=consumed, batch_samples=rows, size=size) == plain


@pytest.mark.parametrize(("scaling", "factors"), [("sqrt", (0.5, 2**0.5, 1.0)), ("linear", (0.25, 2.0, 1.0))])
def test_a_scaling_takes_the_schedule_s_size_not_the_rows_that_an_epoch_leaves(scaling, factors):
    schedule = LearningRate(peak=1.0, floor=0.5, decay="linear", total_samples=64, scaling=scaling, final_size=16)
    for size, factor in zip((4, 32, 16), factors, strict=True):
        assert schedule(consumed_samples=32, batch_samples=3, size=size) == 0.75 * factor


@pytest.mark.parametrize(
    ("warmup", "decay", "total"),
    [(0, 0, 1), (10, 0, 10), (0, 10, 10), (4, 6, 10), (2, 2, 3)],  # the last: both halves of 3, rounded up
)
def test_a_warm_up_and_a_decay_may_fill_the_run(warmup, decay, total):
    require_room(warmup_samples=warmup, decay_samples=decay, total_samples=total)


@pytest.mark.parametrize(
    ("warmup", "decay", "asked"),
    [
        (1200, 400, "a warm-up of 1,200 samples and a decay of 400 samples"),
        (1502, 0, "a warm-up of 1,502 samples"),
        (1501, 0, "a warm-up of 1,501 samples"),
        (0, 1501, "a decay of 1,501 samples"),
    ],
)
def test_those_that_do_not_fit_are_refused(warmup, decay, asked):
    with pytest.raises(ConfigError) as caught:
        require_room(warmup_samples=warmup, decay_samples=decay, total_samples=1500)
    assert str(caught.value) == (
        f"trainer.learning_rate_scheduler: {asked} in a run of 1,500\n"
        "  expected: at most the run in all\n"
        "  fix: shorten warmup_length or decay_length, or train for longer"
    )
