"""Memory of random-weight models on the device at hand, measured against predicted.

    python -m benchmarks.memory_gpu                        # a CUDA device; under ten minutes on an H100
    python -m benchmarks.memory_gpu --device cpu --small   # the same cases on tiny models: a test of the script
    python -m benchmarks.memory_gpu --compare              # predict anew for what was measured before, on any machine

Each architecture is measured in a process of its own, case by case. What a machine cannot run (no bitsandbytes, too
little memory) is told by name. benchmarks/results/memory_gpu.json holds every figure, memory_gpu/ the allocations of
some steps one by one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_cases import Case, architecture_of, grid, small
from benchmarks.memory_comparison import compared, show
from benchmarks.report import RESULTS, write_report
from brim.config import load_config
from brim.memory.measure.request import Request
from brim.memory.measure.weights import write_random_weights
from brim.models.folder import ModelFolder, context_length

NAME = "memory_gpu"
_NEEDS_BITSANDBYTES = ("qlora",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, where, and for how long."""

    device: str
    small: bool
    only: str  # part of a case's name
    budget_s: float
    out: Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory on the device at hand, measured against predicted.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and short rows")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--budget-s", type=float, default=540, help="seconds after which no case is started")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--compare", action="store_true", help="measure nothing; predict for the figures that are there"
    )
    given = parser.parse_args()
    file = given.out / f"{NAME}.json"
    if given.compare:
        show(compared(json.loads(file.read_text(encoding="utf-8"))))
        return
    options = Options(device=given.device, small=given.small, only=given.only, budget_s=given.budget_s, out=given.out)
    figures = measure(options)
    write_report(NAME, figures=figures, num_threads=torch.get_num_threads(), folder=options.out)
    show(compared(figures))


def measure(options: Options) -> dict[str, Any]:
    """Every case: what it was, and what it took or why it did not run."""
    cases = [small(case) if options.small else case for case in grid()]
    cases = [case for case in cases if options.only in case.name]
    until = time.time() + options.budget_s
    (options.out / NAME).mkdir(parents=True, exist_ok=True)
    told: list[dict[str, Any]] = []
    for architecture in dict.fromkeys(case.architecture for case in cases):
        of_model = [case for case in cases if case.architecture == architecture]
        told += _of_model(of_model, options, until)
        print(f"{architecture}: {len(of_model)} cases, {until - time.time():.0f} s left", file=sys.stderr)
    return {"device": _device(options.device), "small": options.small, "cases": told}


def _of_model(cases: Sequence[Case], options: Options, until: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        base.mkdir()
        config = architecture_of(cases[0], small=options.small)
        (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
        reasons = [_cannot_run(case) for case in cases]
        runnable = {number: case for number, case in enumerate(cases) if reasons[number] is None}
        if any(case.method == "qlora" for case in runnable.values()):
            write_random_weights(base)  # what is quantised is loaded from the disk
        found = _worker(runnable, base, config, folder, options, until)
    return [
        {
            "case": asdict(case),
            "name": case.name,
            **({"skipped": reasons[number]} if reasons[number] else found.get(number, _lost())),
        }
        for number, case in enumerate(cases)
    ]


def _worker(
    cases: Mapping[int, Case], base: Path, config: Mapping[str, Any], folder: Path, options: Options, until: float
) -> dict[int, dict[str, Any]]:
    """The results by the case's number, of a process of their own."""
    items = []
    for number, case in cases.items():
        trace = options.out / NAME / f"{case.architecture}-{number}.json.gz" if case.records else None
        request = _request(case, base, config, options.device)
        items.append(
            {
                "request": json.loads(request.dumps()),
                "trace": None if trace is None else str(trace),
            }
        )
    requests, results = folder / "requests.json", folder / "results.jsonl"
    requests.write_text(json.dumps({"cases": items, "until": until}), encoding="utf-8")
    code = run_worker(requests, results, options.device)
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    numbers = list(cases)
    found = {numbers[each.pop("number")]: each for each in map(json.loads, lines)}
    if code:
        print(f"the worker ended with {code}; {len(found)} of {len(cases)} cases ran", file=sys.stderr)
    return found


def run_worker(requests: Path, results: Path, device: str) -> int:
    """Its exit code."""
    command = [sys.executable, "-m", "benchmarks.memory_worker", str(requests), str(results), device]
    return subprocess.run(command, cwd=Path(__file__).parents[1], env=_environment(), check=False).returncode


def _request(case: Case, base: Path, config: Mapping[str, Any], device: str) -> Request:
    settings = load_config({"base_model": str(base), **case.settings()}).config
    quantised = case.method == "qlora"
    return Request(
        config=settings.model_copy(update={"initialize": "pretrained" if quantised else "random"}),
        folder=ModelFolder(
            path=base,
            name=str(base),
            config=dict(config),
            context_length=context_length(dict(config)),
            tokenizer_file=None,
            has_weights=quantised,
        ),
        trainable=case.does == "train",
        batch_size=case.rows,
        sequence_length=case.tokens,
        step_lengths=case.lengths(),
        num_steps=case.num_steps,
        phases=("train",) if case.does == "train" else ("evaluate", "generate"),
        device=device,
        records=case.records,
        snapshot=None,
    )


def _cannot_run(case: Case) -> str | None:
    eight_bit = case.optimizer.endswith("_8bit")
    if (case.method in _NEEDS_BITSANDBYTES or eight_bit) and not has_bitsandbytes():
        return "bitsandbytes is not installed"
    return None


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def _lost() -> dict[str, Any]:
    return {"error": "the process that measured it ended before it was done"}


def _environment() -> dict[str, str]:
    # Pages of freed tensors go back at once; see brim/memory/measure/process.py.
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", **os.environ}


def _device(name: str) -> dict[str, Any]:
    """The device by what a prediction needs to know of it."""
    if not name.startswith("cuda"):
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(name)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": [properties.major, properties.minor],
        "cuda": torch.version.cuda,
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
    }


if __name__ == "__main__":
    main()
