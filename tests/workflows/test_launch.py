"""A plan is brought to the device: what is tried, what follows from it, and that nothing is left of it."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.workflows.planned_run import ready, scarce, tight

from brim.batching import ByLength, ByRows, Surface
from brim.batching.memory import random_states
from brim.config import load_config
from brim.errors import NothingFitsError, OutOfMemoryError
from brim.memory.closed_form import counted_state_bytes
from brim.session import say_nothing
from brim.train import build_optimizer
from brim.train.optimizer import FixedBetas
from brim.workflows.training.launch import launch

pytestmark = pytest.mark.run
NO_LIMIT = 10**9
WARMING = (1, 7)  # the shortest row: what the first pass of a process leaves behind is not the micro-batch's


@pytest.fixture(scope="module")
def run(tiny_base):
    made = ready(tiny_base)
    gc.collect()
    gc.freeze()  # each probe collects garbage, which takes its time where much has been imported
    yield made
    gc.unfreeze()


def launched(run, plan, say=say_nothing, request=None):
    return launch(plan, request or run.request, run.llm, pad_id=run.session.encoder.pad_id, say=say)


def with_trainer(run, **update):
    config = run.request.config
    trainer = config.trainer.model_copy(update=update)
    return replace(run.request, config=config.model_copy(update={"trainer": trainer}))


def untimed(monkeypatch):
    """As for a run that is too short to be worth timing."""
    monkeypatch.setattr("brim.workflows.training.timing._SHARE_OF_RUN", 0.0)


def seconds(*, of_each):
    """A second a token, and some for each micro-batch."""
    return Surface(base=of_each, lengths=(16,), tokens=((16,),), values=((of_each + 16.0,),))


def state_of(llm):
    """All that a probe could change."""
    return {
        **{f"weight {name}": value.clone() for name, value in llm.model.state_dict().items()},
        **{f"random {name}": value for name, value in random_states().items()},
        "gradients": torch.tensor([p.grad is not None for p in llm.model.parameters()]),
        "modes": torch.tensor([module.training for module in llm.model.modules()]),
    }


def assert_equal(before, after):
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_plan_with_memory_to_spare_or_a_number_of_rows_is_not_tried(run, monkeypatch):
    untimed(monkeypatch)
    with scarce(run.llm, most_tokens=0) as tried:
        found = launched(run, run.plan)
        given = launched(run, run.plan, request=with_trainer(run, batch_size=3))
        largest = launched(run, run.plan, request=with_trainer(run, use_maximum_batch_size=True))
    assert tried == []
    assert found.probes == found.measured == ()
    assert found.told.startswith("not tried before the first step, since it needs less than half of the memory; time ")
    assert found.plan == run.plan
    for cutter, is_largest in ((found.cutter, False), (largest.cutter, True)):
        expected = ByLength(costs=run.plan.costs, cap_bytes=run.plan.chosen.cap_bytes, largest=is_largest)
        assert cutter.state() == expected.state()
    assert (given.cutter.state(), given.told) == (ByRows(max_rows=3).state(), "")


def test_a_tight_plan_is_tried_once_with_its_widest_micro_batch(run, monkeypatch):
    untimed(monkeypatch)
    plan = tight(run.plan)
    with scarce(run.llm, most_tokens=NO_LIMIT) as tried:
        found = launched(run, plan)
    assert tried == [WARMING, plan.chosen.widest]
    (probe,) = found.probes
    assert (probe.size, probe.steps, probe.outcome) == (plan.chosen.widest[0], 1, "fits")
    rows, tokens = plan.chosen.widest
    assert found.told.startswith(f"{rows:,} × {tokens:,} tokens ran and fitted (1 probe); time not measured")
    predicted = int(np.ceil(plan.costs.peak_bytes(rows, tokens)))
    assert [predicted_bytes for predicted_bytes, _ in found.measured] == [predicted]


def test_nothing_is_left_of_probes_and_timings(run, monkeypatch):
    monkeypatch.setattr("brim.workflows.training.timing._SHARE_OF_RUN", 1e4)
    before = state_of(run.llm)
    with scarce(run.llm, most_tokens=NO_LIMIT) as tried:
        found = launched(run, tight(run.plan))
    assert len(tried) > 12  # four shapes at least, each three times
    assert found.plan.chosen.time_source == "measured"
    assert "; timed " in found.told
    assert_equal(before, state_of(run.llm))


def test_what_runs_out_of_memory_lowers_the_cap_until_it_fits_and_leaves_nothing(run, monkeypatch):
    untimed(monkeypatch)
    monkeypatch.setattr("brim.workflows.training.launch.corrected", lambda costs, probe: costs)
    plan, said, before = tight(run.plan), [], state_of(run.llm)
    with scarce(run.llm, most_tokens=200) as tried:
        found = launched(run, plan, say=said.append)
    assert_equal(before, state_of(run.llm))
    assert tried.pop(0) == WARMING
    assert [probe.outcome for probe in found.probes] == ["out_of_memory"] * (len(tried) - 1) + ["fits"]
    assert len(tried) == len(set(tried)) == 1 + len(said)
    assert said[0].startswith(f"{tried[0][0]} × {tried[0][1]} tokens ran out of memory when they were tried: ")
    rows, tokens = found.plan.chosen.widest
    assert tried[-1] == (rows, tokens)
    assert rows * tokens <= 200
    assert found.cutter.cap_bytes == found.plan.chosen.cap_bytes < plan.chosen.cap_bytes
    assert found.plan.chosen.cap_binds
    assert found.plan.chosen.total_bytes < plan.chosen.total_bytes
    assert found.plan.chosen.micro_batches_per_step > plan.chosen.micro_batches_per_step
    assert run.request.task.epoch(found.plan.costs, cap_bytes=found.cutter.cap_bytes).widest.rows == rows


def test_a_row_that_runs_out_of_memory_alone_is_named(run):
    longest = int(np.argmax(run.request.rows.lengths))
    key, length = int(run.request.rows.keys[longest]), int(run.request.rows.lengths[longest])
    with scarce(run.llm, most_tokens=length - 1), pytest.raises(OutOfMemoryError) as caught:
        launched(run, tight(run.plan))
    assert caught.value.problems[0].what.startswith(f"row {key} ({length} tokens) ran out of memory alone, when it was")
    assert caught.value.exit_code == 1


def test_a_peak_above_the_prediction_corrects_the_costs_once(run, monkeypatch):
    untimed(monkeypatch)
    plan = tight(run.plan, cap_bytes=run.plan.costs.static_bytes + 2_000_000)
    static_bytes = plan.costs.static_bytes

    def one_and_a_half(trial, rows, tokens):
        added = int(np.ceil(plan.costs.peak_bytes(rows, tokens))) - static_bytes
        return replace(probe, size=rows, peak_bytes=static_bytes + round(1.5 * added))

    with scarce(run.llm, most_tokens=NO_LIMIT):
        probe = launched(run, plan).probes[0]
    monkeypatch.setattr("brim.planning.costs.time._TELLING_SHARE", 0.0)
    monkeypatch.setattr("brim.planning.costs.time.TELLING_BYTES", 1)
    monkeypatch.setattr("brim.workflows.training.launch.Trial.probe", one_and_a_half)
    found = launched(run, plan)
    assert found.plan.costs.scale == pytest.approx(1.5, rel=1e-5)
    (predicted_bytes, seen), *_ = found.measured
    ratio = (seen.peak_bytes - static_bytes) / (predicted_bytes - static_bytes)
    assert ratio == pytest.approx(1.5, rel=1e-5)  # of the uncorrected prediction
    widest = run.request.task.epoch(found.plan.costs, cap_bytes=found.cutter.cap_bytes).widest
    assert widest.peak_bytes <= found.cutter.cap_bytes == plan.chosen.cap_bytes
    assert found.plan.chosen.micro_batches_per_step > plan.chosen.micro_batches_per_step


def test_measured_times_that_ask_for_wider_micro_batches_have_them_tried(run, monkeypatch):
    plan = tight(run.plan)
    costs = replace(plan.costs, time=seconds(of_each=0.0))  # as estimated: whatever is padded is lost
    totals = run.request.task.epoch(costs, cap_bytes=plan.chosen.cap_bytes)
    chosen = replace(plan.chosen, widest=(totals.widest.rows, totals.widest.padded_length))
    plan = replace(plan, costs=costs, chosen=chosen, candidates=(chosen,))
    timed = replace(costs, time=seconds(of_each=1e6))
    monkeypatch.setattr("brim.workflows.training.launch._timed", lambda *given: (timed, "timed"))
    with scarce(run.llm, most_tokens=NO_LIMIT) as tried:
        found = launched(run, plan)
    (before, less), (rows, tokens) = chosen.widest, found.plan.chosen.widest
    assert tried == [WARMING, (before, less), (rows, tokens)]
    assert before * less < rows * tokens
    assert found.told.startswith(f"{rows} × {tokens} tokens ran and fitted (2 probes); timed")


def test_a_search_tries_the_longest_rows_and_without_a_plan_rows_are_counted(run):
    longest = run.request.task.longest
    before = state_of(run.llm)
    for how, largest in {"linear": 5, "binary": 5, "doubling": 4, "halving": 4}.items():
        with scarce(run.llm, most_tokens=5 * longest) as tried:
            found = launched(run, run.plan, request=with_trainer(run, batch_search=how))
        assert {tokens for _, tokens in tried} == {longest}
        assert found.told.startswith(f"{how}: {largest} of the longest rows, {longest} tokens, fit together; ")
        assert found.cutter.cap_bytes == int(np.ceil(run.plan.costs.peak_bytes(largest, longest)))
        assert found.plan.chosen.cap_bytes == found.cutter.cap_bytes
        assert_equal(before, state_of(run.llm))
    with scarce(run.llm, most_tokens=3 * longest):
        found = launched(run, None)
    assert (found.plan, found.cutter.state()) == (None, ByRows(max_rows=3).state())
    assert found.told.startswith(f"linear: 3 of the longest rows, {longest} tokens, fit together; ")


def test_a_search_stays_within_the_budget(run, monkeypatch):
    """Peaks are this process's resident memory; the budget leaves less than it has."""
    plan = replace(run.plan, budget=replace(run.plan.budget, limit_bytes=run.plan.budget.margin_bytes + 2**20))
    with pytest.raises(NothingFitsError, match=r"not even one row fits: batch size 1 took .* of 1.0 MiB"):
        launched(run, plan, request=with_trainer(run, batch_search="doubling"))


@pytest.mark.parametrize("optimizer", ["adamw", {"type": "adam", "amsgrad": True}, "sgd", "adafactor"], ids=str)
def test_without_a_plan_the_optimizers_state_is_counted(optimizer):
    """Against what the optimizer itself keeps after a step; but for its counters of steps."""
    net = torch.nn.Linear(24, 16)
    settings = {"base_model": "m", "trainer": {"type": "finetune", "optimizer": optimizer, "effective_batch_size": 1}}
    trainer = load_config(settings).config.trainer
    built = build_optimizer(trainer.optimizer, list(net.parameters()))
    net(torch.ones(2, 24)).sum().backward()
    FixedBetas(built).set(size=1, learning_rate=0.1)
    built.step()
    kept = [value for state in built.state.values() for value in state.values() if torch.is_tensor(value)]
    assert counted_state_bytes(trainer, net) == sum(value.numel() * 4 for value in kept if value.numel() > 1)
