"""brim's losses against those of loops that others wrote, on a few rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.loop_overhead import TINY, Case, measure
from benchmarks.loss_equality import Bench, Scenario, compare

SCENARIO = Scenario(
    method="lora", optimizer={"type": "adamw", "weight_decay": 0.01}, decay="constant", num_rows=70
)  # two full batches and one of 6 rows


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"), base=None, num_rows=70, max_characters=300, pretraining_steps=12)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_losses_are_those_of_transformers_trainer(bench):
    reference = bench.brim(SCENARIO, micro_batch_rows=4)
    steps = bench.peer("transformers", SCENARIO, micro_batch_rows=8)
    assert len(steps.losses) == 3
    assert compare(SCENARIO, "peer", steps, "brim", reference, goal=1e-5).verdict == "equal"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_comparison_tells_a_mean_of_means_apart(bench):
    reference = bench.brim(SCENARIO, micro_batch_rows=4)
    settings = replace(SCENARIO.peers(), averages_micro_batches=True)
    steps = bench.peer("transformers", SCENARIO, micro_batch_rows=4, settings=settings)
    assert compare(SCENARIO, "peer", steps, "brim", reference, goal=1e-3).verdict == "NOT EQUAL"


def test_losses_are_those_of_a_bare_loop_to_the_bit(tmp_path):
    case = Case(
        name="tiny", shape=TINY, method="full", micro_batch_rows=8, num_steps=5, max_characters=200, counts=False
    )
    overhead = measure(case, tmp_path)  # asserts that each step's losses are equal
    assert overhead.num_steps == 3
