"""Record the memory of a device while steps run: peaks, memory over time, operators, what stayed.

On CUDA the figures are PyTorch's own counters; on a CPU they are the resident set of this process, as Linux counts it.
The recorder notes memory after each operator, with the module and phase in which it ran. What steps left behind are
the tensors that Python can see, and those that a graph of theirs keeps.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brim.errors import BrimError
from brim.memory.events import Phase, Place
from brim.workflows.measure.messages import MeasuredTimeline, PhasePeak, Spike, Stayed


class Meter(Protocol):
    """Read the memory of one device."""

    kind: str  # cpu or cuda
    baseline_bytes: int  # before anything was put there

    def begin(self) -> None:
        """Forget the peak: what is allocated from now on counts."""

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        """Return the most since `begin`, and what is there now."""

    def live_bytes(self) -> int:
        """Return the most that was allocated since it was asked last; on a CPU what is resident now."""


def meter_of(device: torch.device) -> Meter:
    """Return the device's meter. Raises BrimError where its memory cannot be measured."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ResidentMeter()
    raise BrimError(
        what=f"memory cannot be measured on a device of the kind {device.type}",
        expected="a CUDA device, or a CPU under Linux",
        fix="leave out --measure: a prediction needs no device",
    )


class CudaMeter:
    """Count the bytes that PyTorch's allocator has allocated and reserved, and those of the card that it does not hold.

    The last is read as the card's used memory less PyTorch's reserved, so it counts other processes, too.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros((), device=device)  # makes the context
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.baseline_bytes = self._outside_bytes()
        self._most = (0, 0)  # allocated and reserved bytes, from `begin` until PyTorch's counters were last reset

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._most = (0, 0)

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        torch.cuda.synchronize(self._device)
        self.live_bytes()
        (allocated, reserved), outside = self._most, self._outside_bytes()
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            outside_bytes=outside,
            total_bytes=reserved + outside,
            end_bytes=torch.cuda.memory_allocated(self._device),
            baseline_bytes=self.baseline_bytes,
        )

    def live_bytes(self) -> int:
        allocated = torch.cuda.max_memory_allocated(self._device)
        self._most = max(self._most[0], allocated), max(self._most[1], torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        return allocated

    def _outside_bytes(self) -> int:
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free - torch.cuda.memory_reserved(self._device)


class ResidentMeter:
    """Read this process's resident set; freed memory is returned before each phase, so that it counts once."""

    kind = "cpu"

    def __init__(self) -> None:
        if not (_STATUS.exists() and _CLEAR_REFS.exists()):
            raise BrimError(
                what="memory cannot be measured on this machine's CPU",
                expected="Linux, with /proc/self/status and /proc/self/clear_refs",
                fix="leave out --measure: a prediction needs no device; or measure on a CUDA device",
            )
        give_back()
        self.baseline_bytes = self.live_bytes()

    def begin(self) -> None:
        give_back()
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
        assert found is not None, "every Linux has it"
        give_back()
        return PhasePeak(
            phase=phase,
            step=step,
            total_bytes=int(found[1]) * 1024,
            end_bytes=self.live_bytes(),
            baseline_bytes=self.baseline_bytes,
        )

    def live_bytes(self) -> int:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


_STATUS = Path("/proc/self/status")


_STATM = Path("/proc/self/statm")


_CLEAR_REFS = Path("/proc/self/clear_refs")


_RESET_PEAK = "5"  # see proc(5): VmHWM is set to what is resident now


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Drop cycles of garbage, and return free memory to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


