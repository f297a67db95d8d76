"""Measure what brim's loop costs over a bare PyTorch loop that does the same work.

    python -m benchmarks.loop_overhead

Both train the same model on the same micro-batches with the same optimizer and clipping, and find the same losses to
the bit. The bare loop finds its tensors ready; brim draws the order, cuts, pads, logs to metrics.jsonl and TensorBoard
and keeps a live progress bar, as `brim train` does on a terminal. Steps alternate within one process, so that what else
the machine does falls on both. Checkpoints are left out.

What brim puts off is charged to a step's milliseconds in equal parts (the ratios leave it out): what the observers do
when they are closed, and the bar's thread, which draws twice a second. That thread goes on while the bare loop runs,
and draws as often there. (Until November 2026 the bar was taken away and begun again around each step, which cost more
than all the rest of a step and is not what a run does.)
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import print_table, write_report
from benchmarks.subject import EFFECTIVE_BATCH_SIZE, SEED, Shape, configuration, lora, make_base, make_rows
from brim.batching import ByRows
from brim.batching.microbatch import cut_by_rows
from brim.config import load_config
from brim.config.schema import FinetuneTrainer
from brim.data import prepare
from brim.data.read import read
from brim.data.tokens import Batch, TokenRows, collate, rows_of_step
from brim.models import LLM, load_llm
from brim.report.screen import LiveLine, TrainProgress
from brim.session import Session, open_session
from brim.train import Loop, Observers, Record, RunLength, build_job
from brim.train.checkpoints import CheckpointStore, TrainState
from brim.train.logs import MetricsLog, TensorBoardLog

GOAL = 1.03
LEARNING_RATE = 1e-3
CLIPPING = 0.5
WARMUP_STEPS = 2  # not counted: allocations, caches, the optimizer's state

SMALL = Shape(hidden_size=256, intermediate_size=512, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)
# So little work that what is left is the loop itself.
TINY = Shape(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Hold what is trained, and how it is cut."""

    name: str
    shape: Shape
    method: str  # lora or full
    micro_batch_rows: int
    num_steps: int
    max_characters: int
    counts: bool  # whether the goal is meant for it


CASES = (
    Case(name="LoRA", shape=SMALL, method="lora", micro_batch_rows=4, num_steps=26, max_characters=700, counts=True),
    Case(name="LoRA", shape=SMALL, method="lora", micro_batch_rows=1, num_steps=26, max_characters=700, counts=True),
    Case(name="full", shape=SMALL, method="full", micro_batch_rows=4, num_steps=26, max_characters=700, counts=True),
    # Goal: at most 300 µs a step and 100 µs a micro-batch more than the bare loop. These two tell one from the other.
    Case(name="tiny", shape=TINY, method="full", micro_batch_rows=4, num_steps=80, max_characters=400, counts=False),
    Case(name="tiny", shape=TINY, method="full", micro_batch_rows=1, num_steps=80, max_characters=400, counts=False),
)


