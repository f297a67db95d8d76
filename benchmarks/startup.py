"""Measure how long brim takes until it says something, and whether it has imported torch by then.

    python -m benchmarks.startup

Goals as in CONTRACT.md: 0.5 s for the help and for a configuration's text, 2 s with small data. The commands take turns
with an empty Python, so that what else the machine does falls on all; ratios to it hold on other machines too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import print_table, write_report
from benchmarks.subject import Shape, configuration, lora, make_base, make_rows

TEXT_GOAL_S, DATA_GOAL_S = 0.5, 2.0
SHAPE = Shape(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)

# Runs the command line and tells on its last line of stderr which of the heavy packages it has imported.
_PROBE = """
import sys
from brim.cli import main
heavy = ("torch", "transformers", "peft", "datasets", "pandas", "pyarrow")
try:
    main()
except SystemExit as end:
    code = end.code
else:
    code = 0
print(",".join(name for name in heavy if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Hold one command, run several times."""

    command: str
    median_s: float  # wall
    fastest_s: float
    slowest_s: float
    median_cpu_s: float  # user and system: what the wall seconds are near on an idle machine
    over_bare_python: float  # ratio of median wall seconds
    goal_s: float | None
    heavy_imports: tuple[str, ...]


def measure(commands: Mapping[str, tuple[Sequence[str], float | None]], *, repeats: int, folder: Path) -> list[Startup]:
    """Wall seconds of each command, in turns; a first round warms the disk's cache and is not counted.

    commands: name -> (arguments of brim, goal in seconds); the empty Python is added.
    """
    lines = {"python -c pass": [sys.executable, "-c", "pass"]}
    brim = str(Path(sys.executable).with_name("brim"))
    lines |= {name: [brim, *arguments] for name, (arguments, _) in commands.items()}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
    for repeat in range(repeats + 1):
        for name, line in lines.items():
            taken = _run(line, folder)
            if repeat:
                runs[name].append(taken)
    wall = {name: [wall_s for wall_s, _ in taken] for name, taken in runs.items()}
    bare_s = median(wall["python -c pass"])
    return [
        Startup(
            command=name,
            median_s=round(median(wall[name]), 4),
            fastest_s=round(min(wall[name]), 4),
            slowest_s=round(max(wall[name]), 4),
            median_cpu_s=round(median(cpu_s for _, cpu_s in taken), 4),
            over_bare_python=round(median(wall[name]) / bare_s, 2),
            goal_s=commands[name][1] if name in commands else None,
            heavy_imports=_heavy_imports(commands[name][0], folder) if name in commands else (),
        )
        for name, taken in runs.items()
    ]


def make_commands(folder: Path, *, num_rows: int) -> dict[str, tuple[Sequence[str], float | None]]:
    """Write a configuration, a model folder and rows; return the commands that a user would run on them."""
    rows = make_rows(folder / "rows.jsonl", num_rows=num_rows, max_characters=2000)
    base = make_base(folder / "base", SHAPE, rows)
    settings = configuration(base, adapter=lora(), trainer={"batch_size": 1})
    (folder / "config.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")  # JSON is YAML
    return {
        "brim --help": (["--help"], TEXT_GOAL_S),
        "brim check, text only": (["check", "config.yaml"], TEXT_GOAL_S),
        f"brim check, {num_rows:,} rows": (["check", "config.yaml", "--dataset", "rows.jsonl"], DATA_GOAL_S),
    }


def _run(line: Sequence[str], folder: Path) -> tuple[float, float]:
    """Return wall seconds and CPU seconds."""
    cpu_before, started = _children_cpu_s(), time.perf_counter()
    subprocess.run(line, cwd=folder, env=_environment(), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started, _children_cpu_s() - cpu_before


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _heavy_imports(arguments: Sequence[str], folder: Path) -> tuple[str, ...]:
    line = [sys.executable, "-c", _PROBE, *arguments]
    ended = subprocess.run(line, cwd=folder, env=_environment(), check=True, capture_output=True, text=True)
    found = ended.stderr.splitlines()[-1]
    return tuple(found.split(",")) if found else ()


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time until brim says something.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1000, help="of the data that is checked")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = measure(make_commands(folder, num_rows=options.rows), repeats=options.repeats, folder=folder)
    _show(results)
    figures: dict[str, Any] = {"repeats": options.repeats, "commands": [asdict(result) for result in results]}
    write_report("startup", figures=figures, num_threads=1)


def _show(results: Sequence[Startup]) -> None:
    print_table(
        "wall seconds until a command ends",
        ("command", "median s", "fastest", "slowest", "CPU s", "× bare Python", "goal s", "heavy imports"),
        [
            (
                r.command,
                f"{r.median_s:.3f}",
                f"{r.fastest_s:.3f}",
                f"{r.slowest_s:.3f}",
                f"{r.median_cpu_s:.3f}",
                f"{r.over_bare_python:.1f}",
                "–" if r.goal_s is None else f"{r.goal_s:g}",
                ", ".join(r.heavy_imports) or "none",
            )
            for r in results
        ],
    )


if __name__ == "__main__":
    main()
