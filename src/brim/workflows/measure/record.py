"""Record the memory of a device while steps run: peaks, memory over time, operators, what stayed.

On CUDA the peaks are PyTorch's own counters, and memory over time is its record of the allocator; on a CPU both are
the resident set of this process, as Linux counts it, in samples. An operator log says which operator ran when, in
which module and phase. What steps left behind are the tensors that Python can see, and those that a graph of theirs
keeps.

The record of the CUDA allocator is read without torch; an entry is what
`torch.cuda.memory._snapshot()["device_traces"]` holds: action, addr, size, time_us, frames.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.errors import BrimError, Problem
from brim.memory.trace import EventStream, Phase, Place
from brim.workflows.measure.messages import MeasuredTimeline, PhasePeak, Stayed, timeline


class Meter(Protocol):
    """Reads one device."""

    kind: str  # cpu or cuda
    baseline_bytes: int  # before anything was put there

    def begin(self) -> None:
        """Forget the peak; what comes now counts."""

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        """The most since `begin`, and what is there now."""


def meter_of(device: torch.device) -> Meter:
    """The device's meter. Raises BrimError where it says nothing of its memory."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ResidentMeter()
    raise BrimError(
        Problem(
            what=f"memory cannot be measured on a device of the kind {device.type}",
            expected="a CUDA device, or a CPU under Linux",
            fix="leave out --measure: a prediction needs no device",
        )
    )


class CudaMeter:
    """Counts what PyTorch's caching allocator gave out and holds, and what of the card it does not hold.

    The last is read as the card's used memory less PyTorch's reserved, so it counts other processes, too.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros((), device=device)  # makes the context
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.baseline_bytes = self._outside_bytes()

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        torch.cuda.synchronize(self._device)
        reserved, outside = torch.cuda.max_memory_reserved(self._device), self._outside_bytes()
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=reserved,
            outside_bytes=outside,
            total_bytes=reserved + outside,
            end_bytes=torch.cuda.memory_allocated(self._device),
            baseline_bytes=self.baseline_bytes,
        )

    def _outside_bytes(self) -> int:
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free - torch.cuda.memory_reserved(self._device)


class ResidentMeter:
    """Reads this process's resident set; free memory is given back before each phase, so that it counts once."""

    kind = "cpu"

    def __init__(self) -> None:
        require_resident()
        give_back()
        self.baseline_bytes = resident_bytes()

    def begin(self) -> None:
        reset_peak()

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        most = peak_resident_bytes()
        give_back()
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=None,
            reserved_bytes=None,
            outside_bytes=None,
            total_bytes=most,
            end_bytes=resident_bytes(),
            baseline_bytes=self.baseline_bytes,
        )


_SAMPLING_S = 0.001


class Recording(Protocol):
    """What a device has to tell of the steps that ran inside `recorded`."""

    log: OperatorLog

    def step_ended(self) -> None:
        """Called after each step; the first one only warms up."""

    def timeline(self) -> MeasuredTimeline: ...

    def stayed(self) -> tuple[Stayed, ...]:
        """What the steps after the first left behind."""


@contextmanager
def recorded(model: nn.Module, device: torch.device, snapshot: Path | None = None) -> Iterator[Recording]:
    """Record what runs inside. snapshot: a file to write, which pytorch.org/memory_viz opens; CUDA alone has one."""
    recording = CudaRecording(device, snapshot) if device.type == "cuda" else ResidentRecording()
    with recording.running(), recording.log.watching(model):
        yield recording


