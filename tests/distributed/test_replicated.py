"""A run in several processes is the run in one: the same rows in the same steps, and the same losses."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from unittest.mock import DEFAULT, patch

import pytest
import torch
from faults.several import results, together
from tests.gallery import OUT, usual

import brim
from brim.train import gradient, update

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: other threads, which do nothing here
]

LORA = {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}}
KINDS = {
    "lora": (LORA, {"dropout_by_row": True}),
    "packed": (LORA, {"dropout_by_row": True, "packing": True}),
    "sgd": ({"adapter": None}, {"optimizer": {"type": "sgd"}, "learning_rate": 0.1}),
    "adam": ({"adapter": None}, {"optimizer": {"type": "adamw"}, "learning_rate": 0.001, "noise_scale_every": 3}),
    "fewer rows than ranks": (
        {**LORA, "precision": "fp16-mixed"},
        {"dropout_by_row": True, "batch_size": 1, "effective_batch_size": 1, "train_steps": 3},
    ),
    "4 bits": ({**LORA, "quantization": {"bits": 4}}, {"dropout_by_row": True}),
}


def train(config, output: Path, *, ranks: int, resume: bool = False, observer=None, each=lambda rank: None):
    """Train in so many processes; return how they ended. observer: of the first. each: is called in each before."""

    def work(rank: int):
        each(rank)
        watch = observer if rank == 0 else None
        done = brim.Model(config).train(output_directory=output, resume=resume, observer=watch, say=None)
        return {"steps": done.num_steps, "metrics": done.metrics, "best": done.best_step}

    if ranks == 1:
        return [work(0)]
    return together(ranks, work, folder=output.parent / f"{output.name}-ranks")


def log(output: Path):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path):
    return [
        (record["step"], record["split"], record["num_samples"], record["loss"])
        for record in log(output)
        if "loss" in record and "num_samples" in record
    ]


def assert_alike(one: Path, other: Path, *, within: float) -> None:
    assert [each[:3] for each in losses(one)] == [each[:3] for each in losses(other)]
    assert [each[3] for each in losses(one)] == pytest.approx([each[3] for each in losses(other)], rel=within)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_one_process(kind, tiny_base, sums_file, tmp_path):
    changes, trainer = KINDS[kind]
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 2, **trainer}, **changes)
    alone = train(config, tmp_path / "1", ranks=1)[0]
    for ranks in (2, 4) if kind == "lora" else (2,):
        told = results(train(config, tmp_path / str(ranks), ranks=ranks))
        assert_alike(tmp_path / "1", tmp_path / str(ranks), within=1e-4 if kind == "adam" else 1e-5)
        assert all(each == told[0] for each in told)
        assert told[0]["steps"] == alone["steps"]
        assert told[0]["best"] == alone["best"]
        steps = [record for record in log(tmp_path / str(ranks)) if "learning_rate" in record]
        assert {record["ranks"] for record in steps} == {ranks}
    if kind == "adam":
        noise = [
            [record["squared_gradient"] for record in log(tmp_path / name) if "noise_scale" in record] for name in "12"
        ]
        assert len(noise[0]) > 1
        assert noise[1] == pytest.approx(noise[0], rel=1e-3)


def test_a_weight_that_only_some_steps_reach_stays_in_the_others_as_it_is(tiny_base, sums_file, tmp_path, monkeypatch):
    whole = gradient.MicroBatchPass.__call__

    def now_and_then(self, rows, num_supervised, *, step, **others):  # as an expert to which no row goes
        self.llm.model.get_input_embeddings().requires_grad_(step % 3 == 1)
        return whole(self, rows, num_supervised, step=step, **others)

    monkeypatch.setattr(gradient.MicroBatchPass, "__call__", now_and_then)
    trainer = {"batch_size": 2, "learning_rate": 0.01, "train_steps": 5}
    config = usual(tiny_base, dataset=str(sums_file), trainer=trainer, adapter=None)
    train(config, tmp_path / "1", ranks=1)
    results(train(config, tmp_path / "2", ranks=2))
    assert_alike(tmp_path / "1", tmp_path / "2", within=1e-4)


def test_the_same_ranks_give_the_same_bits(tiny_base, sums_file, tmp_path):
    config = usual(
        tiny_base, dataset=str(sums_file), trainer={"batch_size": 2}, adapter={"type": "lora", "dropout": 0.1}
    )
    models = []
    for name in "ab":
        results(train(config, tmp_path / name, ranks=2))
        models.append((tmp_path / name / "model" / "adapter_model.safetensors").read_bytes())
    assert models[0] == models[1]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


class KilledAfter(brim.Observer):
    def __init__(self, step):
        self._step = step

    def write(self, record):
        if record["step"] == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_goes_on_with_any_number_of_ranks(tiny_base, sums_file, tmp_path):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 2, "steps_per_checkpoint": 2})
    train(config, tmp_path / "1", ranks=1)
    ended = train(config, tmp_path / "parts", ranks=2, observer=KilledAfter(7))
    assert ended[0].code == -signal.SIGKILL
    assert ended[1].code != 0
    newest = max((tmp_path / "parts" / "checkpoints").glob("step-*"))
    (newest / "optimizer.safetensors").write_bytes(b"")  # all go on from the one before
    ended = train(config, tmp_path / "parts", ranks=4, resume=True, observer=KilledAfter(7))
    assert ended[0].code == -signal.SIGKILL
    train(config, tmp_path / "parts", ranks=1, resume=True)
    assert_alike(tmp_path / "1", tmp_path / "parts", within=1e-5)


class Scarce:
    """Has the model run out of memory on one rank, where a micro-batch has more than so many rows; so often."""

    def __init__(self, rank: int, *, most_rows: int, times: int = 1 << 30) -> None:
        self._rank, self._most_rows, self._times = rank, most_rows, times

    def __call__(self, rank: int) -> None:
        from brim.models.loss import NextToken

        if rank != self._rank:
            return
        whole = NextToken.loss

        def scarce(objective, model, batch, **others):
            if len(batch.input_ids) > self._most_rows and self._times:
                self._times -= 1
                raise torch.OutOfMemoryError(OUT)
            return whole(objective, model, batch, **others)

        patch.object(NextToken, "loss", scarce).start()


def test_memory_that_runs_out_on_a_rank_lowers_the_limit_of_all(tiny_base, sums_file, tmp_path):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4})
    train(config, tmp_path / "1", ranks=1)
    results(train(config, tmp_path / "2", ranks=2, each=Scarce(1, most_rows=2)))
    assert_alike(tmp_path / "1", tmp_path / "2", within=1e-5)
    events = [record for record in log(tmp_path / "2") if "event" in record]
    assert [(each["step"], each["rank"]) for each in events if each["event"] == "oom"] == [(1, 1)]
    assert [each["after"] for each in events if each["event"] == "cap" and "rank" not in each] == [2]
    steps = [record for record in log(tmp_path / "2") if "learning_rate" in record]
    assert [record["num_micro_batches"] for record in steps[:2]] == [3, 4]


def test_what_happens_after_the_last_sum_is_told_of_each_rank(tiny_base, sums_file, tmp_path):
    def scarce(rank: int) -> None:
        failing = [torch.OutOfMemoryError(OUT), DEFAULT]
        patch.object(update, "get_total_norm", wraps=update.get_total_norm, side_effect=failing).start()

    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4, "train_steps": 1})
    results(train(config, tmp_path / "2", ranks=2, each=scarce))
    events = [record for record in log(tmp_path / "2") if record.get("event") == "oom"]
    assert [(each["step"], each["where"], each["rank"]) for each in events] == [
        (1, "gradient norm", 0),
        (1, "gradient norm", 1),
    ]


def test_who_is_free_takes_the_next_micro_batch(tiny_base, sums_file, tmp_path):
    slow_s = 0.03

    def hindered(rank: int) -> None:
        from brim.models.loss import NextToken

        Scarce(1, most_rows=1, times=1)(rank)
        whole = NextToken.loss

        def slow(*given, **named):
            time.sleep(slow_s if rank else 0)
            return whole(*given, **named)

        patch.object(NextToken, "loss", slow).start()

    trainer = {"batch_size": 2, "effective_batch_size": 14, "dropout_by_row": True}
    backend = {"type": "local", "trainer": {"strategy": "ddp", "dealing": "claimed"}}
    config = usual(tiny_base, dataset=str(sums_file), trainer=trainer, **LORA, backend=backend)
    train(config, tmp_path / "1", ranks=1)
    results(train(config, tmp_path / "2", ranks=2, each=hindered))
    assert_alike(tmp_path / "1", tmp_path / "2", within=1e-5)
    first, *steps = (record for record in log(tmp_path / "2") if "learning_rate" in record)
    assert sum(first["rows_by_rank"]) == 14
    assert [each["after"] for each in log(tmp_path / "2") if each.get("event") == "cap" and "rank" not in each] == [1]
    for each in steps:
        assert sum(each["rows_by_rank"]) == sum(each["micro_batches_by_rank"]) == 14
        assert each["rows_by_rank"][0] > each["rows_by_rank"][1]


def test_a_row_that_does_not_fit_on_a_rank_ends_all_with_a_checkpoint(tiny_base, sums_file, tmp_path):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4, "steps_per_checkpoint": 100})
    ended = train(config, tmp_path / "2", ranks=2, each=Scarce(1, most_rows=0), observer=None)
    assert ended[1].code == 1
    assert "OutOfMemoryError: step 1: row" in ended[1].error
    assert ended[0].code  # the other waits for this one to say so, and may be ended meanwhile


def test_a_loss_that_is_not_finite_on_a_rank_is_left_out_by_all(tiny_base, sums_file, tmp_path):
    def spoiled(rank: int) -> None:
        from brim.models.loss import NextToken

        whole, calls = NextToken.loss, []

        def loss(objective, model, batch, **others):
            calls.append(batch)
            return whole(objective, model, batch, **others) * (float("nan") if rank == 1 and len(calls) == 3 else 1.0)

        patch.object(NextToken, "loss", loss).start()

    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 2, "on_nonfinite": "skip"})
    results(train(config, tmp_path / "2", ranks=2, each=spoiled))
    skipped = [record for record in log(tmp_path / "2") if record.get("event") == "skipped"]
    assert [(each["step"], each["cause"], len(each["rows"])) for each in skipped] == [(2, "loss", 2)]
