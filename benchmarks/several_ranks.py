"""Time the demo's training on one rank and on two, beside two independent runs and transformers' Trainer on two.

    PYTHONPATH=examples python -m benchmarks.several_ranks [--rows N] [--rounds N] [--peer-rows M …]

Every rank is a process of one thread that gloo joins. In each round all contenders run once, every other round
backwards; before, short runs fill brim's caches and tell what a start and the evaluation take. Seconds are those of the
steps (brim's metrics.jsonl, the Trainer's train_runtime), without start-up, evaluation and checkpoints; the CPU seconds
are those of whole processes, and what they have beyond the short runs'. The control are two single runs at once: what
the machine lets two processes gain. The Trainer cuts its effective batch by hand, in micro-batches of so many rows a
rank; the quickest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np

from benchmarks.peers import PeerSettings, common_arguments
from benchmarks.report import print_table, write_report
from benchmarks.subject import EFFECTIVE_BATCH_SIZE
from brim.config import load_config
from brim.session import open_session, say_nothing
from brim.workflows.training import prepared_for
from stdlib_code.dataset import TEST, instruction_rows, stdlib_modules, write_jsonl

CONFIG = "examples/stdlib_code/config.yaml"
BASE = "examples/stdlib_code/base-model"
WARMUP_STEPS = 1  # left out
SHORT_STEPS = 2  # of the runs that show what a start takes
_RANKS = {"one rank": 1, "two ranks": 2}
IGNORED = -100
Round: TypeAlias = Mapping[str, Mapping[str, float]]  # by contender


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_ranks", description=__doc__)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rows", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--peer", nargs=3, metavar=("ROWS", "MICRO_BATCH", "OUT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer:
        _train_peer(Path(asked.peer[0]), int(asked.peer[1]), Path(asked.peer[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_rows(folder, asked.rows)
        short = dict.fromkeys(_RANKS, 0.0)
        for number in range(2):  # the first one fills the caches
            for name, ranks in _RANKS.items():
                run = _brim(folder / f"short-{ranks}-{number}", folder, asked.rows, ranks=ranks, steps=SHORT_STEPS)
                short[name] = run["cpu_s"]
        rounds = [_round(folder / str(number), folder, asked.rows, asked.peer_rows) for number in range(asked.rounds)]
    figures = _figures(rounds, short)
    print_table("medians", ["figure", "value"], [[key, f"{value:.3f}"] for key, value in figures.items()])
    write_report(
        "several_ranks", figures={"rows": asked.rows, **figures, "short": short, "rounds": rounds}, num_threads=1
    )


def _write_rows(folder: Path, num_rows: int) -> None:
    """Write the demo's rows, and what the model sees of them for the peer."""
    write_jsonl([row for row in instruction_rows(stdlib_modules()) if row.split != TEST], folder / "rows.jsonl")
    config = load_config(CONFIG, [f"preprocessing.sample_size={num_rows}"]).config
    _, _, prepared = prepared_for(open_session(config), folder / "rows.jsonl", resumed=None, notes=(), say=say_nothing)
    rows = [
        {"input_ids": row.input_ids.tolist(), "labels": np.where(row.supervised, row.input_ids, IGNORED).tolist()}
        for row in prepared.splits["train"]
    ]
    (folder / "tokens.json").write_text(json.dumps(rows))


def _round(folder: Path, data: Path, num_rows: int, peer_rows: Sequence[int]) -> dict[str, dict[str, float]]:
    folder.mkdir()
    contenders: dict[str, Callable[[], dict[str, float]]] = {
        **{name: partial(_brim, folder / name, data, num_rows, ranks=ranks) for name, ranks in _RANKS.items()},
        "control": partial(_control, folder, data, num_rows),
        **{f"Trainer, {rows}": partial(_peer, folder / f"peer-{rows}.json", data, rows) for rows in peer_rows},
    }
    taken = {}
    for name in [*contenders][:: -1 if int(folder.name) % 2 else 1]:
        taken[name] = contenders[name]()
        print(name, {key: round(value, 3) for key, value in taken[name].items()}, flush=True)
    return taken


def _peer(out: Path, data: Path, rows: int) -> dict[str, float]:
    words = ["-m", "benchmarks.several_ranks", "--peer", data / "tokens.json", rows, out]
    _, cpu_s = _finished([_started(["-m", "torch.distributed.run", *_two_ranks(), *words])])
    return {"seconds": json.loads(out.read_text()), "cpu_s": cpu_s}


