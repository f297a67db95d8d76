"""Time a prediction by two processes, beside one, and beside two independent jobs of half the rows at once.

    PYTHONPATH=examples python -m benchmarks.members [--rows N] [--rounds N] [--short-rows N]

Every process has one thread. In each round all contenders run once, in turn, on prompts of the demo's base model.
Seconds are those of generating, as the summary has them, so that start-ups do not count; CPU seconds are those of whole
processes, and those of the same command over two rows are taken off as `work`. What the coordinator itself takes is
measured where it has most to do: short rows, of 8 tokens and 8 to come, on a model of 30,000 parameters.
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
from pathlib import Path
from statistics import median
from typing import TypeAlias

import brim
from benchmarks.report import print_table, write_report
from benchmarks.subject import Shape, make_base
from stdlib_code.dataset import instruction_rows, stdlib_modules, write_jsonl

CONFIG = {
    "model_type": "llm",
    "base_model": str(Path("examples/stdlib_code/base-model").resolve()),
    "input_features": [{"name": "instruction", "type": "text"}],
    "output_features": [{"name": "output", "type": "text"}],
    "trainer": {"type": "none"},
    "generation": {"max_new_tokens": 64, "engine": "slots"},
}
TINY = Shape(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
)
Round: TypeAlias = Mapping[str, Mapping[str, float]]  # by contender


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.members", description=__doc__)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short-rows", type=int, default=20_000)
    asked = parser.parse_args()
    rows = instruction_rows(stdlib_modules())[: asked.rows]
    parts = {"whole": rows, "even": rows[::2], "odd": rows[1::2], "few": rows[:2]}
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.yaml").write_text(json.dumps(CONFIG))
        for part, of in parts.items():
            write_jsonl(of, Path(name, f"{part}.jsonl"))
        for number in range(asked.rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            rounds.append(_round(folder))
    figures = _coordinator(asked.short_rows)
    figures |= {
        "CPU seconds of work, two over one": median(each["two"]["work_s"] / each["one"]["work_s"] for each in rounds),
        "seconds, one over two": median(each["one"]["seconds"] / each["two"]["seconds"] for each in rounds),
        "seconds, two over the control": median(each["two"]["seconds"] / each["control"]["seconds"] for each in rounds),
        "busy share of the members": median(each["two"]["busy"] for each in rounds),
    }
    print_table("medians", ["figure", "value"], [[key, f"{value:.3f}"] for key, value in figures.items()])
    write_report("members", figures={"rows": asked.rows, **figures, "rounds": rounds}, num_threads=1)


def _coordinator(num_rows: int) -> dict[str, float]:
    """Measure this process from the first short row that is kept to the last, while two others generate."""
    with tempfile.TemporaryDirectory() as name:
        folder, seen = Path(name), list[tuple[int, float, float, int]]()
        rows = [{"instruction": f"{n % 7} + {n % 11} =", "input": "", "output": "1"} for n in range(num_rows)]
        data = folder / "rows.jsonl"
        write_jsonl(rows, data)
        make_base(folder / "base", TINY, data)
        config = {**CONFIG, "base_model": str(folder / "base"), "generation": {"max_new_tokens": 8, "engine": "slots"}}

        def on_batch(count: int) -> None:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seen.append((count, time.process_time(), time.monotonic(), peak_kib))

        Path(folder, "config.yaml").write_text(json.dumps(config))
        model = brim.Model(folder / "config.yaml")
        model.predict(data, output=folder / "p.jsonl", gpus=2, on_batch=on_batch, say=None)
    counts, cpu_s, at_s, peaks = (list(each) for each in zip(*seen, strict=True))
    seconds = cpu_s[-1] - cpu_s[0]
    return {
        "short rows": num_rows,
        "coordinator, microseconds a short row": 1e6 * seconds / sum(counts[1:]),
        "coordinator, share of the time": seconds / (at_s[-1] - at_s[0]),
        "coordinator, MiB more at the end than at the first row": (peaks[-1] - peaks[0]) / 2**10,
    }


def _round(folder: Path) -> Round:
    taken = {
        "one": _taken(folder, {"whole": 1}),
        "two": _taken(folder, {"whole": 2}),
        "control": _taken(folder, {"even": 1, "odd": 1}),
    }
    for name, processes in (("one", 1), ("two", 2)):
        taken[name]["work_s"] = taken[name]["cpu_s"] - _taken(folder, {"few": processes})["cpu_s"]
    print({name: {key: round(value, 2) for key, value in each.items()} for name, each in taken.items()}, flush=True)
    return taken


def _taken(folder: Path, parts: Mapping[str, int]) -> dict[str, float]:
    """Predict these parts at once, each by so many processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outputs = {part: folder / f"{part}-{number}.jsonl" for part, number in parts.items()}
    started = [_started(folder.parent / f"{part}.jsonl", output, parts[part]) for part, output in outputs.items()]
    for process in started:
        if process.wait():
            raise SystemExit(f"a contender ended with exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summaries = [json.loads(Path(f"{output}.summary.json").read_text()) for output in outputs.values()]
    busy = [each["busy"] for summary in summaries for each in summary["generation"].get("members", [])]
    return {
        "seconds": max(summary["seconds"] for summary in summaries),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        **({"busy": median(busy)} if busy else {}),
    }


def _started(data: Path, output: Path, processes: int) -> subprocess.Popen[bytes]:
    words: Sequence[object] = ["-m", "brim", "predict", data.parent / "config.yaml", "--dataset", data]
    words = [*words, "--output", output, "--gpus", processes, "--on-overlong", "skip"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, *map(str, words)], env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()
