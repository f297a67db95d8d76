"""A phase that cannot be gone through is found before the run, whatever asked for it."""

from __future__ import annotations

from hypothesis import given, strategies as st

from brim.batching import constant, doubling, linear, schedule_of, stretches
from brim.planning.plan import faults


def told(steps, *, num_rows, total_samples):
    return [problem.what for problem in faults(schedule_of(steps), num_rows=num_rows, total_samples=total_samples)]


def test_one_size_for_the_whole_run_may_be_larger_than_the_data():
    assert faults(constant(1000), num_rows=10, total_samples=20) == []


def test_a_phase_larger_than_an_epoch_is_named_by_its_number():
    steps = [(0, 8), (100, 101), (150, 4000), (200, 100)]
    (problem,) = faults(schedule_of(steps), num_rows=100, total_samples=300, where="trainer.batch_schedule")
    assert problem.what == (
        "phase 3 of 4 asks for 4,000 rows a step, and there are 100 to train on: a step ends with its epoch, so none "
        "would be that large"
    )
    assert problem.where == "trainer.batch_schedule"
    assert problem.fix == "lower it to 100 or less, or train on more rows"
    assert told([(0, 8), (100, 100)], num_rows=100, total_samples=300) == []


def test_phases_that_begin_when_the_run_is_over_are_named():
    steps = [(0, 8), (100, 16), (200, 32), (250, 64)]
    assert told(steps, num_rows=100, total_samples=251) == []
    assert told(steps, num_rows=100, total_samples=250) == [
        "phase 4 of 4, 64 rows a step after 250 samples, is never reached, since the run ends after 250"
    ]
    assert told(steps, num_rows=100, total_samples=150) == [
        "phase 3 of 4, 32 rows a step after 200 samples, is never reached, since the run ends after 150, nor is the one "
        "after it"
    ]
    assert told(steps, num_rows=100, total_samples=99)[0].endswith("nor are the 2 after it")


def test_everything_that_is_wrong_is_told_at_once():
    assert len(told([(0, 8), (100, 4000)], num_rows=100, total_samples=100)) == 2


def test_a_ramp_as_long_as_the_run_never_comes_to_its_final_batch():
    ramp = doubling(initial=8, final=64, length_samples=1000)
    assert len(faults(ramp, num_rows=1000, total_samples=1000)) == 1
    assert faults(ramp, num_rows=1000, total_samples=1001) == []


def test_a_ramp_of_thousands_of_phases_is_one_problem():
    ramp = linear(initial=1, final=4096, length_samples=10**12)
    (problem,) = faults(ramp, num_rows=4000, total_samples=2 * 10**12)
    assert problem.what.startswith("phase 4,096 of 4,096 asks for 4,096 rows a step, and there are 4,000 to train on")


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    gaps=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    num_rows=st.integers(12, 40),
    total_samples=st.integers(1, 400),
)
def test_what_has_no_fault_is_walked_to_its_last_phase_or_overtaken_within_a_step(sizes, gaps, num_rows, total_samples):
    firsts = [0, *(sum(gaps[: number + 1]) for number in range(len(sizes) - 1))]
    schedule = schedule_of(zip(firsts, sizes, strict=True))
    if faults(schedule, num_rows=num_rows, total_samples=total_samples):
        assert schedule.phases[-1].first_sample >= total_samples
        return
    walked = list(stretches(schedule, num_rows=num_rows, total_samples=total_samples))
    begun = {schedule.index_at(each.first_sample) for each in walked}
    for number, phase in enumerate(schedule.phases):
        if number not in begun:
            before = [each for each in walked if each.first_sample < phase.first_sample][-1]
            assert before.end_sample - phase.first_sample < before.size