def _brim(run: Path, data: Path, num_rows: int, *, ranks: int, steps: int | None = None) -> dict[str, float]:
    _, cpu_s = _finished([_start_brim(run, data, num_rows, ranks=ranks, steps=steps)])
    return {**_of_steps(run), "cpu_s": cpu_s}


def _control(folder: Path, data: Path, num_rows: int) -> dict[str, float]:
    runs = [folder / "control-0", folder / "control-1"]
    _, cpu_s = _finished([_start_brim(run, data, num_rows, ranks=1) for run in runs])
    return {"seconds": max(_of_steps(run)["seconds"] for run in runs), "cpu_s": cpu_s}


def _start_brim(
    run: Path, data: Path, num_rows: int, *, ranks: int, steps: int | None = None
) -> subprocess.Popen[bytes]:
    words = ["-m", "brim", "train", CONFIG, "--dataset", data / "rows.jsonl", "--output-directory", run]
    words += [f"preprocessing.sample_size={num_rows}", *([] if steps is None else [f"trainer.train_steps={steps}"])]
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", *_two_ranks()]
    return _started([*launcher, *words])


def _two_ranks() -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return ["--nproc-per-node", "2", "--master-port", str(free.getsockname()[1])]


def _started(words: Sequence[object]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, *map(str, words)], env=environment, stdout=subprocess.DEVNULL)


def _finished(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[float, float]:
    """Return wall and CPU seconds until all have ended well."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for process in processes:
        if process.wait():
            raise SystemExit(f"a contender ended with exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _of_steps(run: Path) -> dict[str, float]:
    """Return the seconds of a run's steps but the first ones, and what share of them its ranks were busy."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "learning_rate" in line][WARMUP_STEPS:]
    busy = [line["busy"] for line in steps if "busy" in line]
    return {"seconds": sum(line["seconds"] for line in steps), **({"busy": median(busy)} if busy else {})}


def _figures(rounds: Sequence[Round], short: Mapping[str, float]) -> dict[str, float]:
    def of(ratio: Callable[[Round], float]) -> float:
        return median(ratio(each) for each in rounds)

    figures = {
        "speed-up on two ranks": of(lambda r: r["one rank"]["seconds"] / r["two ranks"]["seconds"]),
        "speed-up of the control": of(lambda r: 2 * r["one rank"]["seconds"] / r["control"]["seconds"]),
        "CPU seconds over one rank's": of(lambda r: r["two ranks"]["cpu_s"] / r["one rank"]["cpu_s"]),
        "…, without start and evaluation": of(lambda r: _beyond(r, short, "two ranks") / _beyond(r, short, "one rank")),
        "busy share": of(lambda r: r["two ranks"]["busy"]),
    }
    for name in (name for name in rounds[0] if name.startswith("Trainer")):
        ratios = [each[name]["seconds"] / each["two ranks"]["seconds"] for each in rounds]
        figures[f"{name}, over brim on two ranks"] = median(ratios)
    return figures


def _beyond(each: Round, short: Mapping[str, float], name: str) -> float:
    return each[name]["cpu_s"] - short[name]


def _train_peer(tokens: Path, micro_batch_rows: int, out: Path) -> None:
    """Train as the demo does, in one of two ranks; the first writes its seconds a step, times brim's steps."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    base = AutoModelForCausalLM.from_pretrained(BASE, dtype="float32")
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = PeerSettings(learning_rate=0.004, schedule="cosine")
    with tempfile.TemporaryDirectory() as folder:
        arguments = common_arguments(settings, micro_batch_rows, folder)
        arguments["gradient_accumulation_steps"] = EFFECTIVE_BATCH_SIZE // (2 * micro_batch_rows)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**arguments, ddp_backend="gloo", ddp_find_unused_parameters=False),
            train_dataset=Dataset.from_list(json.loads(tokens.read_text())),
            data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(BASE), label_pad_token_id=IGNORED),
        )
        trainer.remove_callback(PrinterCallback)
        done = trainer.train()
    if os.environ["RANK"] == "0":
        steps = done.global_step
        out.write_text(json.dumps(float(done.metrics["train_runtime"]) * (steps - WARMUP_STEPS) / steps))


if __name__ == "__main__":
    main()