class ResidentRecording:
    """Samples from a thread of its own, and one at each mark."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, int]] = []
        self._warm: Living | None = None
        self._last: Living | None = None
        self.log = OperatorLog(on_mark=self._sample)

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def step_ended(self) -> None:
        self._last = living(self.log.where())
        self._warm = self._warm or self._last

    def timeline(self) -> MeasuredTimeline:
        times, live = np.asarray(self._samples, dtype=np.int64).reshape(-1, 2).T
        return timeline(times, live, reserved_bytes=None, marks=self._marks(), place_at=self.log.place_at)

    def stayed(self) -> tuple[Stayed, ...]:
        return self._last.since(self._warm) if self._last is not None and self._warm is not None else ()

    def _marks(self) -> list[tuple[int, str]]:
        """Each on the sample that was taken for it, which came just before."""
        times = sorted(time_ns for time_ns, _ in self._samples)
        starts = np.searchsorted(times, [time_ns for time_ns, _ in self.log.marks], side="right") - 1
        return [(times[max(start, 0)], label) for start, (_, label) in zip(starts, self.log.marks, strict=True)]

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_SAMPLING_S):
            self._sample()

    def _sample(self) -> None:
        self._samples.append((time.time_ns(), resident_bytes()))


class CudaRecording:
    """Every allocation and release, with the Python stack that asked for it."""

    def __init__(self, device: torch.device, snapshot: Path | None) -> None:
        self._device = device
        self._file = snapshot
        self._entries: Sequence[Entry] = ()
        self._before = (0, 0)
        self._warm_us: int | None = None
        self.log = OperatorLog(on_operator=_number_allocations())

    @contextmanager
    def running(self) -> Iterator[None]:
        memory = torch.cuda.memory
        torch.cuda.synchronize(self._device)
        self._before = (memory.memory_allocated(self._device), memory.memory_reserved(self._device))
        memory._record_memory_history(enabled="all", context="all", stacks="python", clear_history=True)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            traces = memory._snapshot()["device_traces"]
            if self._file is not None:
                memory._dump_snapshot(str(self._file))  # type: ignore[no-untyped-call]
            memory._record_memory_history(enabled=None)
            index = self._device.index if self._device.index is not None else torch.cuda.current_device()
            self._entries = traces[index] if index < len(traces) else []

    def step_ended(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._warm_us is None:
            self._warm_us = time.time_ns() // 1000

    def timeline(self) -> MeasuredTimeline:
        allocated, reserved = self._before
        found = curve(self._entries, allocated_bytes=allocated, reserved_bytes=reserved)
        return timeline(
            found.times_us * 1000,
            found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            marks=self.log.marks,
            place_at=self.log.place_at,
        )

    def stayed(self) -> tuple[Stayed, ...]:
        since = self._warm_us if self._warm_us is not None else 0
        return stayed(self._entries, since_us=since, where=lambda entry: _said(entry, self._place(entry)))

    def stream(self) -> EventStream:
        """The same events as a prediction is made of, to lay them side by side."""
        return stream(self._entries, self._place)

    def _place(self, entry: Entry) -> Place:
        number = str(entry.get("user_metadata") or "")
        if entry["action"] == "alloc" and number.isdecimal():
            return self.log.places[int(number)]
        return self.log.place_at(entry.get("time_us", 0) * 1000)


def _number_allocations() -> Callable[[int], None]:
    """Writes an operator's number on the allocations that it makes, where this PyTorch can."""
    write: Any = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    return (lambda number: write(str(number))) if write is not None else (lambda number: None)


def _said(entry: Entry, place: Place) -> str:
    return "; ".join(part for part in (said(place), line_of(entry)) if part)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


