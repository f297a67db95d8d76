"""A run whose memory runs out, or whose loss is not finite, ends as the run that was spared, or before an update."""

import math
import re
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.batching.cost_examples import linear_costs
from tests.train.scarce import LENGTHS, OUT, Given, Run, Shortage, Watched, apart, equal

from brim.batching import ByLength
from brim.config.schema import GradientClippingConfig
from brim.data.tokens import TokenRows
from brim.errors import BrimError, CheckpointError, OutOfMemoryError, Problem
from brim.models.loss import NextToken
from brim.train import RunFolder, clip_gradients, gradient, update as weight_update
from brim.train.checkpoints import TrainState, checkpoint as checkpoint_module
from brim.train.update import NotFinite, for_a_row, for_an_update
from brim.workflows.training.training import _what_went_wrong


def out():
    return torch.OutOfMemoryError(OUT + "\nSee the documentation.")


def adam(weights):
    return torch.optim.Adam(weights, lr=0.0)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The undisturbed run of a configuration, trained once."""
    runs = {}

    def trained(**settings):
        key = repr(sorted(settings.items()))
        if key not in runs:
            runs[key] = Run(tmp_path_factory.mktemp("clean"), **settings).train()
        return runs[key]

    return trained


def assert_same(runs, expected):
    """The losses of runs, one after the other, and the last one's weights are to the bit those of another run."""
    assert [loss for run in runs for loss in run.log.losses] == expected.log.losses
    assert equal(runs[-1].weights, expected.weights)


def failed(run, error=OutOfMemoryError, **match):
    """The problem with which a run ends."""
    with pytest.raises(error, **match) as caught:
        run.train()
    assert type(caught.value) is error
    assert caught.value.exit_code == 1
    return caught.value.problems[0]


def test_a_step_does_beside_its_passes_what_it_needs_once(tmp_path, clean, monkeypatch):
    """By counts: between passes of the model, what takes 10 microseconds by itself takes 50."""
    happened = []

    def watch(owner, name, what):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: happened.append(what) or original(*given, **named))

    run, expected = Run(tmp_path, copy_room_bytes=0), clean()  # no thread writes a checkpoint meanwhile
    watch(TokenRows, "__getitem__", "row")
    watch(TokenRows, "take", "rows")
    watch(gradient, "collate", "pad")
    watch(NextToken, "loss", "pass")
    watch(torch.Tensor, "backward", "backward")
    watch(torch, "get_rng_state", "states")
    for walk in ("modules", "named_modules", "parameters", "named_parameters", "train"):
        watch(torch.nn.Module, walk, "walk")
    watch(run.log, "write", "record")
    watch(run.job.optimizer, "step", "update")
    for read in ("tolist", "item", "cpu", "numpy", "__float__", "__bool__"):
        watch(torch.Tensor, read, "read")
    assert_same([run.train()], expected)
    steps = [part.strip() for part in " ".join(happened).split("record") if "pass" in part]  # others are checkpoints
    for num_rows, each in zip([8, 8, 4] * 2, steps, strict=True):
        num_micro_batches = num_rows // 2
        passes = ["pad"] * num_micro_batches + ["pass", "backward"] * num_micro_batches
        expected_of_it = ["rows", "states", *passes, "read"]
        assert each[: each.index("update")].split() == expected_of_it


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_losses_are_those_of_the_clean_run_and_to_the_bit_those_of_one_with_the_same_cuts(
    tmp_path, clean, place, micro_batch
):
    scarce = Run(tmp_path / "scarce")
    Shortage(scarce.model, **{place: [4 + micro_batch]})  # micro-batches of two rows: four in the first step
    scarce.train()
    assert scarce.loop.num_out_of_memory == 1
    np.testing.assert_allclose(scarce.log.losses, clean().log.losses, rtol=1e-5)
    assert apart(scarce.weights, clean().weights) < 1e-5
    assert_same([scarce], Run(tmp_path / "same", cutter=Given(scarce.cutter.cuts)).train())
    assert [step["num_micro_batches"] for step in scarce.log.steps] == [4, 8, 4, 8, 8, 4]
    assert [step["num_micro_batches"] for step in clean().log.steps] == [4, 4, 2, 4, 4, 2]
    for counted in ("num_samples", "num_tokens", "num_supervised_tokens", "effective_batch_size", "learning_rate"):
        assert [s[counted] for s in scarce.log.steps] == [s[counted] for s in clean().log.steps]
    # What happened is written with the keys of the rows, before the step that it happened in.
    second = scarce.log.records.index(scarce.log.steps[1])
    rows = scarce.log.events[0]["rows"]
    assert len(rows) == 2
    assert scarce.log.events == [
        {"step": 2, "event": "oom", "where": place, "micro_batch": micro_batch, "num_micro_batches": 4, "rows": rows,
         "padded_length": max(LENGTHS[key - 100] for key in rows), "predicted_bytes": None, "message": OUT},
        {"step": 2, "event": "cap", "before": 2, "after": 1, "unit": "rows"},
        {"step": 2, "event": "replay", "num_micro_batches": 8},
    ]  # fmt: skip
    assert scarce.log.records[second - 3 : second] == scarce.log.events


@pytest.mark.parametrize("settings", [{"dropout": 0.5}, {"kind": "fp16-mixed"}], ids=str)
def test_dropout_and_the_loss_scale_of_fp16_are_those_of_a_run_with_the_same_cuts(tmp_path, settings):
    scarce = Run(tmp_path / "scarce", **settings)
    Shortage(scarce.model, forward=[6], backward=[1])
    scarce.train()
    assert scarce.loop.num_out_of_memory == 2
    same = Run(tmp_path / "same", **settings, cutter=Given(scarce.cutter.cuts)).train()
    assert_same([scarce], same)
    scales = [run.newest().state["train"]["loss_scaler"] for run in (scarce, same)]
    assert scales[0] == scales[1]


def test_one_kernel_leaves_out_what_overflows_and_goes_on_from_a_state_of_many(tmp_path):
    """On a CPU, whose kernel is told of the scale and of what was found as a GPU's is."""
    runs = []
    for fused, stop_after, checkpoint in ((False, None, None), (True, None, None), (False, 3, None), (True, None, 3)):
        first = runs[-1].newest() if checkpoint else None
        run = Run(
            tmp_path / str(len(runs)), kind="fp16-mixed", stop_after=stop_after, checkpoint=first,
            optimizer=lambda weights, fused=fused: torch.optim.Adam(weights, lr=0.0, fused=fused),
        )  # fmt: skip
        if checkpoint is None:
            run.loop._scaler._init_scale = 2.0**19
        with pytest.raises(KeyboardInterrupt) if stop_after else nullcontext():
            run.train()
        runs.append(run)
    many, one, begun, resumed = runs
    assert [event["event"] for event in many.log.events] == ["overflow"]
    assert one.log.events == many.log.events
    for losses in (one.log.losses, begun.log.losses + resumed.log.losses):
        assert losses == pytest.approx(many.log.losses, rel=1e-5)


def test_a_run_that_was_stopped_goes_on_to_the_bit_also_across_what_ran_out(tmp_path):
    """The sixth pass, the second of the second step, runs out: in the first session or in the second."""
    settings = {"optimizer": adam, "dropout": 0.2}
    whole = Run(tmp_path / "whole", **settings)
    Shortage(whole.model, forward=[6])
    whole.train()
    for stop_after in (1, 2, 3, 4):
        folder = tmp_path / f"parts{stop_after}"
        first = Run(folder, **settings, stop_after=stop_after)
        shortage = Shortage(first.model, forward=[6])
        with pytest.raises(KeyboardInterrupt):
            first.train()
        torch.manual_seed(999)
        second = Run(folder, **settings, checkpoint=first.newest())
        Shortage(second.model, forward=[6 - shortage.num_passes])
        second.train()
        assert_same([first, second], whole)
        assert second.cutter.state() == whole.cutter.state()
        assert second.newest().state["cutter"] == whole.newest().state["cutter"]


def test_another_plan_or_an_older_checkpoint_begins_with_its_own_limit(tmp_path):
    first = Run(tmp_path, stop_after=2)
    Shortage(first.model, forward=[6])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    checkpoint = first.newest()
    run = Run(tmp_path, checkpoint=checkpoint)
    assert run.cutter.max_rows == 1
    run.cutter.restore(Watched(max_rows=2).state())
    run.loop.restore(checkpoint, keep_cutter=False)
    assert run.cutter.max_rows == 2
    del checkpoint.state["cutter"], checkpoint.state["owes_evaluation"]  # of a version before
    run.loop.restore(checkpoint)
    assert run.cutter.max_rows == 2
    assert run.train().log.steps[0]["step"] == 3


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_row_that_never_fits_is_named_and_what_was_learned_before_is_saved(tmp_path, clean, place):
    run = Run(tmp_path, epochs=1)
    Shortage(run.model, **{place: range(6, 100)})
    problem = failed(run)
    (key,) = run.log.events[-1]["rows"]
    assert run.log.events[-1]["event"] == "oom"
    assert problem.what.startswith(f"row {key} (numbered from 0) ({LENGTHS[key - 100]} tokens) ran out of memory twice")
    assert f"in the {place} pass, with nothing beside it: {OUT}" in problem.what
    assert problem.where == "step 2"
    assert problem.fix.endswith("The checkpoint of step 1 holds all that was learned")
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert run.newest().step == 1
    rest = Run(tmp_path, checkpoint=run.newest(), cutter=Given(clean().cutter.cuts[1:])).train()
    assert_same([run, rest], clean())


def test_predicted_bytes_are_named_with_the_limit_and_peaks_kept_by_shape(tmp_path):
    def cutter(bytes_per_token, cap_bytes):
        return ByLength(costs=linear_costs(bytes_per_token=bytes_per_token, static_bytes=0), cap_bytes=cap_bytes)

    run = Run(tmp_path / "failed", cutter=cutter(1024, 15 * 1024), lengths=[10], size=1)
    Shortage(run.model, forward=[1, 2])
    problem = failed(
        run, match=r"step 1: row 100 .* twice .*\.; predicted: 10\.0 KiB; limit of a micro-batch: 15\.0 KiB"
    )
    assert problem.fix.endswith("Nothing had been learned yet")
    assert run.store.steps() == []
    run = Run(tmp_path / "run", cutter=cutter(10, 300))
    Shortage(run.model, forward=[1])
    peaks = run.train().loop.peaks
    assert run.loop.num_out_of_memory == 1
    assert peaks
    assert all(peak.measured_bytes is None for peak in peaks)
    assert all(peak.predicted_bytes == 10 * peak.rows * peak.padded_length <= 300 for peak in peaks)
    assert len({(peak.rows, peak.padded_length) for peak in peaks}) == len(peaks)


# Memory that runs out beside the forward and backward passes: no half update, nothing lost that can be kept


class HalfAnUpdate(torch.optim.Adam):
    """Runs out of memory in its step of this number, when half of the weights have been updated."""

    def __init__(self, weights, fails_at=None):
        super().__init__(weights, lr=0.0)
        self.num_steps, self.fails_at = 0, fails_at

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps != self.fails_at:
            return super().step(closure)
        (group,) = self.param_groups
        for weight in group["params"][::2]:
            weight.data += 1.0
        raise out()


@pytest.mark.parametrize(
    ("fails_at", "left"),
    [
        (1, "Nothing had been learned yet"),
        (2, "There is no checkpoint yet: what was learned in 1 step is lost"),
        (4, "The checkpoint of step 3 holds all that was learned before; --resume continues from it"),
        (5, "--resume continues from the checkpoint of step 3, and does 1 step again"),
    ],
)
def test_a_half_update_goes_nowhere_and_the_run_continues_from_before(tmp_path, clean, fails_at, left):
    run = Run(tmp_path, optimizer=lambda weights: HalfAnUpdate(weights, fails_at))
    problem = failed(run)
    words = "memory ran out in the optimizer's own step; the weights, which may be half updated, are not saved: " + OUT
    assert (problem.what, problem.where) == (words, f"step {fails_at}")
    assert problem.fix.endswith(left)
    assert "adamw_8bit" in problem.fix
    checkpoint = run.newest()
    assert (checkpoint and checkpoint.step) == (3 if fails_at > 3 else None)
    rest = Run(tmp_path, optimizer=HalfAnUpdate, checkpoint=checkpoint).train()
    done, whole = checkpoint.step if checkpoint else 0, clean(optimizer=HalfAnUpdate)
    assert run.log.losses[:done] + rest.log.losses == whole.log.losses
    assert equal(rest.weights, whole.weights)


def failing(monkeypatch, module, name, fails_at, raised=None):
    """The module's function of this name runs out of memory in calls of these numbers, from 1."""
    calls, whole = [], getattr(module, name)

    def call(*given):
        calls.append(name)
        if len(calls) in fails_at:
            raise raised or out()
        return whole(*given)

    monkeypatch.setattr(module, name, call)


def failing_save(monkeypatch, fails_at, raised=None):
    failing(monkeypatch, checkpoint_module, "save_file", fails_at, raised)


def test_the_norm_and_saving_are_tried_once_more(tmp_path, clean, monkeypatch):
    clean()
    failing(monkeypatch, weight_update, "gradient_norm", {2})
    failing_save(monkeypatch, {2}, out())
    run = Run(tmp_path).train()
    assert run.log.events == [
        {"step": step, "event": "oom", "where": where, "message": OUT}
        for step, where in ((2, "gradient norm"), (3, "checkpoint"))
    ]
    assert_same([run], clean())
    assert (run.newest().step, run.store.load(3).step) == (6, 3)


@pytest.mark.parametrize(("name", "fails_at"), [("gradient_norm", {2, 3}), ("clip", {2})])
def test_a_gradient_that_cannot_be_clipped_ends_the_run_with_the_state_from_before(
    tmp_path, clean, monkeypatch, name, fails_at
):
    whole, run = clean(dropout=0.2), Run(tmp_path, dropout=0.2)
    with monkeypatch.context() as patch:
        failing(patch, weight_update, name, fails_at)
        problem = failed(run, match="step 2: memory ran out when the gradient was clipped")
    assert problem.fix.endswith("The checkpoint of step 1 holds all that was learned")
    assert run.newest().step == 1
    assert_same([run, Run(tmp_path, dropout=0.2, checkpoint=run.newest()).train()], whole)


class Evaluation:
    """The model's loss on one row, which runs out of memory in calls of these numbers, from 1."""

    def __init__(self, fails_at=()):
        self.run, self.num_calls, self.fails_at = None, 0, fails_at

    def __call__(self):
        self.num_calls += 1
        if self.num_calls in self.fails_at:
            raise OutOfMemoryError(Problem(what="evaluation of a single row", fix="less"))
        with torch.no_grad():
            logits = self.run.model.eval()(input_ids=torch.tensor([[5, 6, 7]])).logits
        return {"validation": {"loss": float(logits.logsumexp(-1).sum())}}


def evaluated_run(folder, fails_at=(), **settings):
    evaluation = Evaluation(fails_at)
    evaluation.run = Run(folder, evaluate=evaluation, **settings)
    return evaluation.run


def scores(run):
    return [(record["step"], record["loss"]) for record in run.log.records if record.get("split") == "validation"]


def test_a_gpus_counter_is_read_once_a_step_and_loading_and_evaluation_count_in_the_most_bytes(tmp_path, monkeypatch):
    counted, reads = [150], []
    monkeypatch.setattr("brim.train.logs.peak_bytes", lambda device: reads.append(counted[0]) or counted[0])
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: counted.__setitem__(0, 0))
    run = evaluated_run(tmp_path)
    monkeypatch.setattr(run.loop._peaks, "_device", torch.device("cuda"))
    took = iter([100] * 10 + [700] + [200] * 10 + [100])  # by forward passes; the eleventh is of the evaluation
    run.model.register_forward_hook(lambda *given: counted.__setitem__(0, max(counted[0], next(took))))
    run.train()
    assert [step["peak_bytes"] for step in run.log.steps] == [150, 150, 150, 700, 700, 700]
    assert len(reads) == 1 + 6 + 2


def test_an_evaluation_that_cannot_be_had_is_owed_by_the_run_that_goes_on(tmp_path):
    whole, modes = evaluated_run(tmp_path / "clean"), set()
    whole.model.lm_head.register_forward_hook(lambda head, *_: modes.add((torch.is_grad_enabled(), head.training)))
    whole.train()
    assert modes == {(True, True), (False, False)}  # the model trains again after an evaluation, all of it
    run = evaluated_run(tmp_path / "run", {1})
    problem = failed(run, match="evaluation of a single row")
    assert problem.fix == "less. The checkpoint of step 3 holds all that was learned"
    failed(evaluated_run(tmp_path / "run", {1}, checkpoint=run.newest()), match="evaluation of a single row")
    shutil.copytree(tmp_path / "run", tmp_path / "stopped")
    owing = run.newest()
    rest = evaluated_run(tmp_path / "run", checkpoint=owing).train()
    assert_same([run, rest], whole)
    assert scores(rest) == scores(whole)
    assert rest.newest().state["train"] == whole.newest().state["train"]
    assert rest.newest().state["owes_evaluation"] is False
    stopped = evaluated_run(tmp_path / "stopped", checkpoint=owing, stop_after=4)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4"):
        stopped.train()
    paid = stopped.store.load(3).state  # what was owed is saved with its outcome
    assert (paid["train"]["best_step"], paid["owes_evaluation"]) == (3, False)


def test_a_save_that_fails_twice_ends_the_run_and_leaves_the_checkpoint_before_it(tmp_path, clean, monkeypatch):
    run = Run(tmp_path)
    with monkeypatch.context() as patch:
        failing_save(patch, {4, 5}, MemoryError())  # three files a checkpoint
        problem = failed(run)
    assert problem.what == "memory ran out twice when the checkpoint of step 6 was written: MemoryError"
    assert problem.fix.endswith("--resume continues from the checkpoint of step 3, and does 3 steps again")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert equal(Run(tmp_path, checkpoint=run.newest()).train().weights, clean().weights)


def test_where_the_last_save_fails_too_both_are_told(tmp_path, monkeypatch):
    run = Run(tmp_path)
    failing(monkeypatch, weight_update, "clip", {2})
    failing_save(monkeypatch, {1}, OSError(28, "No space left on device"))
    with pytest.raises(OutOfMemoryError) as caught:
        run.train()
    first, second = caught.value.problems
    assert first.what.startswith("memory ran out when the gradient was clipped")
    assert "holds all that was learned" not in first.fix
    assert second.what.startswith("the checkpoint of step 1 could not be written")
    assert run.newest() is None


def hold_writes(monkeypatch, run, *, until):
    """Have each thread that writes a checkpoint wait until a later step is made, or until the run waits for it."""
    goes_on, held = threading.Event(), []
    save, write, wait = run.store.save, run.log.write, checkpoint_module.wait

    def hold(step, **what):
        if threading.current_thread() is not threading.main_thread():
            held.append(step)
            assert goes_on.wait(60)
            goes_on.clear()
        save(step, **what)

    def hear(record):
        write(record)
        if until == "a later step" and held and run.loop.state.step > held[-1]:
            goes_on.set()

    def waits(futures):
        goes_on.set()
        return wait(futures)

    monkeypatch.setattr(run.store, "save", hold)
    monkeypatch.setattr(run.log, "write", hear)
    monkeypatch.setattr(checkpoint_module, "wait", waits)
    return held


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


THREE = {"dropout": 0.2, "optimizer": adam, "steps_per_checkpoint": 2}  # checkpoints, the last where the run ends


@pytest.mark.parametrize("until", ["a later step", "the run waits"])
def test_training_goes_on_while_the_state_is_written_as_it_was(tmp_path, clean, monkeypatch, until):
    """One checkpoint at a time, each to the bit what it is where training stands still."""
    stands = Run(tmp_path / "stands", copy_room_bytes=0, **THREE).train()
    run = Run(tmp_path / "run", **THREE)
    held = hold_writes(monkeypatch, run, until=until)
    assert_same([run.train()], stands)
    assert content(tmp_path / "run") == content(tmp_path / "stands")
    assert held == [2, 4]
    lines = [(record["step"], record.get("event", "step")) for record in run.log.records]
    assert [step for step, event in lines if event == "checkpoint"] == [2, 4, 6]
    for step in held:
        assert lines.index((step + 1, "step")) < lines.index((step, "checkpoint"))


def test_a_copy_that_finds_no_memory_is_not_needed(tmp_path, monkeypatch):
    stands = Run(tmp_path / "stands", copy_room_bytes=0, **THREE).train()
    run = Run(tmp_path / "run", **THREE)
    failing(monkeypatch, checkpoint_module.CheckpointWriter, "_copied", {1}, out())
    held = hold_writes(monkeypatch, run, until="the run waits")
    assert_same([run.train()], stands)
    assert run.log.events == [{"step": 2, "event": "oom", "where": "checkpoint", "message": OUT}]
    assert (held, content(tmp_path / "run")) == ([4], content(tmp_path / "stands"))


def test_a_write_that_fails_beside_training_ends_it_and_both_errors_are_told(tmp_path, clean, monkeypatch):
    full = OSError(28, "No space left on device")
    run = Run(tmp_path / "run", **THREE)
    failing_save(monkeypatch, {1, 2}, full)
    problem = failed(run, CheckpointError, match="the checkpoint of step 2 could not be written: .* No space left")
    assert problem.fix.startswith("make room")
    assert (len(run.log.steps) <= 4, run.newest(), content(tmp_path / "run")) == (True, None, {})
    both = Run(tmp_path / "both", **THREE)
    hold_writes(monkeypatch, both, until="the run waits")
    failing(monkeypatch, weight_update, "clip", {3})
    with pytest.raises(OutOfMemoryError) as caught:
        both.train()
    first, second = caught.value.problems
    assert first.what.startswith("memory ran out when the gradient was clipped")
    assert second.what.startswith("the checkpoint of step 2 could not be written")
    again = Run(tmp_path / "run", **THREE)
    assert_same([again.train()], clean(**THREE))


@pytest.mark.parametrize(
    ("raised", "error", "told"),
    [
        (OSError(28, "No space left on device"), CheckpointError, "then continue with --resume"),
        (MemoryError(), OutOfMemoryError, "There is no checkpoint yet: what was learned in 3 steps is lost"),
    ],
    ids=["disk", "memory"],
)
def test_a_write_that_has_failed_ends_the_run_after_the_step_that_is_being_made(
    tmp_path, monkeypatch, raised, error, told
):
    run = Run(tmp_path, **THREE)
    failing_save(monkeypatch, {1, 2}, raised)
    write = run.log.write

    def hear(record):
        write(record)
        if record["step"] == 3:
            checkpoint_module.wait([run.loop._saving._writer._future])

    monkeypatch.setattr(run.log, "write", hear)
    assert failed(run, error, match="step 2").fix.endswith(told)
    assert len(run.log.steps) == 3


def test_an_evaluation_waits_for_the_checkpoint_before_it_and_finds_the_logs_written(tmp_path, monkeypatch):
    happened = []

    def evaluate():
        happened.append(("evaluation", run.newest().step if run.store.steps() else 0))
        return {}

    run = Run(tmp_path, evaluate=evaluate, **THREE)
    hold_writes(monkeypatch, run, until="the run waits")
    run.loop._job = run.loop._saving._job = replace(run.job, sync_logs=lambda: happened.append("sync") or {})
    run.train()
    assert happened == [each for step in (0, 2, 4) for each in ("sync", ("evaluation", step), "sync")]


def test_no_thread_writes_when_the_run_has_ended_however_often_it_is_interrupted(tmp_path, monkeypatch):
    """It would write without the lock on the run's folder."""
    run = Run(tmp_path, **THREE)
    goes_on, wait, interruptions = threading.Event(), checkpoint_module.wait, [KeyboardInterrupt] * 3

    def waits(futures):
        if interruptions:
            raise interruptions.pop()
        goes_on.set()
        return wait(futures)

    save = run.store.save
    monkeypatch.setattr(run.store, "save", lambda step, **what: goes_on.wait(60) and save(step, **what))
    monkeypatch.setattr(checkpoint_module, "wait", waits)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert (interruptions, run.newest().step) == ([], 2)


@pytest.mark.parametrize("is_scarce", [False, True])
def test_rows_at_fault_are_all_that_there_are_where_looking_for_them_runs_out_of_memory(
    tmp_path, clean, monkeypatch, is_scarce
):
    """The gradient of the second step is not finite, and each micro-batch is looked at by itself."""
    whole, run = clean(dropout=0.2, steps_per_checkpoint=1), Run(tmp_path, on_nonfinite="skip", dropout=0.2)
    norms, looks = iter([1.0, torch.inf]), []

    def norm(parameters):
        looks[:] = [next(norms, 1.0)]
        return torch.tensor(looks[0])

    def after_forward(model, inputs, output):
        if is_scarce and torch.inf in looks:
            looks.clear()
            raise out()

    run.model.register_forward_hook(after_forward)
    monkeypatch.setattr(weight_update, "gradient_norm", norm)
    run.train()
    (skipped,) = run.log.events
    assert (skipped["step"], skipped["event"], skipped["cause"]) == (2, "skipped", "gradient")
    assert len(skipped["rows"]) == 8
    assert run.loop.num_out_of_memory == 0
    assert run.log.losses[1] != whole.log.losses[2]  # the same rows and dropout, another update before them
    assert run.newest().tensors["random"]["cpu"].equal(whole.newest().tensors["random"]["cpu"])


def test_nothing_is_advised_that_is_done_already():
    shorter = "train again with shorter rows (preprocessing.global_max_sequence_length)"
    checkpointing = "set trainer.enable_gradient_checkpointing: true, also with --resume"
    four_bits = "with a base in 4 bits and an adapter (quantization.bits: 4)"
    assert for_a_row({}) == f"{checkpointing}, {shorter}, or {four_bits}"
    some = {"trainer": {"enable_gradient_checkpointing": 2}, "quantization": {"bits": 4}}
    assert for_a_row(some) == f"{checkpointing}, or {shorter}"
    done = {"trainer": {"enable_gradient_checkpointing": True}, "quantization": {"bits": 4}}
    assert for_a_row(done) == shorter
    for optimizer, adapter, advised in [
        ("adamw", None, ["adamw_8bit", "paged_adamw_8bit", "adapter.type: lora"]),
        ("paged_adamw_8bit", {"type": "lora"}, ["adapter.r"]),
    ]:
        advice = for_an_update({"trainer": {"optimizer": {"type": optimizer}}, "adapter": adapter})
        assert re.findall(r"(?<=[(: ])(?:paged_)?adamw_8bit|adapter\.r\b|adapter\.type: lora", advice) == advised


def test_gradients_are_clipped_and_the_norm_before_it_comes_back():
    for settings, expected in [
        (None, [3.0, 4.0]),
        ({"clipglobalnorm": 1.0}, [0.6, 0.8]),
        ({"clipglobalnorm": 10.0}, [3.0, 4.0]),
        ({"clipglobalnorm": None, "clipnorm": 1.0}, [0.6, 0.8]),
        ({"clipglobalnorm": None, "clipvalue": 3.5}, [3.0, 3.5]),
        ({"clipglobalnorm": 2.5, "clipvalue": 1.8}, [1.5, 1.8]),
    ]:
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        for weight, value in zip(weights, (3.0, 4.0), strict=True):
            weight.grad = torch.tensor([value])
        chosen = settings and GradientClippingConfig(**settings)
        assert float(clip_gradients(weights, chosen)) == pytest.approx(5.0)
        assert [float(weight.grad) for weight in weights] == pytest.approx(expected, rel=1e-5)


# A step whose loss or gradient is not finite: no update; the rows of the micro-batch are named


EIGHT = LENGTHS[:8]  # of different lengths: one step of four micro-batches


class Poisoned(Run):
    """A run on rows one of which holds a token that no other has, and that makes its loss or gradient not finite."""

    def __init__(self, folder, poison, *, lengths=EIGHT, **settings):
        super().__init__(folder, lengths=lengths, steps_per_checkpoint=1, optimizer=adam, **settings)
        rows = [row.input_ids.tolist() for row in self.job.rows]
        everything = [token for row in rows for token in row]
        places = [(row, token) for row, tokens in enumerate(rows) for token in tokens[2:-1]]
        row, self.token = next(place for place in places if everything.count(place[1]) == 1)
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        at = order.index(row) // 2
        self.at_fault = sorted(100 + number for number in order[2 * at : 2 * at + 2])
        self.place = f"rows {self.at_fault[0]}, {self.at_fault[1]} (numbered from 0; micro-batch {at + 1} of 4)"
        getattr(self, f"_poison_{poison}")()

    def _poison_nan(self):
        self.model.model.embed_tokens.weight.data[self.token] = math.nan

    def _poison_infinite(self):
        """The token's probability is 0 where it is asked for."""

        def never(model, inputs, output):
            output.logits = output.logits.index_fill(-1, torch.tensor([self.token]), -math.inf)

        self.model.register_forward_hook(never)

    def _poison_gradient(self):
        seen = []
        self.model.register_forward_pre_hook(
            lambda model, args, given: seen.append(bool((given["input_ids"] == self.token).any())), with_kwargs=True
        )
        self.model.lm_head.weight.register_hook(lambda gradient: gradient * (math.inf if seen[-1] else 1.0))


@pytest.mark.parametrize(
    ("kind", "precision", "figures"),
    [
        ("nan", "fp32", "loss nan, gradient norm nan"),
        ("nan", "fp16-mixed", "loss nan, gradient norm nan"),
        ("gradient", "fp32", r"loss \d\.\d+, gradient norm (nan|inf)"),
        ("infinite", "fp32", r"loss inf, gradient norm \d+\.\d+"),
    ],
)
def test_it_stops_before_the_update_or_is_skipped_and_the_rows_are_named(tmp_path, kind, precision, figures):
    stopped = Poisoned(tmp_path / "stopped", kind, kind=precision)
    before = stopped.weights
    problem = failed(stopped, BrimError, match=rf"step 1 is not finite \({figures}\); nothing was updated")
    assert problem.where == stopped.place
    assert "`trainer.on_nonfinite: skip` leaves such steps out, also with --resume" in problem.fix
    run = Poisoned(tmp_path / "run", kind, kind=precision, epochs=3, on_nonfinite="skip").train()
    cause = "gradient" if kind == "gradient" else "loss"
    assert [(each["step"], each["event"], each["cause"], each["rows"]) for each in run.log.events] == [
        (step, "skipped", cause, run.at_fault) for step in (1, 2, 3)
    ]
    assert [event["num_samples"] for event in run.log.events] == [8, 16, 24]  # consumed all the same
    assert all(torch.equal(run.weights[name].nan_to_num(7), before[name].nan_to_num(7)) for name in before)
    assert run.newest().tensors["optimizer"] == {}
    state = run.newest().state["train"]
    assert (state["num_skipped"], state["num_skipped_in_a_row"]) == (3, 3)
    assert (state["step"], state["consumed_samples"]) == (3, 24)
    if precision == "fp16-mixed":
        assert state["loss_scaler"]["scale"] == 65536.0


def test_a_run_that_stopped_goes_on_with_skip_as_if_it_had_skipped_from_the_start(tmp_path):
    two = {"lengths": [*EIGHT, *[3] * 8], "epochs": 3}  # two steps an epoch, one of them bad
    whole = Poisoned(tmp_path / "whole", "nan", on_nonfinite="skip", **two).train()
    skipped = [event["step"] for event in whole.log.events]
    assert len(skipped) == 3
    state = whole.newest().state["train"]
    assert (state["num_skipped"], state["num_skipped_in_a_row"]) == (3, int(skipped[-1] == 6))
    first = Poisoned(tmp_path / "run", "nan", **two)
    failed(first, BrimError, match=f"step {skipped[0]} is not finite")
    rest = Poisoned(tmp_path / "run", "nan", on_nonfinite="skip", checkpoint=first.newest(), **two).train()
    assert [*first.log.events, *rest.log.events] == whole.log.events
    assert [*first.log.losses, *rest.log.losses] == whole.log.losses
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        file = f"step-00000006/{name}"
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_ten_in_a_row_end_the_run_and_many_rows_are_shown_in_part(tmp_path):
    problem = failed(
        Poisoned(tmp_path, "nan", on_nonfinite="skip", epochs=20), BrimError, match="step 10 is not finite"
    )
    assert "that was the last of 10 such steps in a row" in problem.fix
    many = list(range(40))
    fault = NotFinite(step=7, loss=2.0, norm=math.inf, micro_batches=[1, 2], num_micro_batches=2, rows=many)
    assert (fault.record()["cause"], fault.record()["rows"]) == ("gradient", many)
    first = ", ".join(map(str, range(16)))
    assert fault.stop().problems[0].where == f"rows {first} … (numbered from 0; micro-batch 1, 2 of 2)"


def test_a_run_says_how_many_steps_it_left_out():
    loop = SimpleNamespace(state=TrainState(step=4, num_skipped=4), num_out_of_memory=0)
    (told,) = _what_went_wrong(loop, RunFolder(Path("run")))
    assert told.startswith(
        "4 of 4 steps were left out, since their loss or gradient was not finite: look for `skipped`"
    )
