"""The plan of a batch that moves is the run that comes of it; what cannot be is refused before anything is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.api.planned_run import ready, settings, tight, uneven

import brim
from brim.config import load_config
from brim.errors import Problem
from brim.memory import UntraceableError
from brim.planning import bounded, training as planning
from brim.planning.phases import largest_batch
from brim.workflows.training.launch import Trial, launch

ONE_WAY = {"chunked_loss": False}  # each takes a few traces
RAMP = {"effective_batch_size": 8, "batch_rampup": {"length": "30sp", "from": 2}, **ONE_WAY}  # 48 samples in all
SCHEDULER = {"learning_rate_scheduler": {"warmup_fraction": 0.25, "decay": "cosine"}}


def double(epoch: int, current_batch_size: int) -> int:
    return current_batch_size if epoch else 0


DOUBLED = {
    "batch_increase_function": double,
    "epochs": 6,
    "effective_batch_size": 2,
    **ONE_WAY,
}


def test_what_is_planned_is_what_runs(tiny_base, tmp_path):
    config = settings(tiny_base, trainer={**RAMP, **SCHEDULER, "batch_lr_scaling": "sqrt"})
    plan = brim.plan(config, uneven())
    said = []
    brim.Model(config).train(uneven(), output_directory=tmp_path / "run", say=said.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("split") == "train"]
    assert (plan.total_steps, plan.total_samples) == (len(steps), 48)
    assert [phase.size for phase in plan.phases] == [2, 4, 8]
    begin = 0
    for phase in plan.phases:
        ran = steps[begin : begin + phase.num_steps]
        begin += phase.num_steps
        assert ran[0]["effective_batch_size"] == phase.size
        assert sum(step["effective_batch_size"] for step in ran) == phase.num_samples
        assert ran[-1]["num_samples"] == phase.first_sample + phase.num_samples
        assert (ran[0]["learning_rate"], ran[-1]["learning_rate"]) == phase.learning_rates
    assert sum(phase.num_tokens for phase in plan.phases) == steps[-1]["num_tokens"]
    recorded = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    planned = [(phase.size, phase.first_sample, phase.num_steps) for phase in plan.phases]
    assert [(phase["size"], phase["first_sample"], phase["num_steps"]) for phase in recorded["phases"]] == planned
    assert f"schedule: 2 → 8 rows in 3 phases over 48 samples, 8 from {plan.phases[-1].first_sample} on" in said


def test_another_schedule_is_another_plan_and_another_learning_rate_is_not(tiny_base):
    def planned(**trainer):
        memory = {"budget": "2 GiB"}  # what is free changes from moment to moment
        return brim.plan(settings(tiny_base, trainer={**RAMP, **trainer}, memory=memory, random_seed=71), uneven())

    first, faster = planned(), planned(learning_rate=0.02)
    assert (first.from_cache, faster.from_cache) == (False, True)
    for before, now in zip(first.phases, faster.phases, strict=True):
        assert now.learning_rates == pytest.approx([2 * rate for rate in before.learning_rates])
    assert not planned(batch_rampup={"length": "32sp", "from": 2}).from_cache


def test_a_plan_that_was_kept_does_not_speak_of_another_key(tiny_base):
    """Both ask for the same steps, in which there is none of 4 rows."""
    ways = {"batch_rampup": {"length": "2sp", "from": 2}, "batch_schedule": "0sp:2 1sp:4 2sp:8"}
    for key, way in ways.items():
        trainer = {"effective_batch_size": 8, key: way, **ONE_WAY}
        plan = brim.plan(settings(tiny_base, trainer=trainer, memory={"budget": "2 GiB"}, random_seed=72), uneven())
        (note,) = (line for line in plan.advice if "no step" in line)
        assert note.startswith(f"trainer.{key}: of 3 phases 1 takes no step")


def test_sizes_that_are_measured_are_planned_one_by_one(tiny_base):
    adaptation = {
        "effective_batch_size": "auto",
        "batch_adaptation": {"type": "noise_scale", "min": 2, "max": 12},
        **ONE_WAY,
    }
    plan = brim.plan(settings(tiny_base, trainer=adaptation), uneven(), device="cpu")
    assert [phase.size for phase in plan.phases] == [2, 4, 8, 12]
    assert (plan.total_steps, plan.steps_between) == (None, (4, 24))
    assert plan.seconds is None
    assert plan.seconds_between[0] < plan.seconds_between[1]
    assert all(phase.learning_rates is None for phase in plan.phases)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"effective_batch_size": 32, "batch_rampup": "24sp"},
            "trainer.batch_rampup: phase 3 of 3 asks for 32 rows a step, and there are 24 to train on",
        ),
        (
            {"effective_batch_size": 8, "batch_rampup": "1dur"},
            "trainer.batch_rampup: phase 3 of 3, 8 rows a step after 48 samples, is never reached, since the run ends "
            "after 48",
        ),
        (
            {"effective_batch_size": "auto", "batch_adaptation": {"type": "noise_scale", "min": 2, "max": 32}},
            "trainer.batch_adaptation: max asks for 32 rows a step, and there are 24 to train on",
        ),
    ],
)
def test_a_phase_that_cannot_be_is_refused_before_anything_is_loaded(
    tiny_base, tmp_path, monkeypatch, trainer, message
):
    monkeypatch.setattr("brim.workflows.training.training.load_llm", None)
    monkeypatch.setattr("brim.planning.training.traced", None)
    for refuse in (
        lambda config: brim.plan(config, uneven()),
        lambda config: brim.Model(config).train(uneven(), output_directory=tmp_path / "run"),
    ):
        with pytest.raises(brim.ConfigError) as caught:
            refuse(settings(tiny_base, trainer=trainer))
        assert str(caught.value).startswith(message)
        assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_phases_that_a_step_leaps_over_are_told(tiny_base):
    trainer = {"effective_batch_size": 8, "batch_rampup": {"length": "9sp", "from": 5, "shape": "linear"}, **ONE_WAY}
    plan = brim.plan(settings(tiny_base, trainer=trainer), uneven(), device="cpu")
    assert plan.advice[0] == (
        "trainer.batch_rampup: of 4 phases 1 takes no step, since a step of the one before reaches beyond"
    )
    assert [(phase.number, phase.size) for phase in plan.phases] == [(1, 5), (2, 6), (3, 8)]


def test_the_largest_batch_is_as_many_of_the_longest_rows_as_fit_together(tiny_base, monkeypatch):
    free = ready(tiny_base, trainer=DOUBLED)
    assert [phase.size for phase in free.plan.phases] == [2, 4, 8, 16]
    assert "asked for 32 rows after epoch 4, and 24 of the longest fit at once" in free.plan.advice[0]
    peak_bytes = math.ceil(free.plan.costs.peak_bytes(5, free.plan.lengths.longest))
    budget = replace(free.plan.budget, limit_bytes=peak_bytes, outside_bytes=0, margin_bytes=0)
    monkeypatch.setattr("brim.planning.training.budget_of", lambda *given, **how: budget)
    scarce = ready(tiny_base, trainer=DOUBLED)
    assert [phase.size for phase in scarce.plan.phases] == [2, 4]
    assert "asked for 8 rows after epoch 2, and 5 of the longest fit at once" in scarce.plan.advice[0]
    assert all(phase.total_bytes <= peak_bytes for phase in scarce.plan.phases)


def test_what_the_device_shows_changes_what_the_phases_take(tiny_base, monkeypatch):
    made = ready(tiny_base, trainer={**RAMP, "use_maximum_batch_size": True})
    assert largest_batch(made.plan, made.request) == 24
    plan = tight(made.plan, cap_bytes=int(made.plan.costs.peak_bytes(2, made.request.task.longest)))
    monkeypatch.setattr("brim.planning.costs.timing._SHARE_OF_RUN", 1e4)
    launched = launch(plan, made.request, made.llm, pad_id=0, say=lambda line: None).plan
    assert [phase.size for phase in launched.phases] == [2, 4, 8]
    cuts = [phase.micro_batches_per_step for phase in launched.phases]
    assert cuts[2] > made.plan.phases[2].micro_batches_per_step
    assert [phase.learning_rates for phase in launched.phases] == [phase.learning_rates for phase in made.plan.phases]
    assert launched.seconds == pytest.approx(
        sum(phase.num_steps * phase.seconds_per_step for phase in launched.phases), rel=0.2
    )


def test_the_bound_is_that_of_the_way_that_is_taken_for_it(tiny_base, monkeypatch):
    """Sizes of at most 24 rows are faster in a way in which 10 fit; for those 10 a way is taken in which 12 do."""
    request = ready(tiny_base, trainer=DOUBLED).request
    fits, bounds = iter([24, 10, 12]), []
    monkeypatch.setattr(planning, "_planned", lambda request, **others: SimpleNamespace(plan=None, request=request))
    monkeypatch.setattr(planning, "largest_batch", lambda plan, request: next(fits))
    monkeypatch.setattr(planning, "bounded", lambda request, bound: bounds.append(bound) or bounded(request, bound))
    found = planning._bounded_by_memory(request, replan=False, say=lambda line: None)
    assert bounds == [24, 10]
    assert found.request.length == bounded(request, 10).length


LARGEST = {"effective_batch_size": "auto", "use_maximum_batch_size": True, **ONE_WAY}
CHANGES = "so the memory decides what is learned, and another card may learn otherwise"


def of_memory(monkeypatch, budget):
    for where in ("brim.planning.training.budget_of", "brim.workflows.training.run_plan.budget_of"):
        monkeypatch.setattr(where, lambda *given, **how: budget)


def test_the_maximum_without_an_effective_batch_is_the_batch_of_an_update(tiny_base, tmp_path, monkeypatch):
    """As torchtune's RFC 2199 means it; ramps and learning rates go by the number, and the plan says where it is from."""
    free = ready(tiny_base, trainer=LARGEST)
    assert free.request.trainer.effective_batch_size == 24
    told = f"use_maximum_batch_size, the largest that fits: all rows to train on; {CHANGES}"
    assert [choice.reason for choice in free.session.choices if choice.value == 24] == [told]
    fewer = ready(tiny_base, trainer={**LARGEST, "max_batch_size": 9})
    assert fewer.session.config.trainer.effective_batch_size == 9
    assert any(choice.reason.endswith(f"trainer.max_batch_size; {CHANGES}") for choice in fewer.session.choices)
    longest = free.plan.lengths.longest
    peak_bytes = math.ceil(free.plan.costs.peak_bytes(5, longest))
    of_memory(monkeypatch, replace(free.plan.budget, limit_bytes=peak_bytes, outside_bytes=0, margin_bytes=0))
    monkeypatch.setattr("brim.planning.plan.TrainingPlan.is_ample", True)
    ramp = {**LARGEST, "batch_rampup": {"length": "12sp", "from": 2}, **SCHEDULER, "batch_lr_scaling": "sqrt"}
    config, said = settings(tiny_base, trainer=ramp), []
    plan = brim.plan(config, uneven())
    assert [phase.size for phase in plan.phases] == [2, 4, 5]
    assert [line for line in plan.advice if "when it starts" in line] == [
        "the run chooses the largest batch when it starts, by the memory that is free then, and may take a row more or "
        "fewer than 5; trainer.effective_batch_size=5 keeps the number"
    ]
    ample = brim.plan(settings(tiny_base, trainer={**LARGEST, "max_batch_size": 3}), uneven())
    assert not [line for line in ample.advice if "when it starts" in line]
    brim.Model(config).train(uneven(), output_directory=tmp_path / "run", say=said.append)
    (line,) = (line for line in said if line.startswith("trainer.effective_batch_size"))
    assert line == (
        "trainer.effective_batch_size: 5 (use_maximum_batch_size, the largest that fits: 5 of the longest rows, "
        f"{longest} tokens; {CHANGES})"
    )
    recorded = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [choice["value"] for choice in recorded["choices"] if choice["key"] == "trainer.effective_batch_size"] == [5]
    assert [phase["size"] for phase in recorded["batch_schedule"]] == [2, 4, 5]
    steps = [json.loads(each) for each in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [(step["effective_batch_size"], step["learning_rate"]) for step in steps if step.get("split") == "train"]
    assert (rates[0], rates[-1]) == (
        (2, plan.phases[0].learning_rates[0]),
        (rates[-1][0], plan.phases[-1].learning_rates[1]),
    )


def test_the_maximum_is_told_once(tiny_base, tmp_path):
    said = []
    config = settings(tiny_base, trainer={**LARGEST, "epochs": 1})
    brim.Model(config).train(uneven(), output_directory=tmp_path / "run", say=said.append)
    told = [line for line in said if line.startswith("trainer.effective_batch_size")]
    assert len(told) == 1
    assert CHANGES in told[0]


def test_a_first_plan_is_not_said_to_be_found_earlier(tiny_base, tmp_path):
    """Of the plans that lead to the number, the last one is that of the run."""
    config, plans = settings(tiny_base, trainer={**LARGEST, "epochs": 1}, random_seed=77), []
    for name in ("first", "second"):
        said = []
        brim.Model(config).train(uneven(), output_directory=tmp_path / name, say=said.append)
        plans += [line for line in said if line.startswith("plan: ")]
    assert ["found earlier" in line for line in plans] == [False, True]


def test_where_no_row_fits_no_number_is_said_to_be_the_largest(tiny_base, monkeypatch):
    budget = ready(tiny_base).plan.budget
    of_memory(monkeypatch, replace(budget, limit_bytes=1, outside_bytes=0, margin_bytes=0))
    plan = brim.plan(settings(tiny_base, trainer=LARGEST), uneven())
    assert plan.chosen is None
    assert not [line for line in plan.advice if "use_maximum_batch_size" in line]


@pytest.mark.parametrize("how", ["binary", "untraceable"])
def test_a_search_finds_the_batch_of_an_update(tiny_base, tmp_path, monkeypatch, how):
    if how == "untraceable":
        monkeypatch.setattr("brim.planning.training.traced", untraceable)
    search = {"batch_search": how} if how == "binary" else {}
    config, said = settings(tiny_base, trainer={**LARGEST, **search, "epochs": 1, "learning_rate": 0.013}), []
    probed = Trial.probe_size

    def few_fit(self, rows, tokens):
        probe = probed(self, rows, tokens)
        return probe if rows <= 7 else replace(probe, outcome="out of memory")

    monkeypatch.setattr("brim.workflows.training.launch.Trial.probe_size", few_fit)
    brim.Model(config).train(uneven(), output_directory=tmp_path / "run", say=said.append, replan=True)
    recorded = json.loads((tmp_path / "run" / "plan.json").read_text())
    (choice,) = (each for each in recorded["choices"] if each["key"] == "trainer.effective_batch_size")
    assert choice["value"] == 7
    searched = "binary" if how == "binary" else "linear"
    assert f"the largest that fits: {searched}: 7 of the longest rows, 42 tokens" in choice["reason"]
    assert recorded["batch_schedule"] == [{"first_sample": 0, "size": 7}]
    assert load_config(tmp_path / "run" / "config.yaml").config.trainer.effective_batch_size == 7
    assert f"trainer.effective_batch_size: 7 ({choice['reason']})" in said


def untraceable(*given, **how):
    raise UntraceableError(Problem(what="Llama cannot be traced"))


def test_a_bound_changes_the_length_alone(tiny_base):
    request = ready(tiny_base, trainer=DOUBLED).request
    assert request.is_bounded_by_memory
    now = bounded(request, 5)
    assert now.length.sizes == (2, 4)
    assert now.task.effective_batch_size == 4
    assert now.rows is request.rows
