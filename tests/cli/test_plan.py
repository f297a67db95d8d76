"""`brim plan`: a table for people, JSON for programs, and refusals before anything slow."""

from __future__ import annotations

import json
import re

import pytest

from brim.planning import TrainingPlan

# One way is left open: each way takes a few traces.
ONE_WAY = ("trainer.enable_gradient_checkpointing=false", "trainer.chunked_loss=false")
BY_LENGTH = ("trainer.batch_size=auto", "trainer.effective_batch_size=8", *ONE_WAY)
DATA = ("--dataset", "sums.jsonl")


def test_the_plan_is_a_table_in_80_columns(brim, project):
    done = brim("plan", "config.yaml", *BY_LENGTH, *DATA, "--device", "t4")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].endswith(": train, updates of 8 rows, on t4")
    assert lines[2].startswith("28 rows, ")
    assert max(map(len, lines)) <= 80
    (taken,) = [line for line in lines if line.startswith("→")]
    assert taken.split()[1:3] == ["off", "whole"]
    assert re.search(r"^why +the only way that is left open *$", done.out, flags=re.MULTILINE)
    assert re.search(r"^time +8 steps, about .* without evaluation \(estimated", done.out, flags=re.MULTILINE)


def test_the_plan_is_json_and_the_second_one_is_found(brim, project):
    arguments = ("plan", "config.yaml", *BY_LENGTH, "trainer.epochs=3", *DATA, "--device", "t4", "--json")
    first, second, third = (
        TrainingPlan.from_dict(json.loads(brim(*arguments, *more).out)) for more in ((), (), ("--replan",))
    )
    assert (first.effective_batch_size, first.total_steps, first.lengths.num_rows) == (8, 12, 28)
    assert [plan.from_cache for plan in (first, second, third)] == [False, True, False]
    assert second.candidates == first.candidates
    assert third.chosen is not None


def test_a_number_of_rows_is_planned_as_it_is(brim, project):
    done = brim("plan", "config.yaml", *ONE_WAY, *DATA, "--device", "t4", "--json")
    plan = TrainingPlan.from_dict(json.loads(done.out))
    assert plan.chosen is not None
    assert plan.chosen.widest is not None
    assert plan.chosen.widest[0] == 4
    assert plan.chosen.micro_batches_per_step == 7 / 4  # 28 rows in steps of 8, 8, 8 and 4


def test_what_fits_in_no_way_is_a_plan_too(brim, project):
    memory = ("--memory", "667MiB", "memory.margin=0")  # 666 MiB of it are the CUDA context
    done = brim("plan", "config.yaml", *BY_LENGTH, *DATA, *memory)
    assert done.code == 0
    assert re.search(r"^taken +none: no row is short enough *$", done.out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--device", "t4", "--memory", "14GiB"),
            "brim: command line: both --device and --memory are given\n"
            "  fix: keep one: a device's memory is known by its name\n",
        ),
        (("--memory", "14"), "brim: --memory: '14' is not a number of bytes with a unit\n"),
        (("--device", "a1000"), "brim: unknown device 'a1000'\n"),
        (("memory.budget=14",), "brim: override memory.budget=14: memory.budget is 14\n"),
        (
            ("trainer={type: none}",),
            "brim: trainer.type: there is nothing to plan: this configuration does not train\n",
        ),
        ((), "brim: there is no data set, and a plan depends on how long its rows are\n"),
    ],
)
def test_what_cannot_be_planned_is_refused(brim, project, options, message):
    done = brim("plan", "config.yaml", *options)
    assert done.code == 2
    assert done.out == ""
    assert message.removesuffix("\n") in done.err


@pytest.fixture
def config_alone(project, tiny_base):
    """A base model of which there is nothing but its config.json."""
    folder = project / "later"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_base / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("file", [False, True])
def test_rows_that_are_not_there_yet_are_planned_from_config_json_alone(brim, config_alone, file):
    base = f"base_model={config_alone / 'config.json' if file else config_alone}"
    rows = ("--rows", 42, "--sequence-length", 20)
    done = brim("plan", "config.yaml", *BY_LENGTH, base, *rows, "--device", "t4", "--json")
    assert done.code == 0, done.err
    plan = TrainingPlan.from_dict(json.loads(done.out))
    assert (plan.lengths.num_rows, plan.lengths.shortest, plan.lengths.longest) == (42, 20, 20)
    assert (plan.effective_batch_size, plan.total_steps, plan.total_samples) == (8, 12, 84)
    assert plan.chosen is not None
    assert (plan.chosen.padding, plan.chosen.widest) == (1.0, (8, 20))


def test_a_plan_of_rows_alike_is_that_of_data_alike(brim, project):
    (project / "alike.jsonl").write_text('{"question": "1 + 1 =", "answer": "2", "split": 0}\n' * 24)
    flags = ("plan", "config.yaml", *BY_LENGTH, "--device", "t4", "--json", "--replan")
    read = json.loads(brim(*flags, "--dataset", "alike.jsonl").out)
    length = read["lengths"]["longest"]
    made_up = json.loads(brim(*flags, "dataset=alike.jsonl", "--rows", 24, "--sequence-length", length).out)
    assert made_up == read


def test_the_memory_needs_config_json_alone(brim, config_alone):
    done = brim("memory", "config.yaml", f"base_model={config_alone}", "--device", "t4", "--json")
    assert done.code == 0
    assert json.loads(done.out)["fits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", 9, "--sequence-length", 9, *DATA), "brim: command line: both a data set and the size of one are"),
        (("--rows", 9), "brim: command line: --rows is given without --sequence-length\n"),
        (("--sequence-length", 9), "brim: command line: --sequence-length is given without --rows\n"),
        (("--rows", 9, "--sequence-length", 99_999), "sequence_length is 99,999, and the model's context is"),
        ((), "say how large it will be with --rows N --sequence-length N"),
    ],
)
def test_rows_and_their_length_come_together_and_instead_of_data(brim, project, options, message):
    done = brim("plan", "config.yaml", *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
