"""brim.verify_resume: from which step it is tried, what is compared and told; what was corrupted must be seen.

On runs of a tiny model, in forked processes.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from tests.gallery import usual

import brim
from brim.cli import main
from brim.errors import InputError
from brim.train import RunFolder
from brim.workflows.runs import TrainOrder, child
from brim.workflows.verify_resume import segment
from brim.workflows.verify_resume.comparison import Made, Promise, compared, promise_of, records_of, tensor_difference
from brim.workflows.verify_resume.run import Reach, Start, Trial, choose_start
from brim.workflows.verify_resume.segment import choose_disturbance, run_segment
from faults import several

# 16 steps of 8 rows.
RUN = Reach(total_steps=16, total_samples=128, largest_size=8, logged_steps=16)
CHECKPOINTS = {10: 80, 15: 120, 16: 128}


def test_the_newest_checkpoint_that_leaves_enough_steps_is_taken():
    for steps, from_step, checkpoint, start, num_steps in (
        (4, None, 10, 10, 4),
        (6, None, 10, 10, 6),
        (1, None, 15, 15, 1),
        (7, None, 0, 1, 7),
        (99, None, 0, 1, 15),
        (4, 12, 10, 12, 4),
        (4, 14, 10, 14, 2),
        (4, 15, 15, 15, 1),
        (4, 9, 0, 9, 4),
        (4, 0, 0, 1, 4),
    ):
        found = choose_start(CHECKPOINTS, RUN, steps=steps, from_step=from_step)
        assert found == Start(checkpoint=checkpoint, step=start, num_steps=num_steps)
        assert found.num_leading == start - checkpoint
    one = Reach(total_steps=1, total_samples=8, largest_size=8, logged_steps=1)
    for run, checkpoints, from_step, message in (
        (RUN, CHECKPOINTS, 16, "no step is left after step 16: the run has 16"),
        (RUN, CHECKPOINTS, 17, "no step is left after step 17: the run has 16"),
        (one, {1: 8}, None, r"no step is left after step 1: the run has 1\n.*a run of at least two steps"),
    ):
        with pytest.raises(InputError, match=message):
            choose_start(checkpoints, run, steps=4, from_step=from_step)
    # Where sizes are measured, 48 samples are three steps of 16 at least.
    for consumed, logged, left in ((80, 0, 3), (81, 0, 3), (128, 0, 0), (80, 17, 7), (80, 12, 3)):
        reach = Reach(total_steps=None, total_samples=128, largest_size=16, logged_steps=logged)
        assert reach.steps_left(10, consumed) == left


def test_it_is_disturbed_at_a_switch_and_amid_an_accumulation():
    for sizes, cuts, stop_after, kill_in in (
        ([8], [2], None, 11),
        ([8, 8], [2, 2], 11, 12),
        ([8, 8, 8], [2, 2, 2], 11, 12),
        ([8, 8, 8, 8], [2, 2, 2, 2], 11, 13),
        ([8] * 8, [2] * 8, 12, 15),
        ([8, 8, 8, 16], [2, 2, 2, 4], 13, 14),  # at the switch
        ([8, 16, 16, 16], [2, 4, 4, 4], 11, 12),
        ([8, 4, 8, 8], [2, 1, 2, 2], 11, 13),  # where there is a middle
        ([8, 8, 8, 8], [2, 1, 1, 1], 11, 13),  # the only such step lies before the stop
        ([8, 8, 8, 8], [1, 2, 1, 1], 11, 12),
    ):
        assert choose_disturbance(10, sizes, cuts) == (stop_after, kill_in)


@given(st.lists(st.tuples(st.sampled_from([4, 8]), st.integers(1, 3)), min_size=1, max_size=12))
def test_it_is_stopped_between_two_steps_and_killed_after_that(steps):
    sizes, cuts = zip(*steps, strict=True)
    stop_after, kill_in = choose_disturbance(0, sizes, cuts)
    stopped = stop_after or 0
    assert (stop_after is None) == (len(steps) == 1)
    assert 0 <= stopped < kill_in <= len(steps)
    if any(each > 1 for each in cuts[stopped:]):
        assert cuts[kill_in - 1] > 1


BITS = Promise(states="bits", figures="bits", loss_tolerance=0.0, same_cut=True, why="")
CLOSE = Promise(states="open", figures="close", loss_tolerance=1e-2, same_cut=True, why="")
SETTINGS = {"adapter": {"dropout": 0.1}, "trainer": {"optimizer": {"type": "adamw"}, "dropout_by_row": False}}
SETTINGS |= {"precision": "fp32", "quantization": None}
STEPS = ("rows", "batch sizes", "micro-batches", "learning rates", "losses")


def step(number, **changes):
    return {
        "step": number, "split": "train", "loss": 2.0, "learning_rate": 0.1, "effective_batch_size": 8,
        "num_micro_batches": 2, "num_samples": 8 * number, "num_tokens": 80 * number,
        "num_supervised_tokens": 8 * number, "seconds": 0.1, "peak_bytes": 1, **changes,
    }  # fmt: skip


@pytest.fixture
def make(tmp_path):
    """make(records=…, state=…, model=…, tokens=…): a run whose last step is 3."""

    def made(records=None, state=None, tokens=None, **changed):
        folder = RunFolder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
        checkpoint = folder.checkpoints / "step-00000003"
        checkpoint.mkdir(parents=True)
        lines = records if records is not None else [step(1), step(2), step(3)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tensors = {
            "model": {"a": torch.arange(4.0), "b": torch.ones(2, 2)},
            "optimizer": {"0.exp_avg": torch.full((4,), 0.5)},
            "random": {"cpu": torch.arange(8, dtype=torch.uint8)},
        }
        for name, content in {**tensors, **changed}.items():
            save_file(content, checkpoint / f"{name}.safetensors")
        usually = {"train": {"step": 3}, "cutter": {"cap": {"now": 1}}, "logs": {"sha256": str(folder.path)}}
        (checkpoint / "state.json").write_text(json.dumps({**usually, **(state or {})}))
        seen = {2: "x", 3: "y"} if tokens is None else tokens
        return Made(run=folder, tokens={number: frozenset(each) for number, each in seen.items()}, last_step=3)

    return made


def wrong(checks):
    return {check.name: check.difference for check in checks if not check.holds}


def places(make, theirs, promise=BITS):
    """Where another run differs from the usual one, by the name of the check."""
    found = wrong(compared(make(), theirs, promise, after=1))
    return {name: difference.where for name, difference in found.items()}


def test_times_checkpoints_and_lines_of_others_are_no_difference(make):
    theirs = make([step(1), step(2, seconds=9.0, peak_bytes=7), {"step": 2, "event": "checkpoint"}, step(3)])
    with theirs.run.metrics.open("a") as file:
        file.write('{\n[]\n3\n{"step": "x"}\n')
    checks = compared(make(), theirs, BITS, after=1)
    assert [check.difference for check in checks] == [None] * len(checks)
    states = {"weights": "2 tensors", "optimizer": "1 tensor", "random states": "1 tensor", "counters": "2 values"}
    assert {check.name: check.compared for check in checks} == dict.fromkeys(STEPS, "2 steps") | states
    theirs.run.metrics.unlink()
    assert records_of(theirs.run, after=0, upto=9) == []


def test_each_figure_of_a_step_counts(make):
    for change, name, where in (
        ({"loss": math.nextafter(2.0, 3)}, "losses", "step 2"),
        ({"learning_rate": 0.2}, "learning rates", "step 2"),
        ({"effective_batch_size": 4}, "batch sizes", "step 2"),
        ({"num_micro_batches": 1}, "micro-batches", "step 2"),
        ({"num_tokens": 1}, "rows", "num_tokens of step 2"),
        ({"noise_scale": 3.0}, "other records", "noise_scale of step 2"),
    ):
        assert places(make, make([step(1), step(2, **change), step(3)])) == {name: where}
    assert places(make, make(state={"cutter": {"cap": {"now": 2}}})) == {"counters": "cutter.cap.now"}
    other_rows = make(tokens={2: "x", 3: ["y", "z"]})  # of the same number of tokens
    assert places(make, other_rows) == {"rows": "tokens of step 3"}
    assert places(make, other_rows, replace(BITS, same_cut=False)) == {}


def test_a_step_or_an_event_too_few_or_too_many_is_a_difference(make):
    for records in ([step(1), step(2)], [step(1), step(2), step(2), step(3)]):
        assert "losses" in places(make, make(records))
    switch = {"step": 3, "event": "schedule", "before": 4, "effective_batch_size": 8, "reason": "ramp"}
    found = wrong(compared(make(), make([step(1), step(2), switch, step(3)]), BITS, after=1))["batch sizes"]
    assert (found.where, found.undisturbed, found.disturbed) == ("before of step 3", "nothing", "4")


def test_the_first_value_that_differs_is_named_with_the_size_of_all(make):
    model = {"a": torch.tensor([0.0, 1.0, 2.5, 3.0]), "b": torch.tensor([[1.0, 1.0], [1.0, 3.0]])}
    found = wrong(compared(make(), make(model=model), BITS, after=1))["weights"]
    assert (found.where, found.undisturbed, found.disturbed, found.num) == ("a[2]", "2", "2.5", 2)
    assert (found.max_abs, found.relative) == (2.0, 2.0)  # of b, whose largest is 1


def test_off_the_cpu_losses_may_differ_a_little_and_rows_not_at_all(make):
    def checked(**others):
        return compared(make(), make([step(1), step(2, **others), step(3)], model=model), CLOSE, after=1)

    model = {"a": torch.arange(4.0) * 1.01, "b": torch.ones(2, 2)}
    assert wrong(checked(loss=2.01)) == {}
    assert next(check for check in checked(loss=2.01) if check.name == "weights").difference is not None
    assert wrong(checked(loss=2.03)).keys() == {"losses"}
    assert wrong(checked(num_tokens=1)).keys() == {"rows"}


def test_a_tensor_is_equal_where_all_its_bits_are():
    for left, right, max_abs in (
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), 2.0**-23),
        (torch.tensor([1, 2]), torch.tensor([1, 4]), 2.0),
        (torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(4.0, dtype=torch.bfloat16), 1.0),
    ):
        assert tensor_difference("t", left, left.clone()) is None
        found = tensor_difference("t", left, right)
        assert (found.num, found.max_abs) == (1, max_abs)
    random = torch.arange(4, dtype=torch.uint8)  # what cannot be subtracted differs without a size
    found = tensor_difference("cpu", random, random.flip(0))
    assert (found.where, found.undisturbed, found.disturbed, found.num, found.max_abs) == ("cpu[0]", "0", "3", 4, None)
    found = tensor_difference("t", torch.ones(2), torch.ones(3))
    assert (found.undisturbed, found.disturbed, found.max_abs) == ("(2,) torch.float32", "(3,) torch.float32", None)
    nan = torch.tensor([math.nan])
    assert tensor_difference("t", nan, nan.clone()) is None


def test_what_is_promised_is_what_the_contract_says():
    for changes, device, ran_out, figures, tolerance in (
        ({}, "cpu", False, "bits", 0.0),
        ({"precision": "bf16-true"}, "cpu", False, "bits", 0.0),
        ({}, "NVIDIA H100", False, "close", 1e-5),
        ({"adapter": None}, "NVIDIA H100", False, "close", 1e-4),
        ({"precision": "bf16-mixed"}, "NVIDIA H100", False, "close", 1e-2),
        ({"quantization": {"bits": 4}}, "NVIDIA H100", False, "close", 1e-2),
        ({}, "cpu", True, "open", 0.0),
        ({"adapter": {"dropout": 0.0}}, "cpu", True, "close", 1e-5),
    ):
        promise = promise_of({**SETTINGS, **changes}, device=device, ran_out_of_memory=ran_out)
        assert (promise.figures, promise.loss_tolerance) == (figures, tolerance)
        assert promise.same_cut is not ran_out
        assert promise.of("plan") == "bits"


NUM_STEPS = 12


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "sums.csv"
    lines = [f"add {n % 7} and {n % 11} =,{n % 7 + n % 11},{0 if n % 10 < 7 else 1}" for n in range(40)]
    path.write_text("question,answer,split\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(tiny_base, rows, tmp_path_factory):
    """A finished run: of 28 rows, in four steps of 4, then of 8, the last of an epoch of what is left. Never written to."""
    trainer = {"train_steps": NUM_STEPS, "batch_size": 2, "batch_schedule": "0sp:4 16sp:8", "learning_rate": 0.05}
    config = usual(
        tiny_base,
        adapter={"type": "lora", "dropout": 0.1},
        trainer={**trainer, "steps_per_checkpoint": 3, "early_stop": 1},
    )
    del config["trainer"]["epochs"]
    run = tmp_path_factory.mktemp("whole") / "run"
    brim.Model(config).train(rows, output_directory=run)
    return run


@pytest.fixture
def forked(monkeypatch):
    """Processes are forked from this one, which has the libraries. What a test changes holds in them, too."""
    monkeypatch.setattr(child, "_process", several.forked)


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Where the copies go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def digests(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.run
def test_a_run_is_the_same_over_a_switch_of_its_batch_size_and_is_only_read(whole, temporary, forked):
    before, told = digests(whole), []
    proof = brim.verify_resume(whole, say=told.append)
    assert (proof.holds, [check.difference for check in proof.checks]) == (True, [None] * len(proof.checks))
    assert (proof.device, proof.precision, proof.promise.states) == ("cpu", "fp32", "bits")
    # The checkpoints are those of steps 9 and 12, of 12: neither leaves four steps.
    assert (proof.checkpoint_step, proof.start_step, proof.num_steps) == (0, 1, 4)
    assert proof.effective_batch_sizes == (4, 4, 4, 8)
    assert (proof.stopped_after, proof.killed_in, proof.killed_where) == (4, 5, "between its micro-batches")
    compared = {check.name: check.compared for check in proof.checks}
    assert compared.keys() >= {*STEPS, "evaluations", "random states", "counters"}
    # A and B of q_proj and v_proj in two layers; two moments and a count of each.
    amounts = (compared["losses"], compared["weights"], compared["optimizer"])
    assert amounts == ("4 steps", "8 tensors", "24 tensors")
    assert proof.own_log == "has the same figures for 4 of these steps"
    assert "(Ctrl-C) after step 4" in told[4]
    assert digests(whole) == before
    assert list(temporary.iterdir()) == []


@pytest.mark.run
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_that_train_together_are_tried_together(whole, temporary, forked, strategy):
    told, processes = [], ["backend.trainer.num_workers=2", f"backend.trainer.strategy={strategy}"]
    proof = brim.verify_resume(whole, from_step=9, steps=2, overrides=processes, say=told.append)
    assert (proof.holds, [check.difference for check in proof.checks]) == (True, [None] * len(proof.checks))
    assert (proof.num_processes, proof.promise.states) == (2, "bits")
    assert (proof.start_step, proof.stopped_after, proof.killed_in) == (9, 10, 11)
    compared = {check.name: check.compared for check in proof.checks}
    assert (compared["losses"], compared["weights"], compared["optimizer"]) == ("2 steps", "8 tensors", "24 tensors")
    assert "made by 1 process, and it is tried with 2 processes: --gpus 1 tries those" in told[1]
    assert "in 4 starts of 2 processes that each load the model" in told[3]
    assert list(temporary.iterdir()) == []


@pytest.mark.run
def test_a_resumption_that_forgets_something_is_found_out(whole, temporary, forked, monkeypatch, capfd):
    monkeypatch.setattr("brim.train.loop.restore_optimizer", lambda *arguments: None)
    monkeypatch.setattr("brim.train.loop.restore_random_states", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", ["brim", "verify-resume", str(whole), "--from-step=9", "--steps=2", "--json"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 1
    proof = json.loads(capfd.readouterr().out)
    assert proof["holds"] is False
    wrong = {check["name"]: check["difference"] for check in proof["checks"] if not check["holds"]}
    assert wrong.keys() >= {"optimizer", "random states", "weights", "losses"}
    assert wrong.keys().isdisjoint({"rows", "batch sizes", "micro-batches", "learning rates"})
    assert wrong["losses"]["where"] == "step 11"  # the one after the stop, with other dropout
    assert ".exp_avg" in wrong["optimizer"]["where"]
    assert "cpu" in wrong["random states"]["where"]
    assert wrong["weights"]["max_abs"] > 0
    assert list(temporary.iterdir()) == []


def flip(run, step):
    file = run / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.run
def test_a_damaged_checkpoint_is_passed_over_and_none_that_is_whole_is_an_error(
    whole, temporary, monkeypatch, tmp_path
):
    copy = shutil.copytree(whole, tmp_path / "run")
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    starts, told = [], []
    monkeypatch.setattr(Trial, "proof", lambda trial: starts.append(trial._start) or stop())
    with pytest.raises(KeyboardInterrupt):
        brim.verify_resume(copy, steps=3)
    flip(copy, 9)
    with pytest.raises(KeyboardInterrupt):
        brim.verify_resume(copy, steps=3, say=told.append)
    assert [(start.checkpoint, start.step) for start in starts] == [(9, 9), (0, 1)]
    assert told[0] == "the checkpoint of step 9 is damaged, and is passed over"
    flip(copy, 12)
    with pytest.raises(
        brim.errors.CheckpointError, match="no whole checkpoint is left: those of steps 9, 12 are damaged"
    ):
        brim.verify_resume(copy, steps=3)


def stop(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.run
def test_ctrl_c_leaves_no_folder_behind_unless_it_is_to_be_kept(whole, temporary, monkeypatch):
    monkeypatch.setattr(segment, "run_child", stop)
    for keep in (False, True):
        told = []
        with pytest.raises(KeyboardInterrupt):
            brim.verify_resume(whole, keep=keep, say=told.append)
        kept = [f"both runs, and what their processes printed, are kept in {each}" for each in temporary.iterdir()]
        assert kept == (told[-1:] if keep else [])


@pytest.mark.process
def test_a_real_process_hands_its_error_on(tmp_path):
    (tmp_path / "config.yaml").write_text("base_modle: x\n")
    order = TrainOrder(config=str(tmp_path / "config.yaml"), overrides=(), output_directory="", resume=True)
    with pytest.raises(brim.ConfigError, match=r"config.yaml:1: .*unknown key base_modle\n.*did you mean base_model\?"):
        run_segment(order, tmp_path / "log.txt", stop_after=1)


@pytest.mark.run
def test_a_number_that_is_none_a_busy_folder_and_too_little_room_are_told_beforehand(whole, temporary, monkeypatch):
    """What else may be wrong stands in faults/mistakes.py."""
    for options, place in (({"steps": 0}, "--steps: 0 "), ({"from_step": -1}, "--from-step: -1 ")):
        with pytest.raises(brim.InputError, match=f"{place}is not a number of steps"):
            brim.verify_resume(whole, **options)
    descriptor = os.open(whole, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(brim.InputError, match="a process is training in this folder"):
            brim.verify_resume(whole)
    finally:
        os.close(descriptor)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(brim.errors.OutputError, match="1000 B left") as raised:
        brim.verify_resume(whole)
    assert raised.value.exit_code == 2
    assert list(temporary.iterdir()) == []


@pytest.mark.run
def test_other_rows_are_refused_also_where_the_run_begins_anew(whole, rows, temporary, forked, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text(rows.read_text().replace("add 1", "sub 1"))
    with pytest.raises(brim.errors.OutputError, match=r"rows are not those that this run was started with") as raised:
        brim.verify_resume(whole, steps=1, from_step=1, dataset=other)
    assert raised.value.problems[0].where == str(whole)
