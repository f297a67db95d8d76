"""Measure cases one after the other in this process: `python -m benchmarks.memory_worker REQUESTS RESULTS DEVICE`.

A case that fails is told, and the next one runs. Each result is written at once, so that nothing is lost when time is
up.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from brim.errors import BrimError
from brim.memory.trace import EventStream
from brim.workflows.measure.messages import Request
from brim.workflows.measure.record import CudaRecording, meter_of
from brim.workflows.measure.work import Bench, NoMeter, run_on, tiny

_COUNTERS = ("allocated_bytes.all", "reserved_bytes.all", "active_bytes.all", "inactive_split_bytes.all", "segment.all")


def run_cases(requests: Path, results: Path, device: torch.device, *, rehearses: bool) -> None:
    """Append one line of JSON a case to `results`. rehearses: set up what a first step sets up, before any case."""
    given = json.loads(requests.read_text(encoding="utf-8"))
    if rehearses and given["cases"]:
        asked = [item["request"] for item in given["cases"]]
        for request in {(each["folder"]["name"], *each["phases"]): each for each in reversed(asked)}.values():
            with tiny(Request.of_json(request)) as rehearsal:
                run_on(rehearsal, device, NoMeter())
    gc.freeze()  # what was imported has no part in this: the collector need not look at it again and again
    with results.open("a", encoding="utf-8") as file:
        for number, item in enumerate(given["cases"]):
            if time.time() > given["until"]:
                result = {"skipped": "time is up"}
            else:
                result = _measured(Request.of_json(item["request"]), device, item["trace"])
            file.write(json.dumps({"number": number, **result}) + "\n")
            file.flush()
            _clean(device)  # after an error of the device itself this ends the process, and another one goes on
    gc.unfreeze()


def _measured(request: Request, device: torch.device, trace: str | None) -> dict[str, Any]:
    started = time.perf_counter()
    before = _allocated(device)
    try:
        meter = meter_of(device)
        bench = run_on(request, device, meter)
    except (
        BrimError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        OSError,
        ImportError,
    ) as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {
        "baseline_bytes": meter.baseline_bytes,
        "before_bytes": before,
        "peaks": [asdict(peak) for peak in bench.peaks],
        "counters": _counters(device),
        "notes": bench.notes,
        "trace": None if trace is None else _write_trace(bench, Path(trace)),
        "seconds": round(time.perf_counter() - started, 2),
    }


def _write_trace(bench: Bench, file: Path) -> str | None:
    """The name of a file with the births and deaths of the recorded steps; None where the device tells none."""
    if not isinstance(bench.recording, CudaRecording):
        return None
    write_compact(bench.recording.stream(), file)
    return file.name


def write_compact(stream: EventStream, file: Path) -> None:
    """The stream as gzipped JSON."""
    told = json.dumps(compact(stream), separators=(",", ":"))
    file.write_bytes(gzip.compress(told.encode(), mtime=0))


def compact(stream: EventStream) -> dict[str, Any]:
    """The stream with each place written once."""
    numbers: dict[Any, int] = {}
    places = [numbers.setdefault(place, len(numbers)) for place in stream.places]
    return {
        "sizes": stream.sizes,
        "storages": stream.storages,
        "place_numbers": places,
        "places": [[place.phase, place.layer, place.module, place.operator] for place in numbers],
    }


def _clean(device: torch.device) -> None:
    """Leave the device as it was found, so that a case does not see those before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _counters(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        **{f"{name}.{of}": int(stats[f"{name}.{of}"]) for name in _COUNTERS for of in ("current", "peak")},
        "num_alloc_retries": int(stats["num_alloc_retries"]),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    place = torch.device(sys.argv[3])
    run_cases(Path(sys.argv[1]), Path(sys.argv[2]), place, rehearses=place.type == "cpu")
