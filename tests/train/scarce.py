"""A loop on a model of 3,000 weights whose memory runs out when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from brim.batching import BatchSchedule, ByRows
from brim.config.schema import FinetuneTrainer, GradientClippingConfig
from brim.data.tokens import TokenRow, TokenRows
from brim.models import LLM, precision
from brim.models.loss import NextToken
from brim.train import LearningRate, Loop, Observer, RunLength, build_optimizer
from brim.train.checkpoints import CheckpointStore, TrainState
from brim.train.job import Stopping, TrainJob, measure_every
from brim.train.optimizer import FixedBetas, update_rates

LENGTHS = [9, 4, 12, 7, 5, 10, 3, 6, 11, 8, 4, 9, 13, 5, 7, 6, 10, 3, 8, 12]  # 20 rows: two steps of 8 and one of 4
VOCABULARY = 40
SEED = 7
CPU = torch.device("cpu")
OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def rows_of(lengths=LENGTHS) -> TokenRows:
    """Rows with keys from 100, all tokens but the first two supervised."""
    generator = np.random.default_rng(0)
    return TokenRows.from_rows(
        TokenRow(
            key=100 + number,
            input_ids=generator.integers(2, VOCABULARY, length).astype(np.int32),
            supervised=np.arange(length) > 1,
        )
        for number, length in enumerate(lengths)
    )


def run_length(*, num_rows, size, epochs, **settings) -> RunLength:
    """Of a run whose effective batch does not move."""
    settings = {"total_samples": epochs * num_rows, **settings}
    return RunLength(num_rows=num_rows, schedule=BatchSchedule.constant(size), **settings)


def make_model(dropout=0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.3, attention_dropout=dropout,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Shortage:
    """Memory runs out in passes of these numbers, counted from 1 over the run, replays with them."""

    def __init__(self, model: nn.Module, *, forward=(), backward=()) -> None:
        self.num_passes = 0
        self.forward, self.backward = set(forward), set(backward)
        model.register_forward_hook(self._after_forward)

    def _after_forward(self, model, inputs, output):
        if not torch.is_grad_enabled():
            return
        self.num_passes += 1
        if self.num_passes in self.forward:
            raise torch.OutOfMemoryError(OUT)
        if self.num_passes in self.backward:
            output.logits.register_hook(self._in_backward)

    @staticmethod
    def _in_backward(gradient):
        raise torch.OutOfMemoryError(OUT)


class Given:
    """A cutter that cuts as another one did, step by step."""

    def __init__(self, cuts):
        self._cuts = iter(cuts)

    def cut(self, lengths):
        return next(self._cuts)

    def clean_step(self):
        return None

    def state(self):
        return {}


class Watched(ByRows):
    """Knows the last cut of each step."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.cuts = []
        self._is_replay = False

    def cut(self, lengths):
        if self._is_replay:
            self.cuts.pop()
        self._is_replay = False
        self.cuts.append(super().cut(lengths))
        return self.cuts[-1]

    def lower(self, failed):
        self._is_replay = True
        return super().lower(failed)


class Log(Observer):
    """An observer that keeps all records, and may ask for a stop."""

    def __init__(self, stop_after=None):
        self.records = []
        self.stop = threading.Event()
        self._stop_after = stop_after

    def write(self, record):
        self.records.append(dict(record))
        if record.get("split") == "train" and record["step"] == self._stop_after:
            self.stop.set()

    @property
    def steps(self):
        return [record for record in self.records if record.get("split") == "train"]

    @property
    def losses(self):
        return [record["loss"] for record in self.steps]

    @property
    def events(self):
        return [record for record in self.records if "event" in record and record["event"] != "checkpoint"]


class Run:
    """A loop, and what was heard of it. Without arguments, the undisturbed run.

    trainer: keys of a resolved configuration, instead of size, epochs and steps_per_checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cutter=None,
        lengths=LENGTHS,
        size=8,
        epochs=2,
        dropout=0.0,
        kind="fp32",
        optimizer: Callable = lambda weights: torch.optim.SGD(weights, lr=0.0),
        evaluate=None,
        stop_after=None,
        steps_per_checkpoint=0,
        on_nonfinite="stop",
        checkpoint=None,
        trainer=None,
        copy_room_bytes=2**30,
    ) -> None:
        self.model = make_model(dropout)
        self.log = Log(stop_after)
        self.store = CheckpointStore(folder)
        self.cutter = cutter or Watched(max_rows=2)
        rows = rows_of(lengths)
        if trainer is None:
            length = run_length(num_rows=len(rows), size=size, epochs=epochs, steps_per_checkpoint=steps_per_checkpoint)
            built, rate = optimizer(self.model.parameters()), LearningRate(peak=0.1, total_samples=length.total_samples)
            course = {"optimizer": built, "rates": FixedBetas(built), "learning_rate": rate, "length": length}
        else:
            course = course_of(trainer, self.model, rows)
        self.job = TrainJob(
            llm=LLM(model=self.model, folder=None, device=CPU, precision=precision(kind), objective=NextToken()),
            rows=rows,
            pad_id=1,
            cutter=self.cutter,
            clipping=GradientClippingConfig(clipglobalnorm=1.0),
            on_nonfinite=on_nonfinite,
            seed=SEED,
            evaluate=evaluate,
            stopping=Stopping(),
            store=self.store,
            observer=self.log,
            copy_room_bytes=copy_room_bytes,
            **course,
        )
        torch.manual_seed(1)
        state = TrainState() if checkpoint is None else TrainState(**checkpoint.state["train"])
        self.loop = Loop(self.job, state)
        if checkpoint is not None:
            self.loop.restore(checkpoint, keep_cutter=not isinstance(cutter, Given))

    def train(self) -> Run:
        self.loop.run(self.log.stop)
        return self

    @property
    def weights(self):
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def newest(self):
        return self.store.load_newest()[0]


def course_of(keys, model, rows) -> dict[str, object]:
    """What of a job these keys of a resolved trainer decide."""
    trainer = FinetuneTrainer.model_validate(
        {"type": "finetune", "epochs": 2, "learning_rate": 0.1, "batch_beta2_scaling": False, **keys}
    )
    length = RunLength.of(trainer, rows, seed=SEED)
    built = build_optimizer(trainer.optimizer, model.parameters())
    return {
        "optimizer": built,
        "rates": update_rates(trainer, built, final_size=length.schedule.final_size),
        "learning_rate": LearningRate.of(trainer, rows, length, seed=SEED),
        "length": length,
        "measure_every": measure_every(trainer),
    }


def small_net(seed=0) -> nn.Sequential:
    """Weights of 768, 32, 64 and 2 elements."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 2))


def train_net(model, optimizer, *, steps, seed) -> None:
    torch.manual_seed(seed)
    FixedBetas(optimizer).set(size=1, learning_rate=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 24)).square().sum().backward()
        optimizer.step()


def equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def apart(first, second):
    """How far weights lie apart, relative to all of them.

    Not one by one: where a gradient is nearly zero, Adam makes a step of any rounding.
    """
    assert first.keys() == second.keys()
    difference = sum(float((first[name].double() - second[name].double()).square().sum()) for name in second)
    return (difference / sum(float(weight.double().square().sum()) for weight in second.values())) ** 0.5
