"""From which step a resumption is tried, and where it is disturbed."""

import pytest
from hypothesis import given, strategies as st

from brim.errors import InputError
from brim.workflows.verify_resume.run import Disturbance, Reach, Start, choose_disturbance, choose_start

# 16 steps of 8 rows.
RUN = Reach(total_steps=16, total_samples=128, largest_size=8, logged_steps=16)
CHECKPOINTS = {10: 80, 15: 120, 16: 128}


@pytest.mark.parametrize(
    ("steps", "from_step", "start"),
    [
        (4, None, Start(checkpoint=10, step=10, num_steps=4)),
        (6, None, Start(checkpoint=10, step=10, num_steps=6)),
        (1, None, Start(checkpoint=15, step=15, num_steps=1)),
        (7, None, Start(checkpoint=0, step=1, num_steps=7)),
        (99, None, Start(checkpoint=0, step=1, num_steps=15)),
        (4, 12, Start(checkpoint=10, step=12, num_steps=4)),
        (4, 14, Start(checkpoint=10, step=14, num_steps=2)),
        (4, 15, Start(checkpoint=15, step=15, num_steps=1)),
        (4, 9, Start(checkpoint=0, step=9, num_steps=4)),
        (4, 0, Start(checkpoint=0, step=1, num_steps=4)),
    ],
)
def test_the_newest_checkpoint_that_leaves_enough_steps_is_taken(steps, from_step, start):
    assert choose_start(CHECKPOINTS, RUN, steps=steps, from_step=from_step) == start
    assert start.num_leading == start.step - start.checkpoint


@pytest.mark.parametrize("from_step", [16, 17])
def test_a_step_after_which_nothing_comes_is_refused(from_step):
    with pytest.raises(InputError, match=f"no step is left after step {from_step}: the run has 16"):
        choose_start(CHECKPOINTS, RUN, steps=4, from_step=from_step)


def test_a_run_of_one_step_cannot_be_interrupted():
    reach = Reach(total_steps=1, total_samples=8, largest_size=8, logged_steps=1)
    with pytest.raises(InputError, match=r"no step is left after step 1: the run has 1\n.*a run of at least two steps"):
        choose_start({1: 8}, reach, steps=4, from_step=None)


@pytest.mark.parametrize(
    ("consumed", "logged", "left"),
    [(80, 0, 3), (81, 0, 3), (128, 0, 0), (80, 17, 7), (80, 12, 3)],  # 48 samples are three steps of 16 at least
)
def test_where_sizes_are_measured_a_run_has_as_many_steps_left_as_it_has_at_least(consumed, logged, left):
    reach = Reach(total_steps=None, total_samples=128, largest_size=16, logged_steps=logged)
    assert reach.steps_left(10, consumed) == left


@pytest.mark.parametrize(
    ("sizes", "cuts", "disturbance"),
    [
        ([8], [2], (None, 11)),
        ([8, 8], [2, 2], (11, 12)),
        ([8, 8, 8], [2, 2, 2], (11, 12)),
        ([8, 8, 8, 8], [2, 2, 2, 2], (11, 13)),
        ([8] * 8, [2] * 8, (12, 15)),
        ([8, 8, 8, 16], [2, 2, 2, 4], (13, 14)),  # at the switch
        ([8, 16, 16, 16], [2, 4, 4, 4], (11, 12)),
        ([8, 4, 8, 8], [2, 1, 2, 2], (11, 13)),  # where there is a middle
        ([8, 8, 8, 8], [2, 1, 1, 1], (11, 13)),  # the only such step lies before the stop
        ([8, 8, 8, 8], [1, 2, 1, 1], (11, 12)),
    ],
)
def test_it_is_disturbed_at_a_switch_and_amid_an_accumulation(sizes, cuts, disturbance):
    stop_after, kill_in = disturbance
    assert choose_disturbance(10, sizes, cuts) == Disturbance(stop_after=stop_after, kill_in=kill_in)


@given(st.lists(st.tuples(st.sampled_from([4, 8]), st.integers(1, 3)), min_size=1, max_size=12))
def test_it_is_stopped_between_two_steps_and_killed_after_that(steps):
    sizes, cuts = zip(*steps, strict=True)
    disturbance = choose_disturbance(0, sizes, cuts)
    stopped = disturbance.stop_after or 0
    assert (disturbance.stop_after is None) == (len(steps) == 1)
    assert 0 <= stopped < disturbance.kill_in <= len(steps)
    if any(each > 1 for each in cuts[stopped:]):
        assert cuts[disturbance.kill_in - 1] > 1
