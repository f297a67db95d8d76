"""Kill a prediction again and again at random moments and resume it each time."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.batching_run import ROOT, RunFailed, last_words
from brim.infer import Journal
from brim.workflows.prediction.job import JobFolder

_POLL_S = 0.002
_LONGEST_SILENCE_S = 300.0  # a process that writes nothing for so long will not


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Hold what came of it."""

    num_kills: int
    rows_done: tuple[int, ...]  # at each kill
    num_generated_twice: int  # rows that had ended and been noted, and were generated again all the same
    num_rows_repeated_at_most: int | None  # the rows that were being generated when the kills came
    seconds: float  # of all processes, loading included


def predict_killed(
    command: Sequence[str], output: Path, *, num_rows: int, num_kills: int, seed: int, environment: Mapping[str, str]
) -> Killed:
    """Run `command` (brim predict … --output OUTPUT --resume), killed `num_kills` times and then to its end.

    A kill comes once a random number of rows is done, and a random moment of up to half a second later: in the midst of
    a step, a write, a sync. Raises RunFailed where a process ends otherwise than killed or well.
    """
    chance, started, job = random.Random(seed), time.monotonic(), JobFolder(output)
    marks = sorted(chance.sample(range(num_rows), num_kills))
    rows_done = []
    for mark in marks:
        process = _start(command, environment)
        _wait_for_rows(job, mark, process)
        time.sleep(chance.random() / 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            break  # it was done before its moment came
        rows_done.append(num_done(job))
    process = _start(command, environment)
    _, said = process.communicate()
    if process.returncode:
        raise RunFailed(f"the resumed prediction ended with {process.returncode}: {last_words(said)}")
    with Journal(job.responses) as journal:
        twice = len(journal) - len(journal.keys())
    summary = json.loads(output.with_name(f"{output.name}.summary.json").read_text(encoding="utf-8"))
    return Killed(
        num_kills=len(rows_done),
        rows_done=tuple(rows_done),
        num_generated_twice=twice,
        num_rows_repeated_at_most=summary["num_rows_repeated_at_most"],
        seconds=time.monotonic() - started,
    )


def num_done(job: JobFolder) -> int:
    """Count the rows whose responses are noted; looks at a copy, since opening a journal mends it."""
    if not job.responses.is_file():
        return 0
    copy = job.output.with_name(f".{job.output.name}.look")
    try:
        copy.write_bytes(job.responses.read_bytes())
        with Journal(copy) as journal:
            return len(journal)
    finally:
        copy.unlink(missing_ok=True)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command), cwd=ROOT, env=dict(environment), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def _wait_for_rows(job: JobFolder, mark: int, process: subprocess.Popen[str]) -> None:
    """Until so many rows are done, or the process has ended."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = job.responses.stat().st_size if job.responses.is_file() else 0
        if now != size:
            size, since = now, time.monotonic()
            if num_done(job) >= mark:
                return
        if time.monotonic() - since > _LONGEST_SILENCE_S:
            process.kill()
            raise RunFailed("the prediction writes nothing any more")
        time.sleep(_POLL_S)