class Recorder:
    """Record, while steps run, a point for each operator and for each mark, at which a part of the work begins."""

    def __init__(self, device: torch.device, meter: Meter, snapshot: Path | None = None) -> None:
        """snapshot: a file to write, which pytorch.org/memory_viz opens; CUDA alone has one."""
        self._device, self._meter, self._file = device, meter, snapshot
        self.places: list[Place] = []  # of each point
        self.marks: list[tuple[int, str]] = []  # point, what begins there
        self._live: list[int] = []
        self._made_at: dict[int, str] = {}  # address -> where this storage was made last
        self._phase, self._prefix = "load", ""
        self._forward: list[str] = []  # modules that are running, the outermost first
        self._backward = ""  # the module whose output's gradient came last

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the operators that run inside, with the modules of this model."""
        with ExitStack() as stack:
            if self._file is not None and self._device.type == "cuda":
                stack.enter_context(allocator_record(self._device, self._file))
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
            stack.enter_context(_Watcher(self))
            yield

    def begin(self, phase: str, prefix: str | None = None) -> None:
        """Begin a phase. prefix: what its mark begins with, such as "step 1"; None keeps the last one."""
        if prefix is not None:
            self._prefix = prefix
        self._phase = phase
        self.marks.append((len(self.places), f"{self._prefix}: {phase}" if self._prefix else phase))
        self._point(Place(phase))

    def begin_once(self, phase: str) -> None:
        """Begin a phase, unless it is this one already."""
        if phase != self._phase:
            self.begin(phase)

    def where(self) -> Mapping[int, str]:
        """Return, by address, where the storage was made: phase, module, operator and line of code."""
        return self._made_at

    def timeline(self) -> MeasuredTimeline:
        """Return the points, the marks, and the first highest point after each mark."""
        ends = [*(start for start, _ in self.marks[1:]), len(self._live)]
        spikes = []
        for (start, _), end in zip(self.marks, ends, strict=True):
            point = max(range(start, end), key=self._live.__getitem__)
            spikes.append(Spike(point=point, live_bytes=self._live[point], place=self.places[point]))
        return MeasuredTimeline(live_bytes=tuple(self._live), marks=tuple(self.marks), spikes=tuple(spikes))

    def run(self, name: str, operator: Callable[[], Any]) -> Any:
        """Run an operator, and note where it ran."""
        if name.startswith("profiler."):
            return operator()  # the optimizer's name for the profiler: it does nothing to memory
        place = self._place(name)
        outputs = operator()
        self._point(place)
        made_at = said(place)
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self._made_at[each.untyped_storage().data_ptr()] = made_at
        return outputs

    def _place(self, name: str) -> Place:
        # Set in the thread that runs the backward pass, wherever that is.
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self.begin_once("backward")
        module = self._forward[-1] if self._forward else self._backward if in_backward else ""
        return Place(self._phase, layer_of(module), module, name)

    def _point(self, place: Place) -> None:
        self._live.append(self._meter.live_bytes())
        self.places.append(place)

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


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recorder.run(str(func.overloadpacket), lambda: func(*args, **(kwargs or {})))


@contextmanager
def allocator_record(device: torch.device, snapshot: Path | None) -> Iterator[list[Mapping[str, Any]]]:
    """Let PyTorch record its allocator; afterwards the entries are in the list and in the snapshot's file."""
    memory = torch.cuda.memory
    entries: list[Mapping[str, Any]] = []
    torch.cuda.synchronize(device)
    memory._record_memory_history(enabled="all", context="all", stacks="python", clear_history=True)
    try:
        yield entries
    finally:
        torch.cuda.synchronize(device)
        traces = memory._snapshot()["device_traces"]
        if snapshot is not None:
            memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        memory._record_memory_history(enabled=None)
        index = device.index if device.index is not None else torch.cuda.current_device()
        entries += traces[index] if index < len(traces) else []


def layer_of(module: str) -> int | None:
    """Return the decoder layer in a module's dotted path, from 0."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def said(place: Place) -> str:
    """Return a place in a few words, and the line of Python that is running: the innermost one outside PyTorch."""
    words = ", ".join(part for part in (place.phase, place.module, place.operator) if part)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:  # a thread of PyTorch's own, which runs the backward pass on CUDA
        return words
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f"{words}; {name}:{frame.f_lineno} ({frame.f_code.co_name})"


_Storage: TypeAlias = tuple[int, int]  # address and bytes


_Kind: TypeAlias = tuple[tuple[int, ...], str, str]  # shape, dtype, and where it was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """Hold the storages that were alive at one time."""

    kinds: Mapping[_Storage, _Kind]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.kinds)

    def since(self, before: Living) -> tuple[Stayed, ...]:
        """Return what is alive now and was not then, the largest first; tensors of one kind together."""
        kept: dict[_Kind, list[int]] = {}
        for storage, kind in self.kinds.items():
            if storage not in before.kinds:
                kept.setdefault(kind, []).append(storage[1])
        found = [
            Stayed(count=len(sizes), num_bytes=sum(sizes), shape=shape, dtype=dtype, made_at=made_at)
            for (shape, dtype, made_at), sizes in kept.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.num_bytes))


def living(made_at: Mapping[int, str] | None = None) -> Living:
    """Return the storages of all tensors that Python's collector tracks, of their gradients, and of those that their
    graphs save.

    made_at: by address, where a storage was made, if that is known; else the node that made the tensor is named.
    """
    gc.collect()
    kinds: dict[_Storage, _Kind] = {}
    nodes: set[Any] = set()
    # `type`, not isinstance, which reads __class__ and so would load lazy modules.
    for tensor in (each for each in gc.get_objects() if issubclass(type(each), Tensor)):
        _add(kinds, tensor, made_at or {})
        if tensor.is_leaf and tensor.grad is not None:  # no object of Python's until it is asked for
            _add(kinds, tensor.grad, made_at or {})
        for saved in _saved(tensor.grad_fn, nodes):
            _add(kinds, saved, made_at or {})
    return Living(kinds=kinds)


def _add(kinds: dict[_Storage, _Kind], tensor: Tensor, made_at: Mapping[int, str]) -> None:
    if tensor.is_sparse or tensor.device.type == "meta":
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return
    address = storage.data_ptr()
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    kind = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), made_at.get(address, node))
    kinds.setdefault((address, storage.nbytes()), kind)


def _saved(root: Any, seen: set[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a graph keeps for its backward pass, from this node on."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    yield from (each for each in tree_leaves(getattr(node, name)) if isinstance(each, Tensor))
                except RuntimeError:
                    continue  # freed: the backward pass has run
