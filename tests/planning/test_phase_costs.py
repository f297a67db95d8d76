"""What the phases of a run take, by hand for costs that are straight lines, and against runs that are walked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.batching.cost_examples import linear_costs
from tests.planning.test_candidates import COSTS, budget, task, way_costs

from brim.batching import Adaptation, constant, doubling, linear, schedule_of, stretches
from brim.planning import PhasePlan, phases as module
from brim.planning.candidates import candidate
from brim.planning.phases import last_step, phase_costs, steps_between
from brim.planning.plan import Task
from brim.train import RunLength


def length(schedule, *, total_samples, num_rows=8, **changes):
    return RunLength(num_rows=num_rows, schedule=schedule, total_samples=total_samples, **changes)


def test_each_phase_is_cut_with_its_own_size():
    """Pairs: 3.0, 1.14, 2.6 and 2.2 s, the widest 2 × 100 tokens; fours: see test_candidates."""
    chosen = candidate(way_costs(), task(), budget(9300))
    found = phase_costs(length(schedule_of([(0, 2), (8, 4)]), total_samples=16), task(), chosen, COSTS)
    two, four = found.phases
    assert (two.number, two.size, two.first_sample, two.num_samples, two.num_tokens, two.num_steps) == (
        *(1, 2, 0, 8),
        *(360, 4),
    )
    assert (four.number, four.size, four.first_sample, four.num_samples, four.num_tokens, four.num_steps) == (
        *(2, 4, 8, 8),
        *(360, 2),
    )
    assert (two.micro_batches_per_step, four.micro_batches_per_step) == (1.0, 1.5)
    assert (two.total_bytes, four.total_bytes) == (3000 + 500, 4200 + 500)
    assert two.seconds_per_step == pytest.approx(8.94 / 4 + 0.5)
    assert four.seconds_per_step == pytest.approx(8.34 / 2 + 0.5)
    assert found.seconds == pytest.approx((8.94 + 8.34 + 6 * 0.5,) * 2)


def test_under_a_cap_that_binds_the_peaks_of_the_phases_are_the_same():
    chosen = candidate(way_costs(), task(), budget(4199))
    found = phase_costs(length(schedule_of([(0, 2), (8, 4)]), total_samples=16), task(), chosen, COSTS)
    assert [phase.total_bytes for phase in found.phases] == [3000 + 500] * 2


def test_no_phase_is_told_to_take_less_than_the_longest_row_alone(monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 1)
    chosen = candidate(way_costs(), task(), budget(9300))
    found = phase_costs(length(schedule_of([(0, 2), (2, 1)]), total_samples=6), task(), chosen, COSTS)
    assert found.phases[1].seconds_per_step == pytest.approx(1.07 + 0.5)  # a row of 7 tokens
    assert found.phases[1].total_bytes == chosen.single_row_bytes == 2500


def test_a_phase_is_cut_from_the_row_on_with_which_it_begins(monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 4)
    chosen = candidate(way_costs(), task(), budget(9300))
    found = phase_costs(length(schedule_of([(0, 4), (4, 2)]), total_samples=8), task(), chosen, COSTS)
    assert found.phases[1].seconds_per_step == pytest.approx((2.6 + 2.2) / 2 + 0.5)
    wrapped = phase_costs(length(schedule_of([(0, 3), (6, 2)]), total_samples=12), task(), chosen, COSTS)
    assert wrapped.phases[1].seconds_per_step == pytest.approx((2.2 + 3.0) / 2 + 0.5)


def test_one_size_for_the_whole_run_costs_what_an_epoch_of_the_plan_says():
    chosen = candidate(way_costs(), task(), budget(9300))
    found = phase_costs(length(constant(4), total_samples=24), task(), chosen, COSTS)
    (phase,) = found.phases
    assert found.seconds == pytest.approx((3 * chosen.seconds_per_epoch,) * 2)
    assert (phase.num_steps, phase.num_samples, phase.num_tokens) == (6, 24, 3 * 360)
    assert phase.seconds_per_step == pytest.approx(chosen.seconds_per_epoch / 2)
    assert (phase.total_bytes, phase.micro_batches_per_step) == (chosen.total_bytes, chosen.micro_batches_per_step)


def test_one_size_that_is_larger_than_the_data_is_all_of_it():
    chosen = candidate(way_costs(), task(effective_batch_size=8), budget(9300))
    (phase,) = phase_costs(length(constant(100), total_samples=16), task(effective_batch_size=8), chosen, COSTS).phases
    assert (phase.num_steps, phase.num_samples) == (2, 16)
    assert phase.seconds_per_step == pytest.approx(chosen.seconds_per_epoch)


def test_a_fixed_number_of_rows_is_cut_so_in_each_phase():
    work = task(fixed_rows=2)
    chosen = candidate(way_costs(), work, budget(9300))
    found = phase_costs(length(schedule_of([(0, 1), (4, 3), (7, 4)]), total_samples=16), work, chosen, COSTS)
    assert [phase.micro_batches_per_step for phase in found.phases] == [1, 2, 2]


def many_rows(num_rows=3000):
    return np.random.default_rng(3).integers(5, 100, num_rows)


def test_of_many_phases_some_are_looked_at_and_the_others_cost_about_what_is_between(monkeypatch):
    schedule = linear(initial=1, final=64, length_samples=2000)
    work = Task(lengths=many_rows(), effective_batch_size=64, fixed_rows=None, largest=False)
    chosen = candidate(way_costs(), work, budget(30000))
    run = length(schedule, total_samples=6000, num_rows=3000)
    some = phase_costs(run, work, chosen, COSTS)
    monkeypatch.setattr(module, "_MOST_PHASES", 1000)
    every = phase_costs(run, work, chosen, COSTS)
    assert len(some.phases) == 16
    assert (some.phases[0].number, some.phases[-1].number) == (1, len(every.phases))
    assert {phase.number for phase in some.phases} <= {phase.number for phase in every.phases}
    assert all(every.phases[phase.number - 1] == phase for phase in some.phases)
    assert some.seconds[0] == pytest.approx(every.seconds[0], rel=0.02)
    assert sum(phase.num_samples for phase in every.phases) == 6000
    assert sum(phase.num_tokens for phase in every.phases) == 2 * int(work.lengths.sum())


def test_a_schedule_over_1e12_samples_costs_what_a_short_one_costs():
    work = Task(lengths=many_rows(), effective_batch_size=512, fixed_rows=None, largest=False)
    chosen = candidate(way_costs(), work, budget(30000))
    run = length(
        doubling(initial=8, final=512, length_samples=10**11), total_samples=10**12, num_rows=len(work.lengths)
    )
    found = phase_costs(run, work, chosen, COSTS)
    assert [phase.size for phase in found.phases] == [8, 16, 32, 64, 128, 256, 512]
    assert sum(phase.num_samples for phase in found.phases) == 10**12
    assert found.seconds[0] > 10**12 * 0.01 * work.lengths.mean()  # that much for the tokens alone


def test_where_sizes_are_measured_each_is_shown_and_the_run_takes_something_between():
    run = length(constant(2), total_samples=80, adaptation=Adaptation(size=2, smallest=1, largest=4))
    chosen = candidate(way_costs(), task(), budget(9300))
    found = phase_costs(run, task(), chosen, COSTS)
    assert [phase.size for phase in found.phases] == [1, 2, 4]
    assert [(phase.number, phase.num_steps, phase.first_sample) for phase in found.phases] == [(None, None, None)] * 3
    assert found.phases[0].seconds_per_step == pytest.approx((8 + 3.6) / 8 + 0.5)
    alone, fours = 10 * (8 + 3.6) + 80 * 0.5, 10 * 8.34 + 20 * 0.5
    assert found.seconds == pytest.approx((fours, alone))
    assert steps_between(run) == (20, 80)


def test_an_update_that_takes_nothing_is_no_matter():
    known = replace(way_costs(), update_s=0.0, costs=linear_costs(seconds=0.0))
    chosen = candidate(known, task(), budget(9300))
    found = phase_costs(length(schedule_of([(0, 1), (8, 2)]), total_samples=8 + 8), task(), chosen, known.costs)
    assert found.phases[0].seconds_per_step == pytest.approx(0.01 * 360 / 8)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True),
    gaps=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    num_rows=st.integers(1, 40),
    total_samples=st.integers(1, 300),
)
def test_the_last_step_of_a_phase_is_the_one_that_a_walk_comes_to(sizes, gaps, num_rows, total_samples):
    firsts = [0, *(sum(gaps[: number + 1]) for number in range(len(sizes) - 1))]
    schedule = schedule_of(zip(firsts, sizes, strict=True))
    walked, consumed = {}, 0
    while consumed < total_samples:
        phase = schedule.index_at(consumed)
        rows = min(schedule.phases[phase].size, num_rows - consumed % num_rows, total_samples - consumed)
        walked[phase] = (consumed, rows)
        consumed += rows
    for each in stretches(schedule, num_rows=num_rows, total_samples=total_samples):
        plan = PhasePlan(
            size=each.size,
            micro_batches_per_step=1.0,
            total_bytes=0,
            seconds_per_step=0.0,
            first_sample=each.first_sample,
            num_samples=each.num_samples,
        )
        assert last_step(plan, num_rows=num_rows) == walked[schedule.index_at(each.first_sample)]
