"""The figures of schedules: what is planned, and loops that take turns."""

from __future__ import annotations

import threading

from benchmarks.schedules import KINDS, NUM_TOKENS, Turns, planned


def test_all_kinds_are_planned_over_as_many_tokens_and_end_in_steps_as_in_epochs():
    plans = planned(num_rows=200, repeats=1)
    assert {plan.schedule for plan in plans} == set(KINDS)
    by_epochs = {plan.schedule: plan for plan in plans if plan.counted_in == "epochs"}
    by_steps = {plan.schedule: plan for plan in plans if plan.counted_in == "train_steps"}
    assert {name: plan.total_steps for name, plan in by_epochs.items()} == {
        name: plan.total_steps for name, plan in by_steps.items()
    }
    assert by_epochs["constant"].num_phases == 1
    assert by_epochs["table of 10 token steps"].num_phases == 10
    tokens_of_a_step = NUM_TOKENS / by_epochs["constant"].total_steps
    assert 200 * 100 < tokens_of_a_step < 200 * 400, "an epoch of 200 rows is a step"


def test_members_take_turns_and_every_other_round_goes_the_other_way():
    taken: list[str] = []
    turns = Turns("abc")

    def work(name: str, num_steps: int) -> None:
        for _ in range(num_steps):
            turns.wait(name)
            taken.append(name)
            turns.pass_on()
        turns.wait(name)
        turns.pass_on(leaves=True)

    threads = [threading.Thread(target=work, args=(name, steps)) for name, steps in (("a", 2), ("b", 4), ("c", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert "".join(taken) == "abc" + "cba" + "bc" + "b"
