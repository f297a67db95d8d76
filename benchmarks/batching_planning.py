"""Measure how long it takes to plan a run over a million rows."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.batching_subject import CONTEXT_TOKENS, Subject
from benchmarks.subject import SEED
from brim.data.tokens import TokenRows
from brim.planning import TrainingPlan

NUM_ROWS = 1_000_000
EFFECTIVE_BATCH_SIZES = (32, 256)
GOAL_S = 10.0
_MEDIAN_TOKENS, _SPREAD = 139, 1.0  # of the docstring rows: the 99th percentile is 1,417


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTime:
    """Hold seconds from the lengths to the plan: with empty caches, then with what the first has left."""

    num_rows: int
    effective_batch_size: int
    seconds: float  # median
    seconds_of_each: list[float]
    seconds_with_caches: float  # the traces are there, the plan is made anew
    cut_ms_per_step: float  # in the run: of one effective batch, by the plan's costs
    total_steps: int | None
    micro_batches_per_step: float | None
    padding: float | None
    goal_s: float = GOAL_S


def long_tailed_lengths(num_rows: int) -> NDArray[np.int64]:
    """Return tokens of rows that are log-normal, as the docstring rows nearly are."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(_MEDIAN_TOKENS), _SPREAD, num_rows)
    return np.clip(drawn, 8, CONTEXT_TOKENS).astype(np.int64)


def rows_of_lengths(lengths: NDArray[np.int64]) -> TokenRows:
    """Return rows of nothing but token 0, all of it supervised."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    num_tokens = int(lengths.sum())
    columns = [
        pa.array(np.arange(len(lengths), dtype=np.int64)),
        pa.ListArray.from_arrays(offsets, pa.array(np.zeros(num_tokens, dtype=np.int32))),
        pa.ListArray.from_arrays(offsets, pa.array(np.ones(num_tokens, dtype=np.bool_))),
    ]
    return TokenRows(pa.Table.from_arrays(columns, names=["key", "input_ids", "supervised"]))


def plan_times(subject: Subject, *, num_rows: int = NUM_ROWS, rounds: int = 3) -> list[PlanTime]:
    """For each effective batch size, on the device at hand; nothing is loaded."""
    rows = rows_of_lengths(long_tailed_lengths(num_rows))
    return [_plan_time(subject, rows, size, rounds) for size in EFFECTIVE_BATCH_SIZES]


def _plan_time(subject: Subject, rows: TokenRows, size: int, rounds: int) -> PlanTime:
    seconds: list[float] = []
    for _ in range(rounds):
        with _empty_caches():
            seconds.append(_timed(subject, rows, size)[0])
            with_caches, plan = _timed(subject, rows, size)
    assert plan.chosen is not None, "the smallest device at hand takes a row"
    return PlanTime(
        num_rows=len(rows),
        effective_batch_size=size,
        seconds=round(median(seconds), 2),
        seconds_of_each=[round(each, 2) for each in seconds],
        seconds_with_caches=round(with_caches, 2),
        cut_ms_per_step=round(_cut_ms(plan, rows.lengths[:size]), 3),
        total_steps=plan.total_steps,
        micro_batches_per_step=plan.chosen.micro_batches_per_step,
        padding=plan.chosen.padding,
    )


def _timed(subject: Subject, rows: TokenRows, size: int) -> tuple[float, TrainingPlan]:
    from brim.batching import BatchSchedule
    from brim.config import load_config
    from brim.memory.devices import device_at_hand
    from brim.models import read_architecture
    from brim.planning import PlanRequest, plan_run
    from brim.session import open_session
    from brim.train import RunLength

    session = open_session(load_config(subject.settings(trainer={"effective_batch_size": size})).config)
    started = time.perf_counter()
    request = PlanRequest(
        config=session.config,
        folder=session.folder,
        architecture=read_architecture(session.folder, trust_remote_code=session.config.trust_remote_code),
        device=device_at_hand(session.device),
        is_at_hand=True,
        rows=rows,
        length=RunLength(num_rows=len(rows), schedule=BatchSchedule.constant(size), total_samples=len(rows)),
    )
    plan = plan_run(request, every_way=False, replan=True, say=lambda line: None).plan
    return time.perf_counter() - started, plan


def _cut_ms(plan: TrainingPlan, lengths: NDArray[np.int64], *, repeats: int = 20) -> float:
    from brim.batching import ByLength

    assert plan.costs is not None, "the plan has a way that fits"
    assert plan.chosen is not None, "the plan has a way that fits"
    cutter = ByLength(costs=plan.costs, cap_bytes=plan.chosen.cap_bytes)
    started = time.perf_counter()
    for _ in range(repeats):
        cutter.cut(lengths)
    return 1000 * (time.perf_counter() - started) / repeats


@contextmanager
def _empty_caches() -> Iterator[None]:
    before = os.environ.get("BRIM_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BRIM_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["BRIM_CACHE_DIR"]
            else:
                os.environ["BRIM_CACHE_DIR"] = before
