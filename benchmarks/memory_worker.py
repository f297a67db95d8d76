"""Measure cases one after the other in this process: `python -m benchmarks.memory_worker REQUESTS RESULTS DEVICE`.

A case that fails is told, and the next one runs. Each result is written at once, so that nothing is lost when time is
up.
"""

from __future__ import annotations

import bisect
import gc
import gzip
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.errors import BrimError
from brim.memory.events import EventStream, Place
from brim.workflows.measure.messages import Request, of_json
from brim.workflows.measure.work import load_bench, meter_of, tiny

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")

_COUNTERS = ("allocated_bytes.all", "reserved_bytes.all", "active_bytes.all", "inactive_split_bytes.all", "segment.all")


def run_cases(requests: Path, results: Path, device: torch.device, *, rehearses: bool) -> None:
    """Append one line of JSON a case to `results`. rehearses: set up what a first step sets up, before any case."""
    given = json.loads(requests.read_text(encoding="utf-8"))
    if rehearses and given["cases"]:
        asked = [item["request"] for item in given["cases"]]
        for request in {(each["folder"]["name"], *each["phases"]): each for each in reversed(asked)}.values():
            with tiny(of_json(Request, request)) as rehearsal:
                load_bench(rehearsal, device, meter_of(device)).run()
    gc.freeze()  # what was imported has no part in this: the collector need not look at it again and again
    with results.open("a", encoding="utf-8") as file:
        for number, item in enumerate(given["cases"]):
            if time.time() > given["until"]:
                result = {"skipped": "time is up"}
            else:
                result = _measured(of_json(Request, item["request"]), device, item["trace"])
            file.write(json.dumps({"number": number, **result}) + "\n")
            file.flush()
            _clean(device)  # after an error of the device itself this ends the process, and another one goes on
    gc.unfreeze()


def _measured(request: Request, device: torch.device, trace: str | None) -> dict[str, Any]:
    started = time.perf_counter()
    before = _allocated(device)
    try:
        meter = meter_of(device)
        recorder = Recorder(device) if trace is not None and device.type == "cuda" else None
        bench = load_bench(request, device, meter)
        with nullcontext() if recorder is None else recorder.watching(bench.llm.model):
            bench.run()
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
        "trace": None if recorder is None else _write_trace(recorder.stream(), Path(str(trace))),
        "seconds": round(time.perf_counter() - started, 2),
    }


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every allocation and release as PyTorch's allocator does, with the operator of training that asked."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._phase = "forward"
        self._forward: list[str] = []  # modules that are running, the outermost first
        self._backward = ""  # the module whose output's gradient came last
        self._times_ns: list[int] = []  # of each operator, when it began
        self._operators: list[Place] = []
        self._entries: list[Mapping[str, Any]] = []
        # Writes an operator's number on the allocations that it makes, where this PyTorch can.
        self._write: Any = getattr(torch.cuda.memory, "_set_memory_metadata", None)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record what runs inside, with the modules of this model."""
        with ExitStack() as stack:
            self._entries = stack.enter_context(allocator_record(self._device))
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
            stack.callback(register_optimizer_step_pre_hook(lambda *given: self._begin("optimizer")).remove)
            stack.callback(register_optimizer_step_post_hook(lambda *given: self._begin("forward")).remove)
            stack.enter_context(self)
            yield

    def stream(self) -> EventStream:
        """Return the same events as a prediction is made of, to lay them side by side."""
        return stream(self._entries, self._place_of)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.overloadpacket)
        if not name.startswith("profiler."):  # the optimizer's name for the profiler: it does nothing to memory
            self._note(name)
        return func(*args, **(kwargs or {}))

    def _begin(self, phase: str) -> None:
        self._phase = phase

    def _note(self, name: str) -> None:
        # Set in the thread that runs the backward pass, wherever that is.
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self._begin("backward")
        module = self._forward[-1] if self._forward else self._backward if in_backward else ""
        layer = _LAYER.search(module)
        if self._write is not None:
            self._write(str(len(self._operators)))
        self._times_ns.append(time.time_ns())
        self._operators.append(Place(self._phase, int(layer[1]) if layer else None, module, name))

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: object) -> None:
            if not self._forward and torch._C._current_graph_task_id() == -1:  # else a checkpoint computes it again
                self._begin("forward")
            self._forward.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def gradient_came(gradient: Tensor) -> None:
            self._backward = name

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            self._forward.pop()
            for each in tree_leaves(output):
                if isinstance(each, Tensor) and each.requires_grad and torch.is_grad_enabled():
                    each.register_hook(gradient_came)  # type: ignore[no-untyped-call]
                    break

        return leave

    def _place_of(self, entry: Mapping[str, Any]) -> Place:
        """Return the operator whose number it bears, or the last one that had begun."""
        number = str(entry.get("user_metadata") or "")
        if entry["action"] == "alloc" and number.isdecimal():
            return self._operators[int(number)]
        last = bisect.bisect_right(self._times_ns, entry.get("time_us", 0) * 1000) - 1
        return self._operators[last] if last >= 0 else Place(self._phase)


@contextmanager
def allocator_record(device: torch.device) -> Iterator[list[Mapping[str, Any]]]:
    """Let PyTorch record its allocator; afterwards the entries are in the list."""
    memory = torch.cuda.memory
    entries: list[Mapping[str, Any]] = []
    torch.cuda.synchronize(device)
    memory._record_memory_history(enabled="all", context="all", stacks="python", clear_history=True)
    try:
        yield entries
    finally:
        torch.cuda.synchronize(device)
        traces = memory._snapshot()["device_traces"]
        memory._record_memory_history(enabled=None)
        index = device.index if device.index is not None else torch.cuda.current_device()
        entries += traces[index] if index < len(traces) else []


def stream(entries: Sequence[Mapping[str, Any]], place_of: Callable[[Mapping[str, Any]], Place]) -> EventStream:
    """Return births and deaths in their order; what dies without having been born is born first.

    entries: of `torch.cuda.memory._snapshot()["device_traces"]`. The categories are not known: all are "temporary".
    """
    found, born, before = EventStream(), dict[int, int](), set[int]()
    for entry in entries:  # what was alive before the first entry, as far as it dies
        if entry["action"] == "alloc":
            before.add(entry["addr"])
        elif entry["action"] == "free_completed" and entry["addr"] not in before and entry["addr"] not in born:
            born[entry["addr"]] = found.birth(entry["size"], "temporary", Place("load"))
    for entry in entries:
        if entry["action"] == "alloc":
            born[entry["addr"]] = found.birth(entry["size"], "temporary", place_of(entry))
        elif entry["action"] == "free_completed":
            found.death(born.pop(entry["addr"]), place_of(entry))
    return found


def _write_trace(found: EventStream, file: Path) -> str:
    """Write the births and deaths of the recorded steps. Return the file's name."""
    write_compact(found, file)
    return file.name


def write_compact(stream: EventStream, file: Path) -> None:
    """Write the stream as gzipped JSON."""
    told = json.dumps(compact(stream), separators=(",", ":"))
    file.write_bytes(gzip.compress(told.encode(), mtime=0))


def compact(stream: EventStream) -> dict[str, Any]:
    """Return the stream with each place written once."""
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
