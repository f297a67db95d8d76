"""What is compared of two runs, and how a difference is told."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from brim.train import RunFolder
from brim.workflows.verify_resume.comparison import Made, Promise, compared, promise_of, records_of, tensor_difference

BITS = Promise(states="bits", figures="bits", loss_tolerance=0.0, same_cut=True, why="")
CLOSE = Promise(states="open", figures="close", loss_tolerance=1e-2, same_cut=True, why="")
SETTINGS = {
    "precision": "fp32",
    "adapter": {"dropout": 0.1},
    "quantization": None,
    "trainer": {"optimizer": {"type": "adamw"}, "dropout_by_row": False},
}


def step(number, **changes):
    return {
        "step": number, "split": "train", "loss": 2.0, "learning_rate": 0.1, "effective_batch_size": 8,
        "num_micro_batches": 2, "num_samples": 8 * number, "num_tokens": 80 * number,
        "num_supervised_tokens": 8 * number, "seconds": 0.1, "peak_bytes": 1, **changes,
    }  # fmt: skip


def tensors():
    return {
        "model": {"a": torch.arange(4.0), "b": torch.ones(2, 2)},
        "optimizer": {"0.exp_avg": torch.full((4,), 0.5)},
        "random": {"cpu": torch.arange(8, dtype=torch.uint8)},
    }


@pytest.fixture
def make(tmp_path):
    """make(records=…, state=…, model=…, tokens=…): a run whose last step is 3."""

    def made(records=None, state=None, tokens=None, **changed):
        folder = RunFolder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
        checkpoint = folder.checkpoints / "step-00000003"
        checkpoint.mkdir(parents=True)
        lines = records if records is not None else [step(1), step(2), step(3)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, content in {**tensors(), **changed}.items():
            save_file(content, checkpoint / f"{name}.safetensors")
        state = {"train": {"step": 3}, "cutter": {"cap": {"now": 1}}, "logs": {"sha256": str(folder.path)}} | (
            state or {}
        )
        (checkpoint / "state.json").write_text(json.dumps(state))
        seen = {2: "x", 3: "y"} if tokens is None else tokens
        return Made(run=folder, tokens={number: frozenset(each) for number, each in seen.items()}, last_step=3)

    return made


def wrong(checks):
    return {check.name: check.difference for check in checks if not check.holds}


def test_times_and_where_checkpoints_were_written_are_no_difference(make):
    ours = make()
    theirs = make([step(1), step(2, seconds=9.0, peak_bytes=7), {"step": 2, "event": "checkpoint"}, step(3)])
    checks = compared(ours, theirs, BITS, after=1)
    assert [check.difference for check in checks] == [None] * len(checks)
    assert {check.name: check.compared for check in checks} == {
        "rows": "2 steps",
        "batch sizes": "2 steps",
        "micro-batches": "2 steps",
        "learning rates": "2 steps",
        "losses": "2 steps",
        "weights": "2 tensors",
        "optimizer": "1 tensor",
        "random states": "1 tensor",
        "counters": "2 values",
    }


@pytest.mark.parametrize(
    ("change", "name", "where"),
    [
        ({"loss": math.nextafter(2.0, 3)}, "losses", "step 2"),
        ({"learning_rate": 0.2}, "learning rates", "step 2"),
        ({"effective_batch_size": 4}, "batch sizes", "step 2"),
        ({"num_micro_batches": 1}, "micro-batches", "step 2"),
        ({"num_tokens": 1}, "rows", "num_tokens of step 2"),
        ({"noise_scale": 3.0}, "other records", "noise_scale of step 2"),
    ],
)
def test_each_figure_of_a_step_counts(make, change, name, where):
    found = wrong(compared(make(), make([step(1), step(2, **change), step(3)]), BITS, after=1))
    assert found.keys() == {name}
    assert found[name].where == where


def test_other_rows_of_the_same_number_of_tokens_are_seen(make):
    found = wrong(compared(make(), make(tokens={2: "x", 3: ["y", "z"]}), BITS, after=1))
    assert found["rows"].where == "tokens of step 3"
    cut_otherwise = replace(BITS, same_cut=False)
    assert wrong(compared(make(), make(tokens={2: "x", 3: ["y", "z"]}), cut_otherwise, after=1)) == {}


def test_a_step_or_an_event_too_few_or_too_many_is_a_difference(make):
    assert "losses" in wrong(compared(make(), make([step(1), step(2)]), BITS, after=1))
    switch = {"step": 3, "event": "schedule", "before": 4, "effective_batch_size": 8, "reason": "ramp"}
    found = wrong(compared(make(), make([step(1), step(2), switch, step(3)]), BITS, after=1))
    assert found["batch sizes"].where == "before of step 3"
    assert (found["batch sizes"].undisturbed, found["batch sizes"].disturbed) == ("nothing", "4")
    twice = [step(1), step(2), step(2), step(3)]
    assert "losses" in wrong(compared(make(), make(twice), BITS, after=1))


def test_the_first_value_that_differs_is_named_with_the_size_of_all(make):
    model = {"a": torch.tensor([0.0, 1.0, 2.5, 3.0]), "b": torch.tensor([[1.0, 1.0], [1.0, 3.0]])}
    found = wrong(compared(make(), make(model=model), BITS, after=1))["weights"]
    assert (found.where, found.undisturbed, found.disturbed, found.num) == ("a[2]", "2", "2.5", 2)
    assert (found.max_abs, found.relative) == (2.0, 2.0)  # of b, whose largest is 1


def test_counters_are_compared_and_digests_of_logs_are_not(make):
    found = wrong(compared(make(), make(state={"cutter": {"cap": {"now": 2}}}), BITS, after=1))
    assert found.keys() == {"counters"}
    assert found["counters"].where == "cutter.cap.now"


def test_off_the_cpu_losses_may_differ_a_little_and_rows_not_at_all(make):
    near, far = [step(1), step(2, loss=2.01), step(3)], [step(1), step(2, loss=2.03), step(3)]
    model = {"a": torch.arange(4.0) * 1.01, "b": torch.ones(2, 2)}
    checks = compared(make(), make(near, model=model), CLOSE, after=1)
    assert wrong(checks) == {}
    assert next(check for check in checks if check.name == "weights").difference is not None
    assert wrong(compared(make(), make(far), CLOSE, after=1)).keys() == {"losses"}
    assert wrong(compared(make(), make([step(1), step(2, num_tokens=1), step(3)]), CLOSE, after=1)).keys() == {"rows"}


@pytest.mark.parametrize(
    ("left", "right", "max_abs"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), 2.0**-23),
        (torch.tensor([1, 2]), torch.tensor([1, 4]), 2.0),
        (torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(4.0, dtype=torch.bfloat16), 1.0),
    ],
)
def test_a_tensor_is_equal_where_all_its_bits_are(left, right, max_abs):
    assert tensor_difference("t", left, left.clone()) is None
    found = tensor_difference("t", left, right)
    assert (found.num, found.max_abs) == (1, max_abs)


def test_what_cannot_be_subtracted_differs_without_a_size():
    random = torch.arange(4, dtype=torch.uint8)
    found = tensor_difference("cpu", random, random.flip(0))
    assert (found.where, found.undisturbed, found.disturbed, found.num, found.max_abs) == ("cpu[0]", "0", "3", 4, None)
    found = tensor_difference("t", torch.ones(2), torch.ones(3))
    assert (found.undisturbed, found.disturbed, found.max_abs) == ("(2,) torch.float32", "(3,) torch.float32", None)
    nan = torch.tensor([math.nan])
    assert tensor_difference("t", nan, nan.clone()) is None


def test_lines_that_are_none_are_passed_over(make):
    made = make()
    made.run.metrics.write_text('{\n[]\n3\n{"step": "x"}\n' + json.dumps(step(2)) + "\n")
    assert records_of(made.run, after=0, upto=9) == [step(2)]
    made.run.metrics.unlink()
    assert records_of(made.run, after=0, upto=9) == []


@pytest.mark.parametrize(
    ("changes", "device", "ran_out", "figures", "tolerance"),
    [
        ({}, "cpu", False, "bits", 0.0),
        ({"precision": "bf16-true"}, "cpu", False, "bits", 0.0),
        ({}, "NVIDIA H100", False, "close", 1e-5),
        ({"adapter": None}, "NVIDIA H100", False, "close", 1e-4),
        ({"precision": "bf16-mixed"}, "NVIDIA H100", False, "close", 1e-2),
        ({"quantization": {"bits": 4}}, "NVIDIA H100", False, "close", 1e-2),
        ({}, "cpu", True, "open", 0.0),
        ({"adapter": {"dropout": 0.0}}, "cpu", True, "close", 1e-5),
    ],
)
def test_what_is_promised_is_what_the_contract_says(changes, device, ran_out, figures, tolerance):
    promise = promise_of({**SETTINGS, **changes}, device=device, ran_out_of_memory=ran_out)
    assert (promise.figures, promise.loss_tolerance) == (figures, tolerance)
    assert promise.same_cut is not ran_out
    assert promise.of("plan") == "bits"