class OperatorLog:
    """Written while the steps run: operators with their places, and the marks at which a part of the work begins.

    on_operator: called before each operator with its number. on_mark: called at each mark.
    """

    def __init__(
        self, *, on_operator: Callable[[int], None] = lambda number: None, on_mark: Callable[[], None] = lambda: None
    ) -> None:
        self.times_ns: list[int] = []  # of each operator, when it began
        self.places: list[Place] = []
        self.marks: list[tuple[int, str]] = []  # time in ns, what begins then
        self.made_at: dict[int, int] = {}  # address -> number of the operator that gave this storage last
        self._on_operator = on_operator
        self._on_mark = on_mark
        self._phase, self._prefix = "load", ""
        self._forward: list[str] = []  # modules that are running, the outermost first
        self._backward = ""  # the module whose output's gradient came last

    def begin(self, phase: str, prefix: str | None = None) -> None:
        """From here on it is this phase. prefix: stands before its mark, such as "step 1"; None leaves it."""
        if prefix is not None:
            self._prefix = prefix
        self._phase = phase
        self._on_mark()
        self.marks.append((time.time_ns(), f"{self._prefix}: {phase}" if self._prefix else phase))

    def begin_once(self, phase: str) -> None:
        """As `begin`, unless it is this phase already."""
        if phase != self._phase:
            self.begin(phase)

    def place_at(self, time_ns: int) -> Place:
        """Where the work was at a time: at the last operator that had begun."""
        number = bisect.bisect_right(self.times_ns, time_ns) - 1
        return self.places[number] if number >= 0 else Place(self._phase)

    def where(self) -> Mapping[int, str]:
        """By address, the module and operator that made the storage."""
        return {address: said(self.places[number]) for address, number in self.made_at.items()}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Log the operators that run inside, with the modules of this model."""
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                hooks.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
            hooks.enter_context(_Watcher(self))
            yield

    def operator(self, name: str) -> None:
        if name.startswith("profiler."):
            return  # the optimizer's name for the profiler: it does nothing to memory
        # Set in the thread that runs the backward pass, wherever that is.
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self.begin_once("backward")
        module = self._forward[-1] if self._forward else self._backward if in_backward else ""
        self._on_operator(len(self.places))
        self.times_ns.append(time.time_ns())
        self.places.append(Place(self._phase, layer_of(module), module, name))

    def made(self, outputs: object) -> None:
        number = len(self.places) - 1
        if number < 0:
            return
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self.made_at[each.untyped_storage().data_ptr()] = number

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, inputs: object) -> None:
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


def layer_of(module: str) -> int | None:
    """The decoder layer in a module's dotted path, from 0."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def said(place: Place) -> str:
    """A place in a few words."""
    return ", ".join(part for part in (place.phase, place.module, place.operator) if part)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, log: OperatorLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._log.operator(str(func.overloadpacket))
        outputs = func(*args, **(kwargs or {}))
        self._log.made(outputs)
        return outputs


_STATUS = Path("/proc/self/status")


_STATM = Path("/proc/self/statm")


_CLEAR_REFS = Path("/proc/self/clear_refs")


_RESET_PEAK = "5"  # see proc(5): VmHWM is set to what is resident now


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def require_resident() -> None:
    """Raise BrimError where the system does not tell."""
    if not (_STATUS.exists() and _CLEAR_REFS.exists()):
        raise BrimError(
            Problem(
                what="memory cannot be measured on this machine's CPU",
                expected="Linux, with /proc/self/status and /proc/self/clear_refs",
                fix="leave out --measure: a prediction needs no device; or measure on a CUDA device",
            )
        )


def resident_bytes() -> int:
    """What is resident now."""
    return int(_STATM.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most that was resident since the last reset."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, "every Linux has it"
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Forget the peak, once what is free has gone back to the system."""
    give_back()
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def give_back() -> None:
    """Drop cycles of garbage, and return free memory to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


_Storage: TypeAlias = tuple[int, int]  # address and bytes


@dataclass(frozen=True, slots=True)
class _Kind:
    shape: tuple[int, ...]
    dtype: str
    made_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """Storages that were alive at one time."""

    kinds: Mapping[_Storage, _Kind]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kinds)

    def since(self, before: Living) -> tuple[Stayed, ...]:
        """What is alive now and was not then, the largest first; tensors of one kind together."""
        kept: dict[_Kind, list[int]] = {}
        for storage, kind in self.kinds.items():
            if storage not in before.kinds:
                kept.setdefault(kind, []).append(storage[1])
        found = [
            Stayed(count=len(sizes), num_bytes=sum(sizes), shape=kind.shape, dtype=kind.dtype, made_at=kind.made_at)
            for kind, sizes in kept.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.num_bytes))


def living(made_at: Mapping[int, str] | None = None) -> Living:
    """The storages of all tensors that Python's collector tracks, and of of their
    gradients and of those saved in their graphs.

    made_at: by address, where a storage was made, if that is known; else the node that made the tensor is named.
    """
    gc.collect()
    kinds: dict[_Storage, _Kind] = {}
    nodes: set[Any] = set()
    for tensor in _tensors():
        _add(kinds, tensor, made_at or {})
        if tensor.is_leaf and tensor.grad is not None:  # no object of Python's until it is asked for
            _add(kinds, tensor.grad, made_at or {})
        if tensor.grad_fn is not None:
            for saved in _saved(tensor.grad_fn, nodes):
                _add(kinds, saved, made_at or {})
    return Living(kinds=kinds)


def _tensors() -> Iterator[Tensor]:
    # The type is asked, and not isinstance: lazy modules would be loaded by a look at their __class__.
    return (each for each in gc.get_objects() if issubclass(type(each), Tensor))


