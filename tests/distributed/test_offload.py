"""A run whose weights lie on the host is the run without; here they are in the same memory, by the same path."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch._dynamo  # which FSDP imports, in each process that has not
import torch.distributed.fsdp
from faults.several import results, together
from faults.workshop import make_base
from tests.distributed.test_replicated import LORA, KilledAfter, assert_alike, log, losses, train
from tests.distributed.test_sharded import FULL, WIDE, exported, measured
from tests.gallery import OUT, usual

import brim
from brim.config import load_config
from brim.errors import ConfigError
from brim.models.loss import NextToken
from brim.workflows.training import sharding

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: other threads, which do nothing here
]

OFFLOAD = {"memory": {"offload": "weights"}}
KINDS = {
    "lora": (LORA, {"dropout_by_row": True, "packing": True, "chunked_loss": True}),
    "adam": (FULL, {"learning_rate": 0.001, "enable_gradient_checkpointing": True}),
    "sgd": (FULL, {"optimizer": {"type": "sgd", "momentum": 0.9}, "learning_rate": 0.1}),
}


def config_of(base, data, *, changes=FULL, **trainer):
    return usual(base, dataset=str(data), trainer={"batch_size": 2, "train_steps": 4, **trainer}, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_the_exported_model_are_the_same(kind, tiny_base, sums_file, tmp_path):
    changes, trainer = KINDS[kind]
    config = config_of(tiny_base, sums_file, changes=changes, **trainer)
    alone = train(config, tmp_path / "none", ranks=1)[0]
    told = train({**config, **OFFLOAD}, tmp_path / "weights", ranks=1)[0]
    assert (told["steps"], told["best"]) == (alone["steps"], alone["best"])
    if kind == "sgd":  # by the same kernels: the same bits
        assert losses(tmp_path / "weights") == losses(tmp_path / "none")
        assert exported(tmp_path / "weights").equal(exported(tmp_path / "none"))
    assert_alike(tmp_path / "none", tmp_path / "weights", within=1e-5)
    weights = exported(tmp_path / "none")
    assert (exported(tmp_path / "weights") - weights).norm() < 1e-5 * weights.norm()
    assert not torch.distributed.is_initialized()
    if kind == "lora":
        results(train({**config, **OFFLOAD}, tmp_path / "2", ranks=2))
        assert_alike(tmp_path / "none", tmp_path / "2", within=1e-5)


def test_a_killed_run_goes_on_with_its_weights_elsewhere(tiny_base, sums_file, tmp_path):
    config = config_of(tiny_base, sums_file, train_steps=6, steps_per_checkpoint=2, learning_rate=0.001)
    train(config, tmp_path / "1", ranks=1)
    run = tmp_path / "moved"

    def killed(step, **changes):
        work = together(
            1,
            lambda rank: train({**config, **changes}, run, ranks=1, resume=run.exists(), observer=KilledAfter(step)),
            folder=tmp_path / f"killed-{step}",
        )
        assert work[0].code == -signal.SIGKILL

    killed(3, **OFFLOAD)
    killed(5)
    train({**config, **OFFLOAD}, run, ranks=1, resume=True)
    assert_alike(tmp_path / "1", run, within=1e-5)
    weights = exported(tmp_path / "1")
    assert (exported(run) - weights).norm() < 1e-5 * weights.norm()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_is_tried_again_in_smaller_parts(where, tiny_base, sums_file, tmp_path, monkeypatch):
    config = {**config_of(tiny_base, sums_file, batch_size=4, skip_all_evaluation=True), **OFFLOAD}
    train(config, tmp_path / "1", ranks=1)
    whole = NextToken.loss

    def scarce(objective, model, batch, **others):
        if len(batch.input_ids) <= 2:
            return whole(objective, model, batch, **others)
        if where == "forward":
            raise torch.OutOfMemoryError(OUT)

        def failed(_):
            hook.remove()  # the weight stays
            raise torch.OutOfMemoryError(OUT)

        value = whole(objective, model, batch, **others)
        hook = next(weight for weight in model.parameters() if weight.requires_grad).register_hook(failed)
        return value

    monkeypatch.setattr(NextToken, "loss", scarce)
    train(config, tmp_path / "2", ranks=1)
    assert_alike(tmp_path / "1", tmp_path / "2", within=1e-5)
    events = [(record["step"], record["event"]) for record in log(tmp_path / "2") if "event" in record]
    assert events[:2] == [(1, "oom"), (1, "cap")]


ON_HOST = {"memory": {"offload": "optimizer"}}


def test_an_optimizer_on_the_host_learns_the_same_bits_wherever_a_checkpoint_is_from(tiny_base, sums_file, tmp_path):
    config = config_of(tiny_base, sums_file, train_steps=5, steps_per_checkpoint=1, learning_rate=0.001)
    train(config, tmp_path / "none", ranks=1)
    run = tmp_path / "optimizer"
    for step, memory in ((2, ON_HOST), (4, {})):
        work = together(
            1,
            lambda rank, step=step, memory=memory: train(
                {**config, **memory}, run, ranks=1, resume=run.exists(), observer=KilledAfter(step)
            ),
            folder=tmp_path / f"killed-{step}",
        )
        assert work[0].code == -signal.SIGKILL
    train({**config, **ON_HOST}, run, ranks=1, resume=True)
    assert losses(run) == losses(tmp_path / "none")
    assert exported(run).equal(exported(tmp_path / "none"))


def test_each_rank_steps_on_its_host(tiny_base, sums_file, tmp_path):
    changes, trainer = KINDS["lora"]
    config = {**config_of(tiny_base, sums_file, changes=changes, **{**trainer, "train_steps": 2}), **ON_HOST}
    train(config, tmp_path / "1", ranks=1)
    results(train(config, tmp_path / "2", ranks=2))
    assert_alike(tmp_path / "1", tmp_path / "2", within=1e-5)


def test_a_step_on_the_host_copies_what_is_predicted(tmp_path):
    make_base(tmp_path / "base", **WIDE)
    trainer = {"enable_gradient_checkpointing": False, "chunked_loss": False, "packing": False}
    trainer |= {"batch_size": 2, "effective_batch_size": 2}
    config = usual(tmp_path / "base", adapter=None, trainer=trainer, precision="fp32", **ON_HOST)
    predicted = brim.predict_memory(config, batch_size=2, sequence_length=64, device="cpu")
    found = measured(config)
    assert found["peak"] == pytest.approx(predicted.allocated_bytes, rel=0.02)


def test_what_does_not_go_with_an_optimizer_on_the_host_is_refused_by_name(tiny_base):
    trainer = {"optimizer": {"type": "adamw_8bit"}}
    backend = {"trainer": {"strategy": "fsdp"}}
    config = usual(tiny_base, trainer=trainer, precision="fp16-mixed", backend=backend, **ON_HOST)
    with pytest.raises(ConfigError) as caught:
        brim.plan(config, num_rows=2, sequence_length=8, say=None)
    keys = [problem.where for problem in caught.value.problems]
    assert keys == ["backend.trainer.strategy", "precision", "trainer.optimizer.type"]
    assert all("or set memory.offload: none" in problem.fix for problem in caught.value.problems)


def test_what_does_not_go_with_it_is_refused_by_name(tiny_base):
    trainer = {"optimizer": {"type": "adafactor"}}
    backend = {"trainer": {"strategy": "ddp"}}
    config = usual(tiny_base, trainer=trainer, precision="fp16-mixed", backend=backend, **OFFLOAD)
    with pytest.raises(ConfigError) as caught:
        sharding.require_shardable(load_config(config).config)
    keys = [problem.where for problem in caught.value.problems]
    assert keys == ["backend.trainer.strategy", "precision", "trainer.optimizer.type"]
    assert all("or set memory.offload: none" in problem.fix for problem in caught.value.problems)
