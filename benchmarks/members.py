"""Time a prediction by two processes, beside one, and beside two independent jobs of half the rows at once.

    PYTHONPATH=examples python -m benchmarks.members [--rows N] [--rounds N] [--short-rows N] [--ray]

Every process has one thread. In each round all contenders run once, in turn, on prompts of the demo's base model.
Seconds are those of generating, as the summary has them, so that start-ups do not count; CPU seconds are those of whole
processes, all that a command begins, and those of the same command over two rows are taken off as `work`. They are read
from /proc every tenth of a second, since nobody waits for Ray's workers: of each process up to a tenth is missed.
--ray: two actors of a Ray cluster that is begun for them contend, too. What the coordinator itself takes is measured
where it has most to do: short rows, of 8 tokens and 8 to come, on a model of 30,000 parameters.
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
from contextlib import suppress
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
_EVERY_S = 0.1

Round: TypeAlias = Mapping[str, Mapping[str, float]]  # by contender


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.members", description=__doc__)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short-rows", type=int, default=20_000)
    parser.add_argument("--ray", action="store_true")
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
            rounds.append(_round(folder, with_ray=asked.ray))
    figures: dict[str, float] = _coordinator(asked.short_rows)
    for name in ("two", "ray") if asked.ray else ("two",):
        figures |= {
            f"CPU seconds of work, {name} over one": _ratio(rounds, name, "one", "work_s"),
            f"seconds, one over {name}": _ratio(rounds, "one", name, "seconds"),
            f"seconds, {name} over the control": _ratio(rounds, name, "control", "seconds"),
            f"busy share of the members, {name}": median(each[name]["busy"] for each in rounds),
        }
    print_table("medians", ["figure", "value"], [[key, f"{value:.3f}"] for key, value in figures.items()])
    write_report("members", figures={"rows": asked.rows, **figures, "rounds": rounds}, num_threads=1)


def _coordinator(num_rows: int) -> dict[str, float]:
    """Measure this process from the first short row that is kept to the last, while two others generate."""
    with tempfile.TemporaryDirectory() as name:
        folder, seen = Path(name), list[tuple[int, float, float, int]]()
        data = folder / "rows.jsonl"
        added = ((number % 7, number % 11) for number in range(num_rows))
        write_jsonl(({"instruction": f"{a} + {b} =", "input": "", "output": "1"} for a, b in added), data)
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


def _ratio(rounds: Sequence[Round], one: str, other: str, what: str) -> float:
    return median(each[one][what] / each[other][what] for each in rounds)


def _round(folder: Path, *, with_ray: bool) -> Round:
    ways = {"one": 1, "two": 2, **({"ray": 2} if with_ray else {})}
    taken = {name: _taken(folder, {"whole": number}, is_ray=name == "ray") for name, number in ways.items()}
    taken["control"] = _taken(folder, {"even": 1, "odd": 1})
    for name, number in ways.items():
        taken[name]["work_s"] = taken[name]["cpu_s"] - _taken(folder, {"few": number}, is_ray=name == "ray")["cpu_s"]
    print({name: {key: round(value, 2) for key, value in each.items()} for name, each in taken.items()}, flush=True)
    return taken


def _taken(folder: Path, parts: Mapping[str, int], *, is_ray: bool = False) -> dict[str, float]:
    """Predict these parts at once, each by so many processes."""
    outputs = {part: folder / f"{part}-{number}{'-ray' * is_ray}.jsonl" for part, number in parts.items()}
    how = ["backend.type=ray"] if is_ray else []
    started = [_started(folder.parent / f"{part}.jsonl", output, parts[part], how) for part, output in outputs.items()]
    cpu_s: dict[int, float] = {}
    while any(process.poll() is None for process in started):
        cpu_s |= _cpu_s(os.getpid())
        time.sleep(_EVERY_S)
    for process in started:
        if process.returncode:
            raise SystemExit(f"a contender ended with exit code {process.returncode}")
    summaries = [json.loads(Path(f"{output}.summary.json").read_text()) for output in outputs.values()]
    busy = [each["busy"] for summary in summaries for each in summary["generation"].get("members", [])]
    return {
        "seconds": max(summary["seconds"] for summary in summaries),
        "cpu_s": sum(cpu_s.values()),
        **({"busy": median(busy)} if busy else {}),
    }


def _cpu_s(root: int) -> dict[int, float]:
    """Return the CPU seconds of each process that descends from this one, by its number."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    found = [root]
    for each in found:
        found += [process for process, stat in stats.items() if int(stat[1]) == each]
    return {each: (int(stats[each][11]) + int(stats[each][12])) / os.sysconf("SC_CLK_TCK") for each in found[1:]}


def _started(data: Path, output: Path, processes: int, how: Sequence[str]) -> subprocess.Popen[bytes]:
    words: Sequence[object] = ["-m", "brim", "predict", data.parent / "config.yaml", *how, "--dataset", data]
    words = [*words, "--output", output, "--gpus", processes, "--on-overlong", "skip"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, *map(str, words)], env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()
