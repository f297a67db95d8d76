"""Time the demo's training on two ranks, one of which takes a quarter longer, with planned and with claimed dealing.

    PYTHONPATH=examples python -m benchmarks.claimed_ranks [--rows N] [--rounds N]

Rows are padded: packed, a step is four even micro-batches on the two ranks, and there is nothing to claim.
Every rank is a process of one thread that gloo joins. The slowed rank sleeps, after each micro-batch's forward and
backward pass, for a quarter of the time that it took: it has 0.8 of a rank's speed, and both have 1.8. So what is ideal
is the time of one rank, alone and not slowed, over 1.8. `by two ranks`: their time, neither slowed, times 2 / 1.8; what
sharing the machine and adding up the gradients cost is then left out. Planned dealing gives both ranks half of the work
and waits for the slowed one, 1.25 times as long, so that it reaches 8/9 (0.889) of the ideal at most.
In each round all contenders run once, every other round backwards. Seconds are those of the steps but the first,
without start-up, evaluation and checkpoints. It is to take four minutes on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias
from unittest.mock import patch

from benchmarks.report import print_table, write_report
from benchmarks.several_ranks import CONFIG, WARMUP_STEPS, _finished, _of_steps, _started, _two_ranks, _write_rows

GOAL = 0.87  # of the ideal, with claimed dealing
SLEEP = 0.25  # of the time that a micro-batch took
SLOWED_RANK = "1"
IDEAL_SPEED = 1 + 1 / (1 + SLEEP)  # of both ranks; one has 1
CONTENDERS = ("one rank", "two ranks", "planned, one slowed", "claimed, one slowed")
Round: TypeAlias = Mapping[str, Mapping[str, float]]  # by contender


def main() -> None:
    if sys.argv[1:2] == ["--slowed"]:
        _train_slowed(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claimed_ranks", description=__doc__)
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_rows(folder, asked.rows)
        rounds = [_round(folder / str(number), folder, asked.rows) for number in range(asked.rounds)]
    figures = figures_of(rounds)
    print_table("medians", ["figure", "value"], [[key, f"{value:.3f}"] for key, value in figures.items()])
    write_report(
        "claimed_ranks", figures={"rows": asked.rows, "goal": GOAL, **figures, "rounds": rounds}, num_threads=1
    )


def _round(folder: Path, data: Path, num_rows: int) -> dict[str, dict[str, float]]:
    folder.mkdir()
    taken = {}
    for name in CONTENDERS[:: -1 if int(folder.name) % 2 else 1]:
        taken[name] = _run(name, folder / name.replace(", ", "-").replace(" ", "-"), data, num_rows)
        print(name, {key: round(value, 3) for key, value in taken[name].items()}, flush=True)
    return taken


def _run(name: str, run: Path, data: Path, num_rows: int) -> dict[str, float]:
    module = ["benchmarks.claimed_ranks", "--slowed"] if "slowed" in name else ["brim"]
    words = ["-m", *module, "train", CONFIG, "--dataset", data / "rows.jsonl", "--output-directory", run]
    words += [f"preprocessing.sample_size={num_rows}", "trainer.packing=false"]
    words += ["backend.trainer.dealing=claimed"] if name.startswith("claimed") else []
    _finished([_started([*([] if name == "one rank" else ["-m", "torch.distributed.run", *_two_ranks()]), *words])])
    return {**_of_steps(run), **_share_of_slowed(run)}


def _share_of_slowed(run: Path) -> dict[str, float]:
    """Return the share of the rows that the slowed rank did, where micro-batches were claimed; 0.444 is its speed's."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_rank = [line["rows_by_rank"] for line in lines if "rows_by_rank" in line][WARMUP_STEPS:]
    if not by_rank:
        return {}
    return {"rows of slowed": sum(rows[int(SLOWED_RANK)] for rows in by_rank) / sum(map(sum, by_rank))}


def figures_of(rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians over the rounds; a share of the ideal is its time over that which was taken."""
    figures = {}
    for name in CONTENDERS[2:]:
        taken = [each[name]["seconds"] for each in rounds]
        alone = [each["one rank"]["seconds"] / IDEAL_SPEED for each in rounds]
        both = [each["two ranks"]["seconds"] * 2 / IDEAL_SPEED for each in rounds]
        figures[f"{name}: of the ideal"] = median(ideal / s for ideal, s in zip(alone, taken, strict=True))
        figures[f"{name}: of the ideal by two ranks"] = median(ideal / s for ideal, s in zip(both, taken, strict=True))
    planned, claimed = ([each[name]["seconds"] for each in rounds] for name in CONTENDERS[2:])
    figures["planned over claimed"] = median(p / c for p, c in zip(planned, claimed, strict=True))
    return figures


def _train_slowed(arguments: Sequence[str]) -> None:
    """Run brim with these arguments; where this is the slowed rank, its passes of micro-batches take longer."""
    from brim.cli import main as brim
    from brim.train.gradient import MicroBatchPass

    one_pass = MicroBatchPass.__call__

    def slowed(self: MicroBatchPass, *positional: Any, **options: Any) -> Any:
        began = time.perf_counter()
        loss = one_pass(self, *positional, **options)
        time.sleep(SLEEP * (time.perf_counter() - began))
        return loss

    sys.argv = ["brim", *arguments]
    with patch.object(MicroBatchPass, "__call__", slowed if os.environ["RANK"] == SLOWED_RANK else one_pass):
        brim()


if __name__ == "__main__":
    main()
