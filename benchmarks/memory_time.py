"""Measure how long a prediction takes: in a process, the first and later ones, and the whole command.

    python -m benchmarks.memory_time

Each figure is of fresh processes, so that nothing has been traced before. "first" is after the imports, which the
command has to make, too: seconds on the wall, and of the CPU, which the wall is near to on an idle machine.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import print_table, write_report

MODELS = Path(__file__).parent / "data" / "memory" / "models"
REPEATS = 3
COMMAND_GOAL_S = 8.0
GOALS_S: Mapping[str, float] = {"meta-llama--Llama-2-7b-hf": 2.0, "NousResearch--Llama-2-70b-hf": 4.0}
LORA = {"type": "lora", "target_modules": "all-linear"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "LoRA": {"adapter": LORA},
    "4-bit + LoRA": {"adapter": LORA, "quantization": {"bits": 4}},
}

_IN_PROCESS = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import brim, torch, transformers, peft, bitsandbytes
from brim.memory import predict as memory
from transformers.models.llama import modeling_llama
torch.set_num_threads(1)
settings = json.loads(sys.argv[1])
taken = []
for _ in range(2):
    wall, cpu = time.perf_counter(), time.process_time()
    brim.predict_memory(settings, batch_size=4, sequence_length=2048, device="a100-80gb", phase="train")
    taken.append((time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps(taken))
"""

_COMMAND = "from brim.cli import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Hold one model, trained in one way."""

    model: str
    way: str
    first_s: float  # medians over fresh processes
    first_cpu_s: float
    again_s: float
    command_s: float
    command_cpu_s: float
    goal_s: float


def main() -> None:
    timings = [_timing(model, way) for model in GOALS_S for way in WAYS]
    rows = [
        [f"{each.model}, {each.way}"]
        + [f"{value:.2f}" for value in (each.first_s, each.first_cpu_s, each.again_s, each.goal_s)]
        + [f"{value:.2f}" for value in (each.command_s, each.command_cpu_s, COMMAND_GOAL_S)]
        for each in timings
    ]
    heads = ("seconds", "first", "of the CPU", "again", "goal", "command", "of the CPU", "goal")
    print_table("Time of a prediction, 4 × 2,048 tokens, activation checkpointing", heads, rows)
    write_report("memory_time", figures={"timings": [asdict(each) for each in timings]}, num_threads=1)


def _timing(model: str, way: str) -> Timing:
    settings = {
        "base_model": str(MODELS / model),
        "trainer": {"type": "finetune", "enable_gradient_checkpointing": True},
        **WAYS[way],
    }
    inside = [_in_process(settings) for _ in range(REPEATS)]
    commands = [_command(settings) for _ in range(REPEATS)]
    return Timing(
        model=model,
        way=way,
        first_s=median(first[0] for first, _ in inside),
        first_cpu_s=median(first[1] for first, _ in inside),
        again_s=median(again[0] for _, again in inside),
        command_s=median(wall for wall, _ in commands),
        command_cpu_s=median(cpu for _, cpu in commands),
        goal_s=GOALS_S[model],
    )


def _in_process(settings: Mapping[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return wall and CPU seconds of the first prediction and of the one after it."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_PROCESS, json.dumps(settings)], capture_output=True, text=True, check=True
    )
    first, again = json.loads(done.stdout.splitlines()[-1])
    return tuple(first), tuple(again)


def _command(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return wall and CPU seconds of `brim memory`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        shape = ["--batch-size", "4", "--sequence-length", "2048", "--device", "a100-80gb"]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", _COMMAND, "memory", str(path), *shape], capture_output=True, check=True)
        wall = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
