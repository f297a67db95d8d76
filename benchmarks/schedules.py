"""Measure what a moving batch costs: planning a schedule over 1e12 tokens, and steps whose schedule does not move.

    python -m benchmarks.schedules

Planning: from the trainer's keys and the rows' lengths to the phases, their steps and the run's total.
Steps: brim's loop without a schedule, with a schedule of one size, and with a ramp over the same samples, in one
process and in turn, step by step. The first two find the same losses to the bit.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.batching_planning import long_tailed_lengths, rows_of_lengths
from benchmarks.loop_overhead import SMALL, median_interval
from benchmarks.report import print_table, write_report
from benchmarks.subject import EFFECTIVE_BATCH_SIZE, SEED, configuration, lora, make_base, make_rows
from brim.batching import ByRows
from brim.config import load_config
from brim.config.schema import FinetuneTrainer
from brim.data import prepare
from brim.data.read import read
from brim.data.tokens import TokenRows
from brim.models import load_llm
from brim.session import Session, open_session
from brim.train import Loop, Record, RunLength, build_job
from brim.train.checkpoints import CheckpointStore, TrainState

NUM_TOKENS = 10**12
GOAL_PLANNING_S = 0.1
GOAL_RATIO = 1.01
WARMUP_STEPS = 2  # not counted: allocations, caches, the optimizer's state
MICRO_BATCH_ROWS = 4

# Of the trainer, each beside a number of epochs, or of steps, that comes to 1e12 tokens.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "constant": {},
    "doubling ramp, 0.1dur": {"batch_rampup": {"length": "0.1dur", "from": 8}},
    "doubling ramp, 1e11tok": {"batch_rampup": {"length": "1e11tok", "from": 8}},
    "linear ramp of 511 stages": {
        "batch_rampup": {"length": "1e11tok", "from": 8, "shape": "linear", "increment": 8},
    },
    "equal steps, 5e6ba": {"batch_rampup": {"length": "5e6ba", "from": 8, "shape": "equal_steps"}},
    "table of 10 token steps": {
        "batch_schedule": " ".join(f"{number * 9 * 10**10}tok:{8 * 2**number}" for number in range(10)),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Hold seconds from the keys to all phases with their steps."""

    schedule: str
    counted_in: str  # epochs or train_steps
    num_rows: int
    num_phases: int
    total_steps: int
    seconds: float  # median
    goal_s: float = GOAL_PLANNING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Hold steps of one way of running over those of a run without a schedule."""

    schedule: str
    num_steps: int
    sizes: tuple[int, ...]  # that the schedule has
    equal_to_the_bit: bool  # losses
    seconds: float  # of the steps that count
    ratio: float  # of the times for the same samples: median over steps, or of the sums where the steps differ
    ratio_interval: tuple[float, float] | None  # 95%, of the median
    cpu_ratio: float  # the same of the CPU time, which other processes disturb less
    cpu_ratio_interval: tuple[float, float] | None
    goal: float | None


def planned(*, num_rows: int, repeats: int) -> list[Planned]:
    """Plan each kind over 1e12 tokens, whose end is given in epochs, then in steps."""
    rows = rows_of_lengths(long_tailed_lengths(num_rows))
    epochs = -(-NUM_TOKENS // int(rows.lengths.sum()))
    found = []
    for name, keys in KINDS.items():
        by_epochs = _planned(name, {"epochs": epochs, **keys}, rows, repeats)
        found += [by_epochs, _planned(name, {"train_steps": by_epochs.total_steps, **keys}, rows, repeats)]
    return found


def _planned(name: str, keys: Mapping[str, Any], rows: TokenRows, repeats: int) -> Planned:
    trainer = FinetuneTrainer.model_validate({"type": "finetune", "effective_batch_size": 4096, **keys})
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        length = RunLength.of(trainer, rows, seed=SEED)
        phases = list(length.schedule.stretches(num_rows=len(rows), total_samples=length.total_samples))
        total_steps = length.total_steps
        seconds.append(time.perf_counter() - started)
    assert total_steps is not None, "none of these follows what is measured"
    return Planned(
        schedule=name,
        counted_in="train_steps" if "train_steps" in keys else "epochs",
        num_rows=len(rows),
        num_phases=len(phases),
        total_steps=total_steps,
        seconds=median(seconds),
    )


class Turns:
    """Lets several threads take steps in turn, one at a time; every other round in the opposite order."""

    def __init__(self, members: Sequence[str]) -> None:
        self._order = list(members)
        self._position = 0
        self._condition = threading.Condition()

    def wait(self, member: str) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._order[self._position] == member)

    def pass_on(self, *, leaves: bool = False) -> None:
        """Pass the turn on: the one that had it has taken its step."""
        with self._condition:
            if leaves:
                del self._order[self._position]
            else:
                self._position += 1
            if self._position == len(self._order):
                self._order.reverse()
                self._position = 0
            self._condition.notify_all()


class Timed:
    """Observe the time of each step, and wait for the turn before the next."""

    def __init__(self, name: str, turns: Turns) -> None:
        self._name, self._turns = name, turns
        self._started, self._cpu_started = 0.0, 0.0
        self.losses: list[float] = []
        self.sizes: list[int] = []
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []  # of this thread

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None:
        self._begin()

    def write(self, record: Record) -> None:
        if record.get("split") != "train":
            return
        self.seconds.append(time.perf_counter() - self._started)
        self.cpu_s.append(time.thread_time() - self._cpu_started)
        self.losses.append(record["loss"])
        self.sizes.append(record["effective_batch_size"])
        self._turns.pass_on()
        self._begin()

    def _begin(self) -> None:
        self._turns.wait(self._name)
        self._started, self._cpu_started = time.perf_counter(), time.thread_time()

    def close(self) -> None:
        self._turns.pass_on(leaves=True)


def stepped(*, num_steps: int, folder: Path) -> list[Stepped]:
    """Run the three loops, each with a model of its own of the same weights."""
    num_rows = EFFECTIVE_BATCH_SIZE * num_steps
    rows_file = make_rows(folder / "rows.jsonl", num_rows=num_rows, max_characters=700)
    base = make_base(folder / "base", SMALL, rows_file)
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "one size": {"batch_schedule": f"0sp:{EFFECTIVE_BATCH_SIZE}"},
        "doubling ramp": {"batch_rampup": {"length": "0.5dur", "from": EFFECTIVE_BATCH_SIZE // 4}},
    }
    turns = Turns(list(ways))
    timed = {name: Timed(name, turns) for name in ways}
    runs = [_prepared(base, rows_file, keys, timed[name], folder / name) for name, keys in ways.items()]
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [_compared(name, each, timed["none"]) for name, each in timed.items() if name != "none"]


def _prepared(base: Path, rows_file: Path, keys: Mapping[str, Any], timed: Timed, folder: Path) -> Callable[[], None]:
    """Prepare a run: its model is loaded and its rows are read."""
    trainer = {"batch_size": MICRO_BATCH_ROWS, "learning_rate": 1e-3, **keys}
    session = open_session(load_config(configuration(base, adapter=lora(), trainer=trainer)).config)
    prepared = prepare(read(rows_file), session.config, session.encoder, context_length=session.folder.context_length)
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    job = build_job(
        session.config,
        _trainer(session),
        llm,
        prepared.splits["train"],
        length=RunLength.of(_trainer(session), prepared.splits["train"], seed=session.config.random_seed),
        cutter=ByRows(max_rows=MICRO_BATCH_ROWS),
        pad_id=session.encoder.pad_id,
        evaluate=None,
        store=CheckpointStore(folder / "checkpoints"),  # written once, after the last step
        observer=timed,
    )

    def run() -> None:
        timed.start(first_step=0, total_steps=job.length.total_steps, total_samples=job.length.total_samples)
        try:
            Loop(job, TrainState()).run(threading.Event())
        finally:
            timed.close()

    return run


def _trainer(session: Session) -> FinetuneTrainer:
    trainer = session.config.trainer
    assert isinstance(trainer, FinetuneTrainer)
    return trainer


def _compared(name: str, ours: Timed, without: Timed) -> Stepped:
    same_steps = ours.sizes == without.sizes
    ratio, interval = _ratio(ours.seconds, without.seconds, in_pairs=same_steps)
    cpu_ratio, cpu_interval = _ratio(ours.cpu_s, without.cpu_s, in_pairs=same_steps)
    return Stepped(
        schedule=name,
        num_steps=len(ours.losses),
        sizes=tuple(dict.fromkeys(ours.sizes)),
        equal_to_the_bit=ours.losses == without.losses,
        seconds=round(sum(ours.seconds), 3),
        ratio=ratio,
        ratio_interval=interval,
        cpu_ratio=cpu_ratio,
        cpu_ratio_interval=cpu_interval,
        goal=GOAL_RATIO if same_steps else None,
    )


def _ratio(
    ours: Sequence[float], others: Sequence[float], *, in_pairs: bool
) -> tuple[float, tuple[float, float] | None]:
    if not in_pairs:
        return round(sum(ours) / sum(others), 4), None
    ratios = [a / b for a, b in zip(ours, others, strict=True)][WARMUP_STEPS:]
    return round(median(ratios), 4), median_interval(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of schedules of the effective batch.")
    parser.add_argument("--steps", type=int, default=60, help="of the loops")
    parser.add_argument("--repeats", type=int, default=5, help="of each planning")
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 100_000], help="of the data planned for")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plans = [each for num_rows in options.rows for each in planned(num_rows=num_rows, repeats=options.repeats)]
    _show_plans(plans)
    with tempfile.TemporaryDirectory() as folder:
        steps = stepped(num_steps=options.steps, folder=Path(folder))
    _show_steps(steps)
    figures = {
        "tokens_planned": NUM_TOKENS,
        "planning": [asdict(each) for each in plans],
        "steps": [asdict(each) for each in steps],
    }
    write_report("schedules", figures=figures, num_threads=1)


def _show_plans(plans: Sequence[Planned]) -> None:
    print_table(
        f"planned over {NUM_TOKENS:.0e} tokens",
        ("schedule", "counted in", "rows", "phases", "steps", "ms"),
        [
            (
                p.schedule,
                p.counted_in,
                f"{p.num_rows:,}",
                str(p.num_phases),
                f"{p.total_steps:,}",
                f"{1000 * p.seconds:.2f}",
            )
            for p in plans
        ],
    )


def _show_steps(steps: Sequence[Stepped]) -> None:
    print_table(
        "steps over those without a schedule, in turn (goal for one size: at most 1.01)",
        ("schedule", "steps", "sizes", "losses equal", "wall", "95%", "CPU time", "95%"),
        [
            (
                s.schedule,
                str(s.num_steps),
                ", ".join(map(str, s.sizes)),
                "yes" if s.equal_to_the_bit else "no",
                f"{s.ratio:.4f}",
                "" if s.ratio_interval is None else "{:.4f}–{:.4f}".format(*s.ratio_interval),
                f"{s.cpu_ratio:.4f}",
                "" if s.cpu_ratio_interval is None else "{:.4f}–{:.4f}".format(*s.cpu_ratio_interval),
            )
            for s in steps
        ],
    )


if __name__ == "__main__":
    main()
