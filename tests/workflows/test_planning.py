"""brim.plan: what a run would decide, with nothing loaded, and the run that comes of it; what cannot be is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from tests.integration.conftest import steps
from tests.memory.tiny_architectures import write_folder
from tests.workflows.planned_run import plan_of, ready, settings, tight, train, uneven

import brim
from brim.config import load_config
from brim.data.tokens import rows_of_step
from brim.errors import ConfigError, Problem
from brim.memory import UntraceableError
from brim.memory.variants import Help
from brim.planning import too_long
from brim.units import format_bytes
from brim.workflows.training.launch import Trial, launch

pytestmark = pytest.mark.run
SEED = 3
ONE_WAY = {"chunked_loss": False}  # each takes a few traces
LONG = 100_000  # epochs
RAMP = {"effective_batch_size": 8, "batch_rampup": {"length": "30sp", "from": 2}, **ONE_WAY}  # 48 samples in all
SCHEDULER = {"learning_rate_scheduler": {"warmup_fraction": 0.25, "decay": "cosine"}}
LARGEST = {"effective_batch_size": "auto", "use_maximum_batch_size": True, **ONE_WAY}
CHANGES = "so the memory decides what is learned, and another card may learn otherwise"


def test_the_plan_tells_of_rows_steps_and_the_way_that_is_taken(tiny_base):
    """Its rows are partitioned in the order in which the run takes them."""
    config, said = settings(tiny_base, random_seed=SEED), []
    plan = brim.plan(config, uneven(), device="cpu", say=said.append)
    assert (plan.effective_batch_size, plan.total_steps, plan.lengths.num_rows) == (8, 6, 24)
    assert plan.budget.device == "cpu"
    chosen = plan.chosen
    assert (chosen.way.gradient_checkpointing, chosen.time_source) == (False, "estimated")
    assert plan.seconds == pytest.approx(2 * chosen.seconds_per_epoch)
    assert chosen.total_bytes <= plan.budget.limit_bytes - plan.budget.margin_bytes
    assert "adapter.alpha: 16 (twice adapter.r)" in said
    request = ready(tiny_base, random_seed=SEED).request
    batches = [rows_of_step(num_rows=24, seed=SEED, consumed_samples=8 * n, size=8)[1] for n in range(3)]
    np.testing.assert_array_equal(request.task.lengths, request.rows.lengths[np.concatenate(batches)])
    totals = request.task.epoch(plan.costs, cap_bytes=chosen.cap_bytes)
    assert chosen.micro_batches_per_step == totals.num_micro_batches / 3


def test_a_cpu_packs_rows_where_a_run_is_long_and_gains_by_it(tiny_base):
    def planned(packing, *, epochs):
        said, trainer = [], {**ONE_WAY, "packing": packing, "epochs": epochs}
        config = settings(tiny_base, random_seed=SEED, trainer=trainer)
        plan = brim.plan(config, uneven(), device="cpu", say=said.append)
        return plan, [str(line) for line in said if str(line).startswith("trainer.packing")]

    _, short = planned("auto", epochs=2)
    assert len(short) == 1
    assert short[0].startswith("trainer.packing: False (on a CPU rows are packed in runs of 10 s or more")
    (padded, none), (packed, said) = (planned(packing, epochs=LONG) for packing in (False, "auto"))
    assert (padded.is_packed, none) == (False, [])
    assert packed.is_packed
    assert packed.chosen.seconds_per_epoch < 0.98 * padded.chosen.seconds_per_epoch
    assert "trainer.packing: True (on a CPU an epoch is estimated at" in said[0]
    again, kept = planned("auto", epochs=LONG)
    assert (again.from_cache, again.is_packed, kept) == (True, True, said)
    run = ready(tiny_base, random_seed=SEED, trainer={**ONE_WAY, "epochs": LONG})
    assert (run.session.config.trainer.packing, run.plan.is_packed) == (True, True)


def test_a_plan_is_made_once_for_the_same_work(tiny_base):
    config = settings(tiny_base, random_seed=SEED + 1, trainer=ONE_WAY)
    first = brim.plan(config, uneven(), device="t4")
    again = brim.plan(config, uneven(), device="t4")
    assert (first.from_cache, again.from_cache) == (False, True)
    assert replace(again, from_cache=False) == first
    assert not brim.plan(config, uneven(), device="t4", replan=True).from_cache
    assert not brim.plan(config, uneven()[::-1].reset_index(drop=True), device="t4").from_cache


def test_what_else_was_traced_changes_no_plan(tiny_base, monkeypatch, tmp_path):
    """Each plan goes by the shapes of its own rows, whatever the cache knows of others."""
    config, plans = settings(tiny_base, random_seed=SEED, trainer={"chunked_loss": True}), []
    for name, others in (("alone", ()), ("after others", (3, 11))):
        monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / name))
        for num_rows in others:
            brim.plan(
                {**config, "trainer": {**config["trainer"], "effective_batch_size": num_rows}}, uneven()[:num_rows]
            )
        plans.append(brim.plan(config, uneven(), device="cpu"))
    alone, after = plans
    assert after.costs == alone.costs
    assert after.chosen.seconds_per_epoch == alone.chosen.seconds_per_epoch


def test_rows_that_fit_in_no_way_are_named_by_number_and_what_would_fit(tiny_base):
    config = settings(tiny_base, random_seed=SEED, memory={"margin": "0 MiB"}, trainer={"packing": False})
    alone = brim.plan(config, uneven(), memory_bytes=2**30).chosen.single_row_bytes
    plan = brim.plan(config, uneven(), memory_bytes=alone - 1)
    assert (plan.chosen, plan.costs) == (None, None)
    rows = ready(tiny_base, random_seed=SEED).request.rows
    longest = int(rows.lengths.max())
    keys = [int(key) for key, length in zip(rows.keys, rows.lengths, strict=True) if length == longest]
    assert [(row.key, row.num_tokens) for row in plan.too_long] == [(key, longest) for key in keys]
    (problem,) = too_long(plan)
    assert problem.what.startswith(f"rows do not fit even alone: row {keys[0]} ({longest} tokens)")
    fits = plan.candidates[0].longest_that_fits
    assert fits < longest
    assert f"{fits} tokens" in problem.fix


def of_memory(monkeypatch, budget, limit_bytes, *, outside_bytes=0):
    limited = replace(budget, limit_bytes=limit_bytes, outside_bytes=outside_bytes, margin_bytes=0)
    monkeypatch.setattr("brim.planning.request.budget_of", lambda *given, **how: limited)


def helped(monkeypatch, config, roomy, room, outside, totals):
    """The plan where changes take so many bytes, and the rows that each was predicted for."""
    asked, helps = [], [Help(label=f"change {n}", fix=f"set {n}", total_bytes=total) for n, total in enumerate(totals)]
    monkeypatch.setattr("brim.planning.helping.what_helps", lambda *given, rows, **how: asked.append(rows) or helps)
    of_memory(monkeypatch, roomy.budget, room, outside_bytes=outside)
    plan = brim.plan(config, uneven(), memory_bytes=2**30, replan=True)
    assert plan.chosen is None
    return plan, asked


def test_what_helps_is_offered_as_such_only_where_it_is_enough(tiny_base, monkeypatch):
    config = settings(tiny_base, random_seed=SEED, trainer={"use_maximum_batch_size": True, **ONE_WAY})
    roomy = brim.plan(config, uneven(), memory_bytes=2**31)
    half = roomy.chosen.single_row_bytes // 2
    plan, _ = helped(monkeypatch, config, roomy, half, half, [half, half + 1, 2 * half - 1])
    assert plan.helps == (f"change 0 ({format_bytes(half)}): set 0",)
    plan, _ = helped(monkeypatch, config, roomy, half, half, [half + 2**20, 2 * half])
    room, total = format_bytes(half), format_bytes(half + 2**20)
    assert plan.helps == (
        f"change 0 ({total}, still more than the {room} that may be used): set 0",
        "a smaller model: `brim memory --compare` shows what each strategy takes",
    )
    (problem,) = too_long(plan)
    assert problem.fix == "; or ".join(plan.helps)


def test_help_for_micro_batches_of_a_fixed_number_is_for_so_many(tiny_base, monkeypatch):
    """One row fits; four do not."""
    fixed = settings(tiny_base, random_seed=SEED, trainer={"batch_size": 4, "gradient_accumulation_steps": 2})
    roomy = brim.plan(settings(tiny_base, random_seed=SEED), uneven(), memory_bytes=2**31)
    room = roomy.chosen.single_row_bytes + 1024
    plan, asked = helped(monkeypatch, fixed, roomy, room, roomy.budget.outside_bytes, [room - 1, room + 1])
    assert (asked, plan.too_long) == ([4], ())
    assert plan.helps[0].startswith("change 0 (")
    assert plan.helps[1].startswith("micro-batches by length")
    assert plan.helps[1].endswith("trainer.batch_size: auto")


DOUBLED = {"batch_increase_function": lambda epoch, size: size if epoch else 0, "epochs": 6, "effective_batch_size": 2}
DOUBLED |= ONE_WAY


def test_what_is_planned_is_what_runs(tiny_base, tmp_path):
    config = settings(tiny_base, trainer={**RAMP, **SCHEDULER, "batch_lr_scaling": "sqrt"})
    plan, said = brim.plan(config, uneven()), []
    run = train(config, tmp_path / "run", said=said)
    made = steps(run)
    assert (plan.total_steps, plan.total_samples) == (len(made), 48)
    assert [phase.size for phase in plan.phases] == [2, 4, 8]
    begin = 0
    for phase in plan.phases:
        ran = made[begin : begin + phase.num_steps]
        begin += phase.num_steps
        assert ran[0]["effective_batch_size"] == phase.size
        assert sum(step["effective_batch_size"] for step in ran) == phase.num_samples
        assert ran[-1]["num_samples"] == phase.first_sample + phase.num_samples
        assert (ran[0]["learning_rate"], ran[-1]["learning_rate"]) == phase.learning_rates
    assert sum(phase.num_tokens for phase in plan.phases) == made[-1]["num_tokens"]
    recorded = plan_of(run)["plan"]["phases"]
    assert [phase["num_steps"] for phase in recorded] == [phase.num_steps for phase in plan.phases]
    (batch,) = (line for line in said if line.startswith("batch: "))
    assert f"2 → 8 rows in 3 phases over 48 samples, 8 from {plan.phases[-1].first_sample} on" in batch


def test_another_schedule_is_another_plan_and_another_learning_rate_is_not(tiny_base):
    def planned(**trainer):
        memory = {"budget": "2 GiB"}  # what is free changes from moment to moment
        return brim.plan(settings(tiny_base, trainer={**RAMP, **trainer}, memory=memory, random_seed=71), uneven())

    first, faster = planned(), planned(learning_rate=0.02)
    assert (first.from_cache, faster.from_cache) == (False, True)
    for before, now in zip(first.phases, faster.phases, strict=True):
        assert now.learning_rates == pytest.approx([2 * rate for rate in before.learning_rates])
    assert not planned(batch_rampup={"length": "32sp", "from": 2}).from_cache


def test_phases_without_a_step_are_told_of_the_key_that_made_them_also_where_the_plan_was_kept(tiny_base):
    """Both ask for the same steps, in which there is none of 4 rows."""
    for key, way in (("batch_rampup", {"length": "2sp", "from": 2}), ("batch_schedule", "0sp:2 1sp:4 2sp:8")):
        trainer = {"effective_batch_size": 8, key: way, **ONE_WAY}
        plan = brim.plan(settings(tiny_base, trainer=trainer, memory={"budget": "2 GiB"}, random_seed=72), uneven())
        assert plan.advice[0] == (
            f"trainer.{key}: of 3 phases 1 takes no step, since a step of the one before reaches beyond"
        )
        assert [(phase.number, phase.size) for phase in plan.phases] == [(1, 2), (2, 8)]


def test_a_phase_that_cannot_be_is_refused_before_anything_is_loaded(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setattr("brim.workflows.training.sharding.load_llm", None)
    monkeypatch.setattr("brim.planning.training.traced", None)
    noise = {"batch_adaptation": {"type": "noise_scale", "min": 2, "max": 32}}
    for size, way, message in (
        (32, {"batch_rampup": "24sp"}, "batch_rampup: phase 3 of 3 asks for 32 rows a step, and there are 24 to train"),
        (8, {"batch_rampup": "1dur"}, "batch_rampup: phase 3 of 3, 8 rows a step after 48 samples, is never reached"),
        ("auto", noise, "batch_adaptation: max asks for 32 rows a step, and there are 24 to train on"),
    ):
        config = settings(tiny_base, trainer={"effective_batch_size": size, **way})
        for refuse in (lambda config: brim.plan(config, uneven()), lambda config: train(config, tmp_path / "run")):
            with pytest.raises(brim.ConfigError, match=f"^trainer.{message}"):
                refuse(config)
    assert not (tmp_path / "run").exists()


def test_the_largest_batch_is_as_many_of_the_longest_rows_as_fit_together(tiny_base, monkeypatch):
    free = ready(tiny_base, trainer=DOUBLED).plan
    assert [phase.size for phase in free.phases] == [2, 4, 8, 16]
    assert "asked for 32 rows after epoch 4, and 24 of the longest fit at once" in free.advice[0]
    peak_bytes = math.ceil(free.costs.peak_bytes(5, free.lengths.longest))
    of_memory(monkeypatch, free.budget, peak_bytes)
    scarce = ready(tiny_base, trainer=DOUBLED).plan
    assert [phase.size for phase in scarce.phases] == [2, 4]
    assert "asked for 8 rows after epoch 2, and 5 of the longest fit at once" in scarce.advice[0]
    assert all(phase.total_bytes <= peak_bytes for phase in scarce.phases)


def test_what_the_device_shows_changes_what_the_phases_take(tiny_base, monkeypatch):
    made = ready(tiny_base, trainer={**RAMP, "use_maximum_batch_size": True})
    assert made.request.largest_batch(made.plan) == 24
    plan = tight(made.plan, cap_bytes=int(made.plan.costs.peak_bytes(2, made.request.task.longest)))
    monkeypatch.setattr("brim.workflows.training.timing._SHARE_OF_RUN", 1e4)
    launched = launch(plan, made.request, made.llm, pad_id=0, say=lambda line: None).plan
    assert [phase.size for phase in launched.phases] == [2, 4, 8]
    cuts = [phase.micro_batches_per_step for phase in launched.phases]
    assert cuts[2] > made.plan.phases[2].micro_batches_per_step
    assert [phase.learning_rates for phase in launched.phases] == [phase.learning_rates for phase in made.plan.phases]
    seconds = sum(phase.num_steps * phase.seconds_per_step for phase in launched.phases)
    assert launched.seconds == pytest.approx(seconds, rel=0.2)


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
    of_memory(monkeypatch, free.plan.budget, peak_bytes)
    monkeypatch.setattr("brim.planning.plan.TrainingPlan.is_ample", True)
    ramp = {**LARGEST, "batch_rampup": {"length": "12sp", "from": 2}, **SCHEDULER, "batch_lr_scaling": "sqrt"}
    config, said = settings(tiny_base, trainer=ramp), []
    plan = brim.plan(config, uneven())
    assert [phase.size for phase in plan.phases] == [2, 4, 5]
    (line,) = (line for line in plan.advice if "when it starts" in line)
    assert line.startswith("the run chooses the largest batch when it starts, by the memory that is free then")
    assert line.endswith("a row more or fewer than 5; trainer.effective_batch_size=5 fixes the number")
    ample = brim.plan(settings(tiny_base, trainer={**LARGEST, "max_batch_size": 3}), uneven())
    assert not [line for line in ample.advice if "when it starts" in line]
    run = train(config, tmp_path / "run", said=said)
    fits = f"use_maximum_batch_size, the largest that fits: 5 of the longest rows, {longest} tokens; {CHANGES}"
    assert f"trainer.effective_batch_size: 5 ({fits})" in said
    assert [phase["size"] for phase in plan_of(run)["batch_schedule"]] == [2, 4, 5]
    first, *_, last = steps(run)
    assert (first["effective_batch_size"], first["learning_rate"]) == (2, plan.phases[0].learning_rates[0])
    assert last["learning_rate"] == plan.phases[-1].learning_rates[1]
    of_memory(monkeypatch, free.plan.budget, 1)
    none = brim.plan(settings(tiny_base, trainer=LARGEST), uneven())  # no number is said to be the largest
    assert (none.chosen, [line for line in none.advice if "use_maximum_batch_size" in line]) == (None, [])


def test_the_maximum_is_told_once_and_a_first_plan_is_not_said_to_be_found_earlier(tiny_base, tmp_path):
    """Of the plans that lead to the number, the last one is that of the run."""
    config, found_earlier = settings(tiny_base, trainer={**LARGEST, "epochs": 1}, random_seed=77), []
    for name in ("first", "second"):
        said = []
        train(config, tmp_path / name, said=said)
        found_earlier += ["found earlier" in line for line in said if line.startswith("batch: ")]
        (told,) = (line for line in said if line.startswith("trainer.effective_batch_size"))
        assert CHANGES in told
    assert found_earlier == [False, True]


@pytest.mark.parametrize("how", ["binary", "untraceable"])
def test_a_search_finds_the_batch_of_an_update(tiny_base, tmp_path, monkeypatch, how):
    if how == "untraceable":
        error = UntraceableError(Problem(what="Llama cannot be traced"))
        monkeypatch.setattr("brim.planning.training.traced", Mock(side_effect=error))
    search = {"batch_search": how} if how == "binary" else {}
    config, said = settings(tiny_base, trainer={**LARGEST, **search, "epochs": 1, "learning_rate": 0.013}), []
    probed = Trial.probe_size

    def few_fit(self, rows, tokens):
        probe = probed(self, rows, tokens)
        return probe if rows <= 7 else replace(probe, outcome="out of memory")

    monkeypatch.setattr("brim.workflows.training.launch.Trial.probe_size", few_fit)
    recorded = plan_of(train(config, tmp_path / "run", said=said, replan=True))
    (choice,) = (each for each in recorded["choices"] if each["key"] == "trainer.effective_batch_size")
    searched = "binary" if how == "binary" else "linear"
    assert f"the largest that fits: {searched}: 7 of the longest rows, 42 tokens" in choice["reason"]
    assert load_config(tmp_path / "run" / "config.yaml").config.trainer.effective_batch_size == 7
    assert f"trainer.effective_batch_size: 7 ({choice['reason']})" in said


def test_weights_are_sharded_where_the_whole_model_fits_on_no_rank(tmp_path):
    base = write_folder(tmp_path / "base", "llama", num_hidden_layers=2, hidden_size=512, intermediate_size=2048)
    trainer = {"enable_gradient_checkpointing": False, **ONE_WAY}
    config = settings(base, trainer=trainer, adapter=None)
    rows = {"num_rows": 16, "sequence_length": 16}
    plan = brim.plan(config, **rows, memory_bytes=2018 * 2**20, gpus=8, say=None)
    whole, sharded = plan.candidates
    assert (whole.fits, whole.way.is_sharded, sharded.fits, plan.chosen) == (False, False, True, sharded)
    assert plan.strategy_reason.startswith(
        "the whole model does not fit in a process: no checkpointing, whole logits: "
    )
    assert (plan.num_ranks, plan.budget.limit_bytes, sharded.wire.update_bytes < 2000) == (8, 2018 * 2**20, True)
    assert sharded.wire.round_bytes > 2 * 4 * 7 / 8 * 2 * 512 * 3 * 2048  # two layers' products, twice in four bytes
    assert sharded.total_bytes <= plan.budget.limit_bytes - plan.budget.margin_bytes < whole.single_row_bytes
    assert plan.step_seconds >= sharded.wire.round_s


def test_70b_in_4_bits_is_sharded_over_two_cards_of_24_gib(tmp_path):
    base = write_folder(
        tmp_path / "base",
        "llama",
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    trainer = {**ONE_WAY, "enable_gradient_checkpointing": True, "effective_batch_size": 8}
    config = settings(base, trainer=trainer, precision="bf16-mixed", quantization={"bits": 4})
    plan = brim.plan(config, num_rows=16, sequence_length=512, memory_bytes=24 * 2**30, gpus=2, say=None)
    whole, sharded = plan.candidates
    assert (whole.fits, sharded.way.is_sharded, plan.chosen) == (False, True, sharded)
    assert 0.5 < sharded.single_row_bytes / whole.single_row_bytes < 0.65


def test_what_cannot_be_sharded_is_seen_in_how_the_base_is_stored_too(tmp_path):
    base = write_folder(tmp_path / "base", "llama")
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    described = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**described, "quantization_config": stored}))
    adapter, backend = {"type": "lora", "use_dora": True}, {"trainer": {"strategy": "fsdp"}}
    with pytest.raises(ConfigError, match="fsdp does not go with DoRA on a quantised base"):
        brim.plan(settings(base, adapter=adapter, backend=backend), num_rows=8, sequence_length=8, gpus=2, say=None)
