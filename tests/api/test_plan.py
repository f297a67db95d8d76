"""brim.plan: what a run would decide, with nothing loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from tests.api.planned_run import settings, uneven

import brim
from brim.memory import Budget
from brim.memory.variants import Help
from brim.planning import PlanRequest, epoch, too_long
from brim.units import format_bytes

SEED = 3


def test_the_plan_tells_of_rows_steps_and_the_way_that_is_taken(tiny_base):
    said = []
    plan = brim.plan(settings(tiny_base, random_seed=SEED), uneven(), device="cpu", say=said.append)
    assert isinstance(plan, brim.TrainingPlan)
    assert (plan.effective_batch_size, plan.total_steps, plan.lengths.num_rows) == (8, 6, 24)
    assert plan.budget.device == "cpu"
    chosen = plan.chosen
    assert chosen.way.gradient_checkpointing is False
    assert chosen.time_source == "estimated"
    assert plan.seconds == pytest.approx(2 * chosen.seconds_per_epoch)
    assert chosen.total_bytes <= plan.budget.limit_bytes - plan.budget.margin_bytes
    assert plan.too_long == ()
    assert "adapter.alpha: 16 (twice adapter.r)" in said


def test_the_rows_are_cut_in_the_order_in_which_the_run_takes_them(tiny_base):
    plan = brim.plan(settings(tiny_base, random_seed=SEED), uneven(), device="cpu")
    request = _request(tiny_base, random_seed=SEED)
    from brim.data.tokens import rows_of_step

    batches = [rows_of_step(num_rows=24, seed=SEED, consumed_samples=8 * n, size=8)[1] for n in range(3)]
    np.testing.assert_array_equal(request.task.lengths, request.rows.lengths[np.concatenate(batches)])
    totals = epoch(request.task, plan.costs, cap_bytes=plan.chosen.cap_bytes)
    assert plan.chosen.micro_batches_per_step == totals.num_micro_batches / 3


def test_a_plan_is_made_once_for_the_same_work(tiny_base):
    config = settings(tiny_base, random_seed=SEED + 1)
    first = brim.plan(config, uneven(), device="t4")
    again = brim.plan(config, uneven(), device="t4")
    assert (first.from_cache, again.from_cache) == (False, True)
    assert replace(again, from_cache=False) == first
    assert not brim.plan(config, uneven(), device="t4", replan=True).from_cache
    assert not brim.plan(config, uneven()[::-1].reset_index(drop=True), device="t4").from_cache


def test_every_way_is_shown_and_the_one_is_taken_that_a_run_would_take(tiny_base):
    config = settings(tiny_base, trainer={"enable_gradient_checkpointing": "auto"})
    plan = brim.plan(config, uneven(), device="cpu")
    ways = [(each.way.gradient_checkpointing, each.way.chunked_loss) for each in plan.candidates]
    assert ways == [(False, True), (False, False), (True, True), (True, False)]
    assert plan.chosen == plan.candidates[0]  # it fits with room to spare; the others are for people to see
    assert plan.reason == "it fits, and more memory would not make updates of this size faster"


def test_rows_that_fit_in_no_way_are_named_by_number_and_what_would_fit(tiny_base):
    config = settings(tiny_base, random_seed=SEED, memory={"margin": "0 MiB"})
    roomy = brim.plan(config, uneven(), memory_bytes=2**30)
    alone = roomy.chosen.single_row_bytes
    plan = brim.plan(config, uneven(), memory_bytes=alone - 1)
    assert plan.chosen is None
    assert plan.costs is None
    request = _request(tiny_base, random_seed=SEED)
    longest = int(request.rows.lengths.max())
    keys = [int(key) for key, length in zip(request.rows.keys, request.rows.lengths, strict=True) if length == longest]
    assert [(row.key, row.num_tokens) for row in plan.too_long] == [(key, longest) for key in keys]
    (problem,) = too_long(plan)
    assert problem.what.startswith(f"rows do not fit even alone: row {keys[0]} ({longest} tokens)")
    fits = plan.candidates[0].longest_that_fits
    assert fits < longest
    assert f"{fits} tokens" in problem.fix


def helping(monkeypatch, *totals):
    """Let these many bytes be what the changes take; the rows that each was predicted for."""
    asked = []

    def what_helps(config, *, rows, **given):
        asked.append(rows)
        return [Help(label=f"change {n}", fix=f"set {n}", total_bytes=total) for n, total in enumerate(totals)]

    monkeypatch.setattr("brim.planning.training.what_helps", what_helps)
    return asked


def test_only_help_that_is_enough_is_offered_as_such(tiny_base, monkeypatch):
    config = settings(tiny_base, random_seed=SEED, trainer={"use_maximum_batch_size": True})
    needed = brim.plan(config, uneven(), memory_bytes=2**31).chosen.single_row_bytes
    monkeypatch.setattr(
        "brim.planning.training.budget_of", lambda *given, **how: _budget(needed // 2, outside=needed // 2)
    )
    helping(monkeypatch, needed // 2, needed // 2 + 1, needed - 1)
    plan = brim.plan(config, uneven(), memory_bytes=2**30, replan=True)
    assert plan.chosen is None
    assert plan.helps == (f"change 0 ({format_bytes(needed // 2)}): set 0",)


def test_help_that_is_not_enough_says_how_far_it_goes(tiny_base, monkeypatch):
    config = settings(tiny_base, random_seed=SEED, trainer={"use_maximum_batch_size": True})
    needed = brim.plan(config, uneven(), memory_bytes=2**31).chosen.single_row_bytes
    monkeypatch.setattr(
        "brim.planning.training.budget_of", lambda *given, **how: _budget(needed // 2, outside=needed // 2)
    )
    helping(monkeypatch, needed // 2 + 2**20, needed)
    plan = brim.plan(config, uneven(), memory_bytes=2**30, replan=True)
    room, total = format_bytes(needed // 2), format_bytes(needed // 2 + 2**20)
    assert plan.helps == (
        f"change 0 ({total}, still more than the {room} that may be used): set 0",
        "a smaller model: `brim memory --compare` shows what each way takes",
    )
    (problem,) = too_long(plan)
    assert problem.fix == "; or ".join(plan.helps)


def test_help_for_micro_batches_of_a_fixed_number_is_for_so_many(tiny_base, monkeypatch):
    """One row fits; four do not."""
    fixed = settings(tiny_base, random_seed=SEED, trainer={"batch_size": 4, "gradient_accumulation_steps": 2})
    roomy = brim.plan(settings(tiny_base, random_seed=SEED), uneven(), memory_bytes=2**31)
    room, outside = roomy.chosen.single_row_bytes + 1024, roomy.budget.outside_bytes
    monkeypatch.setattr("brim.planning.training.budget_of", lambda *given, **how: _budget(room, outside=outside))
    asked = helping(monkeypatch, room - 1, room + 1)
    plan = brim.plan(fixed, uneven(), memory_bytes=2**30, replan=True)
    assert plan.chosen is None
    assert asked == [4]
    assert plan.too_long == ()
    assert [each.partition(" (")[0].partition(":")[0] for each in plan.helps[:2]] == [
        "change 0",
        "micro-batches cut by length",
    ]
    assert plan.helps[1].endswith("trainer.batch_size: auto")


def _budget(limit_bytes, *, outside):
    return Budget(
        device="t4",
        limit_bytes=limit_bytes,
        outside_bytes=outside,
        margin_bytes=0,
        limit_reason="memory.budget",
        margin_reason="memory.margin",
    )


def test_a_model_that_trains_nothing_and_data_that_is_not_there_are_refused(tiny_base):
    with pytest.raises(brim.InputError, match="there is nothing to plan: this configuration does not train"):
        brim.plan({**settings(tiny_base), "trainer": {"type": "none"}}, uneven())
    with pytest.raises(brim.ConfigError, match="there is no data set, and a plan depends on how long its rows are"):
        brim.plan(settings(tiny_base))


def test_a_budget_larger_than_the_device_is_refused(tiny_base):
    with pytest.raises(brim.ConfigError, match=r"memory.budget is 16.0 GiB, and .* has 1.0 GiB"):
        brim.plan(settings(tiny_base, memory={"budget": "16 GiB"}), uneven(), memory_bytes=2**30)


def test_a_row_alone_is_a_plan(tiny_base):
    frame = pd.DataFrame([{"question": "add 1 and 1 =", "answer": " 2", "split": 0}])
    plan = brim.plan(settings(tiny_base), frame, device="cpu")
    assert plan.chosen.widest[0] == 1
    assert plan.chosen.padding == 1.0
    assert plan.total_steps == 2


def _request(base, **changes) -> PlanRequest:
    from brim.config import load_config
    from brim.data import prepare
    from brim.data.read import read
    from brim.session import open_session
    from brim.workflows.training.planning import request_of

    session = open_session(load_config(settings(base, **changes)).config)
    prepared = prepare(read(uneven()), session.config, session.encoder, context_length=session.folder.context_length)
    return request_of(session, prepared)