def _add(kinds: dict[_Storage, _Kind], tensor: Tensor, made_at: Mapping[int, str]) -> None:
    if tensor.is_sparse or tensor.device.type == "meta":
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return
    address = storage.data_ptr()
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    kind = _Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), made_at.get(address, node))
    kinds.setdefault((address, storage.nbytes()), kind)


def _saved(root: Any, seen: set[Any]) -> Iterator[Tensor]:
    """Tensors that a graph keeps for its backward pass, from this node on."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from _tensors_in(node, name)


def _tensors_in(node: Any, name: str) -> Iterator[Tensor]:
    try:
        value = getattr(node, name)
    except RuntimeError:
        return  # freed: the backward pass has run
    for each in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(each, torch.Tensor):
            yield each


Entry: TypeAlias = Mapping[str, Any]


_ROUNDING_BYTES = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp; entries hold what was asked for


_BORN, _DEAD = "alloc", "free_completed"


_MORE, _LESS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory after each entry: E points."""

    times_us: NDArray[np.int64]
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]


def curve(entries: Sequence[Entry], *, allocated_bytes: int, reserved_bytes: int) -> Curve:
    """The two figures are those before the first entry.

    Allocated is rounded to 512 bytes; the allocator counts a little more where it left a block whole.
    """
    allocated = [
        _rounded(entry["size"]) * ((entry["action"] == _BORN) - (entry["action"] == _DEAD)) for entry in entries
    ]
    reserved = [entry["size"] * ((entry["action"] in _MORE) - (entry["action"] in _LESS)) for entry in entries]
    return Curve(
        times_us=np.asarray([entry.get("time_us", 0) for entry in entries], dtype=np.int64),
        allocated_bytes=allocated_bytes + np.cumsum(np.asarray(allocated, dtype=np.int64)),
        reserved_bytes=reserved_bytes + np.cumsum(np.asarray(reserved, dtype=np.int64)),
    )


def stream(entries: Sequence[Entry], place_of: Callable[[Entry], Place]) -> EventStream:
    """Births and deaths in their order; what dies without having been born is born first.

    The categories are not known: all are called "temporary".
    """
    found = EventStream()
    born: dict[int, int] = {}
    before = Place("load")
    for address, size in _older(entries).items():
        born[address] = found.birth(size, "temporary", before)
    for entry in entries:
        if entry["action"] == _BORN:
            born[entry["addr"]] = found.birth(entry["size"], "temporary", place_of(entry))
        elif entry["action"] == _DEAD:
            found.death(born.pop(entry["addr"]), place_of(entry))
    return found


def stayed(entries: Sequence[Entry], *, since_us: int, where: Callable[[Entry], str]) -> tuple[Stayed, ...]:
    """What was born after a time and is still alive at the end; blocks of one size and place together."""
    alive: dict[int, Entry] = {}
    for entry in entries:
        if entry["action"] == _BORN and entry.get("time_us", 0) >= since_us:
            alive[entry["addr"]] = entry
        elif entry["action"] == _DEAD:
            alive.pop(entry["addr"], None)
    kept: dict[tuple[int, str], int] = {}
    for entry in alive.values():
        kind = (entry["size"], where(entry))
        kept[kind] = kept.get(kind, 0) + 1
    found = [
        Stayed(count=count, num_bytes=count * size, shape=None, dtype=None, made_at=made_at)
        for (size, made_at), count in kept.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.num_bytes))


def line_of(entry: Entry) -> str:
    """The line of Python that asked for the memory: the innermost one outside PyTorch, else the innermost."""
    frames = entry.get("frames") or []
    outside = [frame for frame in frames if "/torch/" not in frame["filename"]]
    for frame in [*outside, *frames]:
        name = str(frame["filename"]).rpartition("/")[2]
        return f"{name}:{frame['line']} ({frame['name']})"
    return ""


def _older(entries: Sequence[Entry]) -> dict[int, int]:
    """Address and bytes of what was alive before the first entry, as far as it dies."""
    born: set[int] = set()
    found: dict[int, int] = {}
    for entry in entries:
        if entry["action"] == _BORN:
            born.add(entry["addr"])
        elif entry["action"] == _DEAD and entry["addr"] not in born:
            found.setdefault(entry["addr"], entry["size"])
    return found


def _rounded(size: int) -> int:
    return -(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES
