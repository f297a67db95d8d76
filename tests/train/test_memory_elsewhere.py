"""Memory that runs out beside the forward and backward passes: no half update, nothing lost that can be kept."""

import pytest
import torch
from tests.train.scarce import OUT, Run, equal

from brim.errors import OutOfMemoryError, Problem
from brim.train import checkpoint as checkpoint_module, update as weight_update


def out():
    return torch.OutOfMemoryError(OUT + "\nSee the documentation.")


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
def test_a_half_update_goes_nowhere_and_the_run_continues_from_before(tmp_path, fails_at, left):
    clean = Run(tmp_path / "clean", optimizer=HalfAnUpdate).train()
    run = Run(tmp_path / "run", optimizer=lambda weights: HalfAnUpdate(weights, fails_at))
    with pytest.raises(OutOfMemoryError) as caught:
        run.train()
    problem = caught.value.problems[0]
    assert problem.what == (
        "memory ran out in the optimizer's own step; the weights, which may be half updated, are not saved: " + OUT
    )
    assert problem.where == f"step {fails_at}"
    assert problem.fix.endswith(left)
    assert "adamw_8bit" in problem.fix
    checkpoint = run.newest()
    assert (checkpoint and checkpoint.step) == (3 if fails_at > 3 else None)
    rest = Run(tmp_path / "run", optimizer=HalfAnUpdate, checkpoint=checkpoint).train()
    done = checkpoint.step if checkpoint else 0
    assert run.log.losses[:done] + rest.log.losses == clean.log.losses
    assert equal(rest.weights, clean.weights)


def test_other_errors_of_the_optimizer_are_left_as_they_are(tmp_path):
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Run(tmp_path, optimizer=lambda weights: Broken(weights, lr=0.0)).train()


def failing(monkeypatch, module, name, fails_at):
    """The module's function of this name runs out of memory in calls of these numbers, from 1."""
    calls, whole = [], getattr(module, name)

    def call(*given):
        calls.append(name)
        if len(calls) in fails_at:
            raise out()
        return whole(*given)

    monkeypatch.setattr(module, name, call)


def test_the_norm_is_tried_once_more(tmp_path, monkeypatch):
    clean = Run(tmp_path / "clean").train()
    run = Run(tmp_path / "run")
    with monkeypatch.context() as patch:
        failing(patch, weight_update, "gradient_norm", {2})
        run.train()
    assert run.log.events == [{"step": 2, "event": "oom", "where": "gradient norm", "message": OUT}]
    assert run.log.losses == clean.log.losses
    assert equal(run.weights, clean.weights)


@pytest.mark.parametrize(("name", "fails_at"), [("gradient_norm", {2, 3}), ("clip", {2})])
def test_a_gradient_that_cannot_be_clipped_ends_the_run_with_the_state_from_before(
    tmp_path, monkeypatch, name, fails_at
):
    clean = Run(tmp_path / "clean", dropout=0.2).train()
    run = Run(tmp_path / "run", dropout=0.2)
    with monkeypatch.context() as patch:
        failing(patch, weight_update, name, fails_at)
        with pytest.raises(OutOfMemoryError, match="step 2: memory ran out when the gradient was clipped") as caught:
            run.train()
    assert caught.value.problems[0].fix.endswith("The checkpoint of step 1 holds all that was learned")
    assert run.newest().step == 1
    rest = Run(tmp_path / "run", dropout=0.2, checkpoint=run.newest()).train()
    assert run.log.losses + rest.log.losses == clean.log.losses
    assert equal(rest.weights, clean.weights)


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


def test_an_evaluation_that_cannot_be_had_is_owed_by_the_run_that_goes_on(tmp_path):
    clean = evaluated_run(tmp_path / "clean").train()
    run = evaluated_run(tmp_path / "run", {1})
    with pytest.raises(OutOfMemoryError, match="evaluation of a single row") as caught:
        run.train()
    assert caught.value.problems[0].fix == "less. The checkpoint of step 3 holds all that was learned"
    again = evaluated_run(tmp_path / "run", {1}, checkpoint=run.newest())
    with pytest.raises(OutOfMemoryError, match="evaluation of a single row"):
        again.train()
    rest = evaluated_run(tmp_path / "run", checkpoint=run.newest()).train()
    assert scores(rest) == scores(clean)
    assert run.log.losses + rest.log.losses == clean.log.losses
    assert equal(rest.weights, clean.weights)
    assert rest.newest().state["train"] == clean.newest().state["train"]
    assert rest.newest().state["owes_evaluation"] is False


def test_what_was_owed_is_saved_with_its_outcome(tmp_path):
    run = evaluated_run(tmp_path, {1})
    with pytest.raises(OutOfMemoryError):
        run.train()
    stopped = evaluated_run(tmp_path, checkpoint=run.newest(), stop_after=4)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4"):
        stopped.train()
    assert run.store.load(3).state["train"]["best_step"] == 3
    assert run.store.load(3).state["owes_evaluation"] is False


def failing_save(monkeypatch, fails_at, raised=MemoryError):
    calls, save = [], checkpoint_module.save_file

    def call(tensors, path):
        calls.append(path.name)
        if len(calls) in fails_at:
            raise raised
        save(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", call)


def test_saving_is_tried_once_more(tmp_path, monkeypatch):
    run = Run(tmp_path)
    failing_save(monkeypatch, {2}, out())
    run.train()
    assert run.log.events == [{"step": 3, "event": "oom", "where": "checkpoint", "message": OUT}]
    assert run.newest().step == 6
    assert run.store.load(3).step == 3


def test_a_save_that_fails_twice_ends_the_run_and_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    clean = Run(tmp_path / "clean").train()
    run = Run(tmp_path / "run")
    with monkeypatch.context() as patch:
        failing_save(patch, {4, 5})  # three files a checkpoint
        with pytest.raises(OutOfMemoryError) as caught:
            run.train()
    assert (
        caught.value.problems[0].what == "memory ran out twice when the checkpoint of step 6 was written: MemoryError"
    )
    assert caught.value.problems[0].fix.endswith(
        "--resume continues from the checkpoint of step 3, and does 3 steps again"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000003"]
    rest = Run(tmp_path / "run", checkpoint=run.newest()).train()
    assert equal(rest.weights, clean.weights)


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


@pytest.mark.parametrize("is_scarce", [False, True])
def test_rows_at_fault_are_all_that_there_are_where_looking_for_them_runs_out_of_memory(
    tmp_path, monkeypatch, is_scarce
):
    """The gradient of the second step is not finite, and each micro-batch is looked at by itself."""
    run = Run(tmp_path / "run", on_nonfinite="skip", dropout=0.2)
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
    monkeypatch.setattr(weight_update, "gradient_norm", lambda parameters: torch.tensor(1.0))
    clean = Run(tmp_path / "clean", dropout=0.2).train()
    assert run.log.losses[1] != clean.log.losses[2]  # the same rows and dropout, another update before them
    assert run.newest().tensors["random"]["cpu"].equal(clean.newest().tensors["random"]["cpu"])
