"""Compare a prediction that is killed again and again at random moments with the same one left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.batching_run import ROOT, RunFailed, last_words
from benchmarks.inference_begun import begun_by_process
from benchmarks.inference_kills import predict_killed
from benchmarks.inference_subject import Subject

NUM_ROWS, NUM_KILLS = 120, 20
BATCH_ROWS = 16  # by hand, so that a batch is a small part of the work


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Hold what came of the killed prediction."""

    num_rows: int
    batch_rows: int
    num_kills: int
    rows_done: tuple[int, ...]  # at each kill
    rows_repeated: tuple[int, ...]  # by each process that went on: begun before, and not noted as done
    num_generated_twice: int  # rows that had been noted as done
    is_equal: bool  # the output, byte by byte
    seconds_alone: float  # of the uninterrupted one's generation

    @property
    def is_met(self) -> bool:
        return self.is_equal and not self.num_generated_twice and max(self.rows_repeated) <= self.batch_rows


def kill_and_resume(
    subject: Subject, folder: Path, *, num_rows: int, num_kills: int, num_threads: int, seed: int = 0
) -> Resumed:
    """Kill a prediction and resume it. Raises RunFailed where a process ends otherwise than killed or well."""
    folder.mkdir()
    settings = subject.settings()
    settings["trainer"] = {**settings["trainer"], "batch_size": BATCH_ROWS}
    config, prompts = folder / "config.yaml", folder / "prompts.jsonl"
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    prompts.write_text("".join(subject.lines(num_rows)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}

    def command(name: str) -> list[str]:
        return [
            sys.executable, "-m", "benchmarks.inference_begun", str(folder / f"{name}.notes"), "predict", str(config),
            "--dataset", str(prompts), "--output", str(folder / f"{name}.jsonl"), "--resume",
        ]  # fmt: skip

    seconds_alone = _alone(command("alone"), folder / "alone.jsonl", environment)
    killed = predict_killed(
        command("killed"), folder / "killed.jsonl",
        num_rows=num_rows, num_kills=num_kills, seed=seed, environment=environment,
    )  # fmt: skip
    begun = begun_by_process(folder / "killed.notes")
    return Resumed(
        num_rows=num_rows,
        batch_rows=BATCH_ROWS,
        num_kills=killed.num_kills,
        rows_done=killed.rows_done,
        rows_repeated=tuple(each.num_repeated for each in begun[1:]),
        num_generated_twice=killed.num_generated_twice,
        is_equal=(folder / "killed.jsonl").read_bytes() == (folder / "alone.jsonl").read_bytes(),
        seconds_alone=seconds_alone,
    )


def figures(found: Resumed) -> dict[str, Any]:
    """Return the figures for the record."""
    return {**asdict(found), "most_rows_repeated": max(found.rows_repeated), "is_met": found.is_met}


def _alone(command: list[str], output: Path, environment: dict[str, str]) -> float:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"the prediction ended with {done.returncode}: {last_words(done.stderr)}")
    summary = json.loads(output.with_name(f"{output.name}.summary.json").read_text(encoding="utf-8"))
    return float(summary["seconds"])
