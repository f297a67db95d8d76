"""Measure the memory of random-weight models on the device at hand against the prediction.

    python -m benchmarks.memory_gpu                        # a CUDA device; under ten minutes on an H100
    python -m benchmarks.memory_gpu --device cpu --small   # the same cases on tiny models: a test of the script
    python -m benchmarks.memory_gpu --compare              # predict for what was measured, on any machine

The cases are measured in a process of their own, and after one that ends it the next ones in another. What a machine
cannot run (no bitsandbytes, too little memory) is told by name. benchmarks/results/memory_gpu.json holds every figure,
written anew after each case; memory_gpu/ the allocations of some steps one by one. Predicting takes minutes and no
GPU, so it is left to --compare.

Needs brim and its dependencies but for typer, datasets, sacrebleu, rouge-score and tensorboardX, which are not
imported; bitsandbytes is optional.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_cases import Case, architecture_of, grid, small
from benchmarks.memory_comparison import compared, show
from benchmarks.report import RESULTS, write_report
from brim.config import load_config
from brim.models.folders import ModelFolder
from brim.models.folders.model import context_length
from brim.workflows.measure.messages import Request, as_json
from brim.workflows.measure.work import write_random_weights

NAME = "memory_gpu"
_NEEDS_BITSANDBYTES = ("qlora",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hold what is measured, where, and for how long."""

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
    parser.add_argument("--budget-s", type=float, default=480, help="seconds after which no case is started")
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
    measure(options)
    print("measured; python -m benchmarks.memory_gpu --compare predicts for it, on any machine", file=sys.stderr)


def measure(options: Options, cases: Iterable[Case] | None = None) -> dict[str, Any]:
    """Measure every case: what it was, and what it took or why it did not run. The report is written after each."""
    until = time.time() + options.budget_s
    cases = [small(case) if options.small else case for case in (grid() if cases is None else cases)]
    cases = [case for case in cases if options.only in case.name]
    (options.out / NAME).mkdir(parents=True, exist_ok=True)
    found = {number: {"skipped": reason} for number, case in enumerate(cases) if (reason := _cannot_run(case))}
    device = _device(options.device)

    def report() -> dict[str, Any]:
        told = [
            {"case": asdict(case), "name": case.name, **found.get(number, _lost())} for number, case in enumerate(cases)
        ]
        figures = {"device": device, "small": options.small, "cases": told}
        write_report(NAME, figures=figures, num_threads=torch.get_num_threads(), folder=options.out)
        return figures

    with tempfile.TemporaryDirectory() as name:
        items = {number: _item(number, case, options, Path(name)) for number, case in enumerate(cases)}
        left = [number for number in items if number not in found]
        while left:
            _work([items[number] for number in left], left, found, Path(name), options.device, until, report)
            unfinished = [number for number in left if number not in found]
            if unfinished:  # the first of them ended the process
                found[unfinished[0]] = _lost()
            left = unfinished[1:]
    return report()


def _item(number: int, case: Case, options: Options, folder: Path) -> dict[str, Any]:
    """Return what the worker is given for a case. folder: where config.json of each architecture is written."""
    base = folder / case.architecture
    config = architecture_of(case, small=options.small)
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if case.method == "qlora" and has_bitsandbytes() and not (base / "model.safetensors").exists():
        write_random_weights(base)  # what is quantised is loaded from the disk
    trace = options.out / NAME / f"{case.architecture}-{number}.json.gz" if case.records else None
    request = _request(case, base, config, options.device)
    return {"request": as_json(request), "trace": None if trace is None else str(trace)}


def _work(
    items: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    found: dict[int, dict[str, Any]],
    folder: Path,
    device: str,
    until: float,
    report: Callable[[], object],
) -> None:
    """Run the cases in one process, and enter each result in `found` when it is there."""
    requests, results = folder / "requests.json", folder / f"results-{numbers[0]}.jsonl"
    requests.write_text(json.dumps({"cases": items, "until": until}), encoding="utf-8")

    def read() -> None:
        text = results.read_text(encoding="utf-8") if results.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        new = {numbers[each.pop("number")]: each for each in lines}
        if not new.keys() <= found.keys():
            found.update(new)
            report()
            print(f"{len(found)} cases, {until - time.time():.0f} s left", file=sys.stderr)

    code = run_worker(requests, results, device, read)
    read()
    if code:
        print(f"the worker ended with {code}", file=sys.stderr)


def run_worker(requests: Path, results: Path, device: str, look: Callable[[], None]) -> int:
    """Run the worker; return its exit code. look: called each second."""
    command = [sys.executable, "-m", "benchmarks.memory_worker", str(requests), str(results), device]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], env=_environment()) as process:
        while True:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                look()


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
        batch_size=case.rows,
        sequence_length=case.tokens,
        step_lengths=case.lengths(),
        num_steps=case.num_steps,
        phases=("train",) if case.does == "train" else ("evaluate", "generate"),
        device=device,
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
    # Pages of freed tensors go back at once; see brim/workflows/measure/run.py.
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", **os.environ}


def _device(name: str) -> dict[str, Any]:
    """Return the device by what a prediction needs to know of it."""
    if not name.startswith("cuda"):
        return {"name": "cpu"}
    # In a process that ends: a context of this one's would lie on the device beside what is measured.
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(cuda_facts, (name,))


def cuda_facts(name: str) -> dict[str, Any]:
    """Return what is asked of the device itself."""
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
