"""How runs under limits are asked for and judged, without training anything."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.batching_budgets import WRONG_BY, budget_runs
from benchmarks.batching_run import Outcome, RunFailed, Spec

SPEC = Spec(folder="nowhere", device="cpu", contender="brim", num_threads=1)
MIB = 2**20
OUTCOME = Outcome(
    train_s=1.0,
    whole_s=1.0,
    losses=[2.0, 1.0],
    num_tokens=1,
    num_padded_tokens=1,
    num_micro_batches=2,
    micro_batch_rows=None,
    num_out_of_memory=0,
    peak_bytes=1,
    held_out_loss=None,
    beside_bytes=1000 * MIB,
    passes_bytes=4000 * MIB,
    plan={"launch": {"probes": [{"outcome": "fits"}]}},
)


def test_limits_are_shares_of_what_the_passes_take_beside_what_the_process_takes():
    asked: list[tuple[int | None, float | None]] = []

    def start(spec: Spec) -> Outcome:
        asked.append((spec.limit_bytes, spec.wrong_by))
        return OUTCOME

    runs = budget_runs(SPEC, "lora", say=lambda line: None, start=start)
    shares = [(5000, None), (3000, None), (3000, WRONG_BY), (2000, None), (2000, WRONG_BY)]
    assert asked[:6] == [(None, None), *((mib * MIB, wrong) for mib, wrong in shares)]
    assert [run.limit for run in runs] == ["none", "100%", "50%", "50%", "25%", "25%", "one row"]
    assert {run.num_probes_out_of_memory for run in runs} == {0}
    assert all(run.is_met for run in runs)


def test_the_smallest_limit_is_the_least_that_brim_does_not_refuse():
    def start(spec: Spec) -> Outcome:
        if spec.limit_bytes is not None and spec.limit_bytes < 1520 * MIB:
            raise RunFailed("brim.errors.InputError: rows do not fit even alone: row 3")
        return OUTCOME

    smallest = budget_runs(SPEC, "full", say=lambda line: None, start=start)[-1]
    assert (smallest.limit, smallest.goal, smallest.is_met) == ("one row", 1e-4, True)
    assert 520 * MIB <= smallest.tensor_bytes < 536 * MIB


def test_a_run_meets_its_goal_with_close_losses_and_few_failures_alone():
    by_limit = {
        5000 * MIB: replace(OUTCOME, losses=[2.0, 1.0 + 2e-5]),  # further than 1e-5
        3000 * MIB: replace(OUTCOME, num_out_of_memory=1),  # allowed to the wrong model alone
        2000 * MIB: replace(OUTCOME, plan={"launch": {"probes": [{"outcome": "out_of_memory"}] * 6}}),
    }

    def start(spec: Spec) -> Outcome:
        if spec.limit_bytes is not None and spec.limit_bytes < 1500 * MIB:
            raise RunFailed("killed")
        return by_limit.get(spec.limit_bytes or 0, OUTCOME)

    runs = budget_runs(SPEC, "lora", say=lambda line: None, start=start)
    assert [(run.limit, run.wrong_by, run.is_met) for run in runs] == [
        ("none", None, True),
        ("100%", None, False),
        ("50%", None, False),
        ("50%", WRONG_BY, True),
        ("25%", None, False),
        ("25%", WRONG_BY, False),  # six are too many
        ("one row", None, False),
    ]
    assert runs[-1].failure == "killed"
