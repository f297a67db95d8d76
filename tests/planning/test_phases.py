"""Phases of a run: what they take, by hand and against runs that are walked, and faults found before the run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.batching.cost_examples import linear_costs
from tests.messages import says
from tests.planning.planned import COSTS, budget, task, way_costs

from brim.batching import Adaptation, BatchSchedule
from brim.planning import phases as module
from brim.planning.candidates import Task, candidate
from brim.planning.phases import faults, last_step, phase_costs, steps_between
from brim.train import RunLength


def costs_of(schedule, total_samples, *, work=None, cap_bytes=9300, num_rows=8, **changes):
    """The phases of a run by hand, of 8 rows, its seconds, and the candidate that is run."""
    work = work or task()
    chosen = candidate(way_costs(), work, budget(cap_bytes))
    length = RunLength(num_rows=num_rows, schedule=schedule, total_samples=total_samples, **changes)
    return *phase_costs(length, work, chosen, COSTS), chosen


def test_each_phase_is_cut_with_its_own_size():
    """Pairs: 3.0, 1.14, 2.6 and 2.2 s, the widest 2 × 100 tokens; fours: see the candidates."""
    names = ("number", "size", "first_sample", "num_samples", "num_tokens", "num_steps", "micro_batches_per_step")
    (two, four), seconds, _ = costs_of(BatchSchedule.of([(0, 2), (8, 4)]), 16)
    assert [getattr(two, name) for name in names] == [1, 2, 0, 8, 360, 4, 1.0]
    assert [getattr(four, name) for name in names] == [2, 4, 8, 8, 360, 2, 1.5]
    assert (two.total_bytes, four.total_bytes) == (3000 + 500, 4200 + 500)
    assert two.seconds_per_step == pytest.approx(8.94 / 4 + 0.5)
    assert four.seconds_per_step == pytest.approx(8.34 / 2 + 0.5)
    assert seconds == pytest.approx((8.94 + 8.34 + 6 * 0.5,) * 2)
    tight, *_ = costs_of(BatchSchedule.of([(0, 2), (8, 4)]), 16, cap_bytes=4199)  # a cap that binds: the same peaks
    assert [phase.total_bytes for phase in tight] == [3000 + 500] * 2


def test_a_phase_is_cut_from_its_own_first_row_and_takes_no_less_than_the_longest_row_alone(monkeypatch):
    for most_rows, steps, total, seconds in (
        (4, [(0, 4), (4, 2)], 8, (2.6 + 2.2) / 2),
        (4, [(0, 3), (6, 2)], 12, (2.2 + 3.0) / 2),
        (1, [(0, 2), (2, 1)], 6, 1.07),  # a row of 7 tokens
    ):
        monkeypatch.setattr(module, "_MOST_ROWS", most_rows)
        (_, phase), _, chosen = costs_of(BatchSchedule.of(steps), total)
        assert phase.seconds_per_step == pytest.approx(seconds + 0.5)
    assert phase.total_bytes == chosen.single_row_bytes == 2500


def test_one_size_for_the_whole_run_costs_what_an_epoch_of_the_plan_says():
    (phase,), seconds, chosen = costs_of(BatchSchedule.constant(4), 24)
    assert seconds == pytest.approx((3 * chosen.seconds_per_epoch,) * 2)
    assert (phase.num_steps, phase.num_samples, phase.num_tokens) == (6, 24, 3 * 360)
    assert phase.seconds_per_step == pytest.approx(chosen.seconds_per_epoch / 2)
    assert (phase.total_bytes, phase.micro_batches_per_step) == (chosen.total_bytes, chosen.micro_batches_per_step)
    # One that is larger than the data is all of it.
    (phase,), _, chosen = costs_of(BatchSchedule.constant(100), 16, work=task(effective_batch_size=8))
    assert (phase.num_steps, phase.num_samples) == (2, 16)
    assert phase.seconds_per_step == pytest.approx(chosen.seconds_per_epoch)


def test_a_fixed_number_of_rows_is_cut_so_in_each_phase_and_an_update_may_take_nothing():
    phases, *_ = costs_of(BatchSchedule.of([(0, 1), (4, 3), (7, 4)]), 16, work=task(fixed_rows=2))
    assert [phase.micro_batches_per_step for phase in phases] == [1, 2, 2]
    known = replace(way_costs(), update_s=0.0, costs=linear_costs(seconds=0.0))
    length = RunLength(num_rows=8, schedule=BatchSchedule.of([(0, 1), (8, 2)]), total_samples=16)
    phases, _ = phase_costs(length, task(), candidate(known, task(), budget(9300)), known.costs)
    assert phases[0].seconds_per_step == pytest.approx(0.01 * 360 / 8)


def many_rows(effective_batch_size):
    lengths = np.random.default_rng(3).integers(5, 100, 3000)
    return Task(lengths=lengths, effective_batch_size=effective_batch_size, fixed_rows=None, largest=False)


def test_of_many_phases_some_are_looked_at_and_the_others_cost_about_what_is_between(monkeypatch):
    schedule, work = BatchSchedule.linear(initial=1, final=64, length_samples=2000), many_rows(64)
    given = {"work": work, "cap_bytes": 30000, "num_rows": 3000}
    some, some_s, _ = costs_of(schedule, 6000, **given)
    monkeypatch.setattr(module, "_MOST_PHASES", 1000)
    every, every_s, _ = costs_of(schedule, 6000, **given)
    assert len(some) == 16
    assert (some[0].number, some[-1].number) == (1, len(every))
    assert all(every[phase.number - 1] == phase for phase in some)
    assert some_s[0] == pytest.approx(every_s[0], rel=0.02)
    assert sum(phase.num_samples for phase in every) == 6000
    assert sum(phase.num_tokens for phase in every) == 2 * int(work.lengths.sum())
    # A schedule over 1e12 samples costs what a short one costs.
    given["work"] = work = many_rows(512)
    schedule = BatchSchedule.doubling(initial=8, final=512, length_samples=10**11)
    found, seconds, _ = costs_of(schedule, 10**12, **given)
    assert [phase.size for phase in found] == [8, 16, 32, 64, 128, 256, 512]
    assert sum(phase.num_samples for phase in found) == 10**12
    assert seconds[0] > 10**12 * 0.01 * work.lengths.mean()  # that much for the tokens alone


def test_where_sizes_are_measured_each_is_shown_and_the_run_takes_something_between():
    adaptation = Adaptation(size=2, smallest=1, largest=4)
    found, seconds, _ = costs_of(BatchSchedule.constant(2), 80, adaptation=adaptation)
    assert [phase.size for phase in found] == [1, 2, 4]
    assert [(phase.number, phase.num_steps, phase.first_sample) for phase in found] == [(None, None, None)] * 3
    assert found[0].seconds_per_step == pytest.approx((8 + 3.6) / 8 + 0.5)
    alone, fours = 10 * (8 + 3.6) + 80 * 0.5, 10 * 8.34 + 20 * 0.5
    assert seconds == pytest.approx((fours, alone))
    length = RunLength(num_rows=8, schedule=BatchSchedule.constant(2), total_samples=80, adaptation=adaptation)
    assert steps_between(length) == (20, 80)


def schedule_from(sizes, gaps):
    firsts = [0, *(sum(gaps[: number + 1]) for number in range(len(sizes) - 1))]
    return BatchSchedule.of(zip(firsts, sizes, strict=True))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True),
    gaps=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    num_rows=st.integers(1, 40),
    total_samples=st.integers(1, 300),
)
def test_the_last_step_of_a_phase_is_the_one_that_a_walk_comes_to(sizes, gaps, num_rows, total_samples):
    schedule = schedule_from(sizes, gaps)
    walked, consumed = {}, 0
    while consumed < total_samples:
        phase = schedule.index_at(consumed)
        rows = min(schedule.phases[phase].size, num_rows - consumed % num_rows, total_samples - consumed)
        walked[phase] = (consumed, rows)
        consumed += rows
    for each in schedule.stretches(num_rows=num_rows, total_samples=total_samples):
        last = last_step(each.size, each.first_sample, each.num_samples, num_rows=num_rows)
        assert last == walked[schedule.index_at(each.first_sample)]


LINEAR = BatchSchedule.linear(initial=1, final=4096, length_samples=10**12)
DOUBLING = BatchSchedule.doubling(initial=8, final=64, length_samples=1000)
LARGE = BatchSchedule.of([(0, 8), (100, 101), (150, 4000), (200, 100)])
LATE = BatchSchedule.of([(0, 8), (100, 16), (200, 32), (250, 64)])


def test_a_phase_larger_than_an_epoch_or_after_the_runs_end_is_named():
    for schedule, num_rows, total_samples, expected in [
        (LARGE, 100, 300, ["phase 3 of 4 asks for 4,000 rows … there are 100 … fix: lower it to 100 or less"]),
        (BatchSchedule.of([(0, 8), (100, 100)]), 100, 300, []),
        (BatchSchedule.constant(1000), 10, 20, []),  # one size for the whole run may be larger
        (LINEAR, 4000, 2 * 10**12, ["phase 4,096 of 4,096 asks for 4,096 rows … there are 4,000 to train on"]),
        (LATE, 100, 251, []),
        (LATE, 100, 250, ["phase 4 of 4, 64 rows a step after 250 samples, is never … the run ends after 250\n"]),
        (LATE, 100, 150, ["phase 3 of 4, 32 rows a step after 200 … ends after 150, nor is the one after it\n"]),
        (LATE, 100, 99, ["phase 2 of 4, 16 rows … nor are the 2 after it\n"]),
        (BatchSchedule.of([(0, 8), (100, 4000)]), 100, 100, ["phase 2 of 2 asks", "phase 2 of 2, 4,000 rows"]),
        (DOUBLING, 1000, 1000, ["phase 4 of 4, 64 rows"]),  # it never comes to its final batch
        (DOUBLING, 1000, 1001, []),
    ]:
        found = faults(schedule, num_rows=num_rows, total_samples=total_samples, where="trainer.key")
        assert len(found) == len(expected), (schedule, total_samples)
        for problem, words in zip(found, expected, strict=True):
            assert says(str(problem), f"trainer.key: {words}")


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    gaps=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    num_rows=st.integers(12, 40),
    total_samples=st.integers(1, 400),
)
def test_what_has_no_fault_is_walked_to_its_last_phase_or_overtaken_within_a_step(sizes, gaps, num_rows, total_samples):
    schedule = schedule_from(sizes, gaps)
    if faults(schedule, num_rows=num_rows, total_samples=total_samples):
        assert schedule.phases[-1].first_sample >= total_samples
        return
    walked = list(schedule.stretches(num_rows=num_rows, total_samples=total_samples))
    begun = {schedule.index_at(each.first_sample) for each in walked}
    for number, phase in enumerate(schedule.phases):
        if number not in begun:
            before = [each for each in walked if each.first_sample < phase.first_sample][-1]
            assert before.end_sample - phase.first_sample < before.size