@dataclass(frozen=True, slots=True)
class Clock:
    """Hold seconds on the wall, and of this process on all cores."""

    wall_s: float
    cpu_s: float
    others_s: float  # of it, in other threads: the bar's, and torch's where it has several

    @classmethod
    def now(cls) -> Clock:
        cpu_s = time.process_time()
        return cls(time.perf_counter(), cpu_s, cpu_s - time.thread_time())

    def since(self, start: Clock) -> Clock:
        return Clock(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s, self.others_s - start.others_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Hold brim's steps over the bare loop's, in one process, alternating."""

    case: str
    num_parameters: int
    num_trained_parameters: int
    micro_batch_rows: int
    num_steps: int
    tokens_per_step: int
    bare_ms_per_step: float  # median, wall
    wall_ratio: float  # median over steps
    wall_ratio_interval: tuple[float, float]  # 95%, of the median
    wall_ratio_quartiles: tuple[float, float]  # of the steps
    cpu_ratio: float
    cpu_ratio_interval: tuple[float, float]
    cpu_ratio_quartiles: tuple[float, float]
    extra_cpu_ms_per_step: float  # median, and what was put off
    deferred_cpu_ms_per_step: float  # what was put off: closing the observers, drawing the bar
    counts: bool
    goal: float = GOAL


class BareLoop:
    """Train as one would by hand: forward, backward, clip, update."""

    def __init__(self, llm: LLM, steps: Sequence[tuple[list[Batch], int]]) -> None:
        self._model: nn.Module = llm.model.train()
        self._objective = llm.objective
        self._steps = steps
        self._parameters = [p for p in llm.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(self._parameters, lr=LEARNING_RATE)

    def step(self, number: int) -> float:
        """Make one update on batches that lie ready; return the mean loss over the step's supervised tokens."""
        batches, num_supervised = self._steps[number]
        shares = []
        for batch in batches:
            loss = self._objective.loss(self._model, batch) / num_supervised
            loss.backward()  # type: ignore[no-untyped-call]
            shares.append(loss.detach())
        clip_grad_norm_(self._parameters, CLIPPING)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return math.fsum(torch.stack(shares).tolist())


class Alternator:
    """The last observer of brim's loop: takes the time of its steps and runs those of the bare loop between them."""

    def __init__(self, bare: BareLoop, *, total_steps: int) -> None:
        self._bare = bare
        self._total_steps = total_steps
        self._started = Clock.now()
        self._bare_losses: list[float] = []
        self.brim: list[Clock] = []  # by step
        self.bare: list[Clock] = []
        self.closing_s = 0.0  # of the other observers, CPU

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._started = Clock.now()

    def write(self, record: Record) -> None:
        if record.get("split") != "train":
            return
        self.brim.append(Clock.now().since(self._started))
        step = record["step"]
        if step % 2:  # brim goes first in odd steps, the bare loop in even ones
            self._run_bare(step)
            self._run_bare(step + 1)
        assert self._bare_losses[step - 1] == record["loss"], "the two loops did not do the same work"
        self._started = Clock.now()

    def _run_bare(self, step: int) -> None:
        if step <= self._total_steps:
            started = Clock.now()
            self._bare_losses.append(self._bare.step(step - 1))
            self.bare.append(Clock.now().since(started))

    def close(self) -> None: ...


class Terminal(io.StringIO):
    """Take what a terminal would show."""

    def isatty(self) -> bool:
        return True


def measure(case: Case, folder: Path) -> Overhead:
    """Train both, step by step in turn."""
    rows_file = make_rows(
        folder / "rows.jsonl", num_rows=EFFECTIVE_BATCH_SIZE * case.num_steps, max_characters=case.max_characters
    )
    base = make_base(folder / "base", case.shape, rows_file)
    settings = configuration(
        base,
        adapter=lora() if case.method == "lora" else None,
        trainer={
            "batch_size": case.micro_batch_rows,
            "learning_rate": LEARNING_RATE,
            "gradient_clipping": {"clipglobalnorm": CLIPPING},
        },
    )
    session = open_session(load_config(settings).config)
    prepared = prepare(read(rows_file), session.config, session.encoder, context_length=session.folder.context_length)
    rows = prepared.splits["train"]
    llm, twin = (load_llm(session.config, session.folder, session.device, trainable=True) for _ in range(2))
    bare = BareLoop(twin, _batches(rows, case, pad_id=session.encoder.pad_id))
    return _overhead(case, llm, rows, _run(case, session, llm, rows, bare, folder))


def _run(case: Case, session: Session, llm: LLM, rows: TokenRows, bare: BareLoop, folder: Path) -> Alternator:
    """Run brim's loop with the observers that `brim train` gives it, and the bare loop between its steps."""
    trainer = session.config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    alternator = Alternator(bare, total_steps=case.num_steps)
    observers = Observers(
        [
            MetricsLog(folder / "metrics.jsonl"),
            TensorBoardLog(folder / "tensorboard"),
            TrainProgress(LiveLine(Terminal())),
            alternator,
        ]
    )
    job = build_job(
        session.config,
        trainer,
        llm,
        rows,
        length=RunLength.of(trainer, rows, seed=session.config.random_seed),
        cutter=ByRows(max_rows=case.micro_batch_rows),
        pad_id=session.encoder.pad_id,
        evaluate=None,
        store=CheckpointStore(folder / "checkpoints"),  # written once, after the last step
        observer=observers,
    )
    observers.start(first_step=0, total_steps=case.num_steps, total_samples=job.length.total_samples)
    try:
        Loop(job, TrainState()).run(threading.Event())
    finally:
        ended = Clock.now()
        observers.close()
        alternator.closing_s = Clock.now().since(ended).cpu_s
    return alternator


def _batches(rows: TokenRows, case: Case, *, pad_id: int) -> list[tuple[list[Batch], int]]:
    """Return the micro-batches of each step and its supervised tokens, as brim cuts them."""
    steps = []
    for step in range(case.num_steps):
        _, indices = rows_of_step(
            num_rows=len(rows), seed=SEED, consumed_samples=step * EFFECTIVE_BATCH_SIZE, size=EFFECTIVE_BATCH_SIZE
        )
        cuts = cut_by_rows(rows.lengths[indices], max_rows=case.micro_batch_rows)
        batches = [collate([rows[int(i)] for i in indices[positions]], pad_id=pad_id) for positions in cuts]
        steps.append((batches, int(rows.num_supervised[indices].sum())))
    return steps


def _overhead(case: Case, llm: LLM, rows: TokenRows, alternator: Alternator) -> Overhead:
    pairs = list(zip(alternator.brim, alternator.bare, strict=True))[WARMUP_STEPS:]
    wall = [brim.wall_s / bare.wall_s for brim, bare in pairs]
    cpu = [brim.cpu_s / bare.cpu_s for brim, bare in pairs]
    deferred_s = _deferred_s(alternator, pairs)
    return Overhead(
        case=f"{case.name}, micro-batch {case.micro_batch_rows}",
        num_parameters=sum(p.numel() for p in llm.model.parameters()),
        num_trained_parameters=sum(p.numel() for p in llm.model.parameters() if p.requires_grad),
        micro_batch_rows=case.micro_batch_rows,
        num_steps=len(pairs),
        tokens_per_step=int(rows.lengths.sum()) // case.num_steps,
        bare_ms_per_step=round(1000 * median(bare.wall_s for _, bare in pairs), 2),
        wall_ratio=round(median(wall), 4),
        wall_ratio_interval=median_interval(wall),
        wall_ratio_quartiles=_quartiles(wall),
        cpu_ratio=round(median(cpu), 4),
        cpu_ratio_interval=median_interval(cpu),
        cpu_ratio_quartiles=_quartiles(cpu),
        extra_cpu_ms_per_step=round(1000 * (median(brim.cpu_s - bare.cpu_s for brim, bare in pairs) + deferred_s), 3),
        deferred_cpu_ms_per_step=round(1000 * deferred_s, 3),
        counts=case.counts,
    )


def _deferred_s(alternator: Alternator, pairs: Sequence[tuple[Clock, Clock]]) -> float:
    """Return the CPU seconds that a step is to be charged with beside its own."""
    clocks = [clock for pair in pairs for clock in pair]
    drawing_s = sum(clock.others_s for clock in clocks) / sum(clock.wall_s for clock in clocks)  # by second of the run
    if torch.get_num_threads() > 1:
        drawing_s = 0.0  # cannot be told from torch's own
    return alternator.closing_s / len(alternator.brim) + drawing_s * median(brim.wall_s for brim, _ in pairs)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = quantiles(values, n=4)
    return round(first, 4), round(third, 4)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics that enclose the median with 95%, by the normal approximation of the binomial."""
    ordered, half_width = sorted(values), 0.98 * len(values) ** 0.5
    low = max(math.floor(len(values) / 2 - half_width), 0)
    return round(ordered[low], 4), round(ordered[-1 - low], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of brim's loop over a bare PyTorch loop.")
    parser.add_argument("--steps", type=int, help="of each case, instead of its own number")
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for case in CASES:
        chosen = replace(case, num_steps=options.steps) if options.steps else case
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(chosen, Path(folder)))
        _show(results[-1:])
    figures = {"goal": GOAL, "effective_batch_size": EFFECTIVE_BATCH_SIZE, "cases": [asdict(r) for r in results]}
    write_report("loop_overhead", figures=figures, num_threads=options.threads)


def _show(results: Sequence[Overhead]) -> None:
    print_table(
        "brim's loop over a bare loop, by step (goal: at most 1.03)",
        ("case", "weights", "steps", "bare ms/step", "wall", "95%", "CPU time", "95%", "extra ms/step"),
        [
            (
                r.case,
                f"{r.num_parameters:,}",
                str(r.num_steps),
                f"{r.bare_ms_per_step:,.1f}",
                f"{r.wall_ratio:.4f}",
                "{:.3f}–{:.3f}".format(*r.wall_ratio_interval),
                f"{r.cpu_ratio:.4f}",
                "{:.3f}–{:.3f}".format(*r.cpu_ratio_interval),
                f"{r.extra_cpu_ms_per_step:.2f}",
            )
            for r in results
        ],
    )


if __name__ == "__main__":
    main()
