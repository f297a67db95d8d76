"""The rule by which the limit falls and rises."""

import json
import math

import hypothesis.strategies as st
from hypothesis import given

from brim.batching.microbatch import FIRST_WAIT_STEPS, Cap


def clean(cap, steps):
    for _ in range(steps):
        cap = cap.after_clean_step()
    return cap


def halved(cap):
    return cap.lowered(cap.now // 2, failed=cap.now)


def test_nothing_happens_while_all_goes_well():
    assert clean(Cap(now=64), 1000) == Cap(now=64)


def test_lowered_twice_and_raised_twice_up_to_the_launch():
    low = halved(halved(Cap(now=64)))
    assert low == Cap(now=16, before=(64, 32))
    assert clean(low, FIRST_WAIT_STEPS - 1).now == 16
    raised = clean(low, FIRST_WAIT_STEPS)
    assert raised == Cap(now=32, before=(64,), raised_from=16)
    at_launch = clean(raised, FIRST_WAIT_STEPS)
    assert at_launch == Cap(now=64, raised_from=32)
    assert clean(at_launch, 1000) == at_launch


def test_back_to_what_went_well_and_the_wait_doubles():
    raised = clean(halved(Cap(now=64)), 50)
    failed = raised.lowered(25, failed=36)
    assert failed == Cap(now=32, before=(64,), wait_steps=100)
    assert clean(failed, 99).now == 32
    assert clean(failed, 100).now == 64


def test_lower_still_where_memory_ran_out_at_what_had_gone_well():
    raised = clean(halved(Cap(now=64)), 50)
    assert raised.lowered(20, failed=30) == Cap(now=20, before=(64,), wait_steps=100)


def test_an_out_of_memory_begins_the_wait_anew():
    cap = clean(halved(Cap(now=64)), 49)
    assert clean(halved(cap), 49).now == 16


def outs_of_memory(limit, launch, num_steps, shape):
    """Each step runs one micro-batch of `shape(step, cap)`, and what is above the limit runs out of memory."""
    cap, failures, steps_at_limit = Cap(now=launch), 0, 0
    for step in range(num_steps):
        while (size := shape(step, cap.now)) > limit:
            failures += 1
            cap = cap.lowered(int(0.7 * min(cap.now, size)), failed=size)
        cap = cap.after_clean_step()
        assert cap.now <= launch
        steps_at_limit += cap.now <= limit
    return failures


@given(
    limit=st.integers(50_000, 99_999),
    num_steps=st.sampled_from([500, 2000, 5000]),
    shares=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=20),
)
def test_a_model_wrong_by_half_runs_out_at_most_five_times_in_500_steps(limit, num_steps, shares):
    # The shapes of a step reach a share of the cap that changes from step to step.
    failures = outs_of_memory(limit, 100_000, num_steps, lambda step, cap: int(cap * shares[step % len(shares)]))
    assert failures <= 5 + math.log2(num_steps / 500)


def test_always_at_the_cap_a_model_wrong_by_half_runs_out_five_times_in_500_steps():
    assert outs_of_memory(50_000, 100_000, 500, lambda step, cap: cap) == 5
    assert outs_of_memory(50_000, 100_000, 10_000, lambda step, cap: cap) == 9


@given(fails=st.lists(st.booleans(), max_size=400), wait_steps=st.integers(1, 4))
def test_whatever_happens_the_limit_stays_between_one_and_the_launch(fails, wait_steps):
    cap = Cap(now=1000, wait_steps=wait_steps)
    for failed in fails:
        before = cap
        if failed and cap.now > 1:
            cap = cap.lowered(int(0.7 * cap.now), failed=cap.now)
            assert cap.now < before.now
        else:
            cap = cap.after_clean_step()
            assert cap.now >= before.now
        assert 0 <= cap.now <= 1000
        assert (cap.before[0] if cap.before else cap.now) == 1000
        assert Cap.from_dict(json.loads(json.dumps(cap.as_dict()))) == cap
