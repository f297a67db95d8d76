"""Recognise an error that means out of memory, free cached memory, and retry.

All work that may run out of memory goes through `attempt`. A retry rewinds the states of the random generators that a
forward pass draws from, and begins with as much memory as can be given back.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from brim.errors import BrimError

T = TypeVar("T")


Where: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Describe an allocation that failed, without keeping tensors of the work alive."""

    message: str  # its first line
    where: Where  # of a training step


def attempt(
    work: Callable[[], T],
    *,
    is_last: Callable[[], bool] = lambda: False,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> T | OutOfMemory:
    """Return what the work gives, or what is known of an allocation that failed in it. Other errors pass through.

    Nothing of the failed work is referred to afterwards: the frames that its error leads to are emptied, also where
    someone holds on to the error. Whoever tries again lets go of what else it holds, and calls `free_caches`.
    is_last: asked after a failure; whether the fewest rows have failed before. passing: errors that pass in any case.
    """
    outer = sys.exc_info()[1]
    try:
        return work()
    except Exception as error:
        if isinstance(error, passing) or not is_out_of_memory(error, is_last=is_last()):
            raise
        failure = OutOfMemory(message=first_line(error), where=_where(error.__traceback__))
        _let_go(error, outer)
        return failure


def second_try(action: Callable[[], T], *, on_failure: Callable[[str], None] = lambda message: None) -> T:
    """Return what the action gives; try once more after an allocation that failed. What else fails passes through.

    on_failure: is called with the first failure's message.
    """
    done = attempt(action)
    if not isinstance(done, OutOfMemory):
        return done
    free_caches()
    on_failure(done.message)
    return action()


def or_explain(work: Callable[[], T], explain: Callable[[str], BrimError]) -> T:
    """Return what the work gives. Raises what `explain` makes of the message where memory runs out in it."""
    done = attempt(work, passing=BrimError)
    if isinstance(done, OutOfMemory):
        raise explain(done.message)
    return done


def random_states() -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, each CUDA device's, and that of Apple's GPU.

    Where CUDA is not in use nothing has been drawn there, and asking would begin to use it.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore the states of torch's generators; those of devices that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    if torch.backends.mps.is_available() and "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def first_line(error: BaseException) -> str:
    """Return what an exception says, without the advice and the traces that some libraries add."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def free_caches() -> None:
    """Collect cycles that hold tensors, then hand unused blocks back: the device's allocator's and the C library's."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing where no CUDA device is in use
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    _trim_heap()


def _trim_heap() -> None:
    """Ask glibc for freed blocks of its heap; other C libraries have no such call, and need none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # no such symbol; no handle of the process itself, as on Windows
        return
    trim(ctypes.c_size_t(0))


def _where(raised: TracebackType | None) -> Where:
    """Say which pass failed: autograd's engine leads to each failure of a backward pass and of what it recomputes."""
    for frame, _ in traceback.walk_tb(raised):
        if frame.f_code.co_name == "_engine_run_backward":
            return "backward"
    return "forward"


def _let_go(error: BaseException, outer: BaseException | None) -> None:
    """Empty the frames that an exception leads to: they hold the work's tensors, and someone may hold the exception.

    outer: what is being handled around the work, if anything; its frames are another's.
    """
    seen = {id(outer)}
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]


# tests/batching/test_oom.py has the messages in full, each with where it was seen.
_CERTAIN = re.compile(
    r"""
      DefaultCPUAllocator:\ (can't\ allocate|not\ enough)\ memory
    | ^std::bad_alloc$
    | ^unable\ to\ mmap\ .*Cannot\ allocate\ memory
    | oneMKL\ .*Not\ enough\ memory
    | \b(CUDA|HIP|XPU|MPS\ backend)\ out\ of\ memory
    | \b(CUDA|HIP)(\ driver)?\ error:\ out\ of\ memory
    | \bTriton\ Error\ \[\w+\]:\ out\ of\ memory
    | \bcuda\ (runtime\ error\ \(2\)\ :|failed\ with\ error\ 2)\ out\ of\ memory
    | \bCUDA_ERROR_OUT_OF_MEMORY\b | \bhipErrorOutOfMemory\b | \bUR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b
    | \b(CUBLAS|CUSPARSE|CUSOLVER|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED\b | \bmiopenStatusAllocFailed\b
    | \bCUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED\b
    # A limit of cuDNN's on the batch, not on memory; fewer rows cure it just the same.
    | cuDNN\ error:\ CUDNN_STATUS_NOT_SUPPORTED\.
    | ^Invalid\ buffer\ size:\ [\d.]+\ [KMGT]i?B
    | MODULE:PT_DEVMEM\ Allocation\ failed
    """,
    re.VERBOSE | re.MULTILINE,
)


# Libraries say this when they find too little memory for themselves, but also for other reasons.
_WHERE_MEMORY_IS_SHORT = re.compile(
    r"""
      CUBLAS_STATUS_NOT_INITIALIZED\ when\ calling\ .cublasCreate
    | \bCUDNN_STATUS_(INTERNAL_ERROR|NOT_INITIALIZED)\b
    | \b(unable\ to\ find\ an\ engine\ to\ execute|Unable\ to\ find\ a\ valid\ cuDNN\ algorithm)\b
    """,
    re.VERBOSE,
)


# oneDNN says neither what it wanted nor why it did not get it.
_ONEDNN = re.compile(r"^could not (create|execute) a (primitive|memory object)\b(?P<descriptor> descriptor)?")


# cuDNN wanted about 500 MB to load its kernels (pytorch/pytorch#81620): with more than that free, it was not memory.
_SHORT_BYTES = 512 << 20


def is_out_of_memory(
    error: BaseException, *, is_last: bool = False, room_bytes: Callable[[], int | None] | None = None
) -> bool:
    """Say whether the error, or one that it was raised from, is of an allocation that failed, on a device or the host.

    True promises that fewer rows can help. Everything else is to be raised again. Ask while the error is being
    handled: some libraries' messages have several causes, and memory is the one where little of it is free by now.
    is_last: the fewest rows have failed before, so that nothing smaller can be tried. What only fewer rows could have
    shown to be of memory is then of something else.
    room_bytes: returns how much is free; None: as the device and the process's limits say.
    """
    return any(_is_one(link, is_last, room_bytes) for link in _chain(error))


def _is_one(error: BaseException, is_last: bool, room_bytes: Callable[[], int | None] | None) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM or f"(os error {errno.ENOMEM})" in str(error)  # as Rust has it
    if not isinstance(error, RuntimeError):
        return False
    if _CERTAIN.search(str(error)):
        return True
    if of_onednn := _ONEDNN.search(str(error)):
        room = (room_bytes or _host_room_bytes)()
        if room is None:
            return False
        return not is_last or (room < _SHORT_BYTES and of_onednn["descriptor"] is None)
    if not _WHERE_MEMORY_IS_SHORT.search(str(error)):
        return False
    room = (room_bytes or _room_bytes)()
    return room is not None and room < _SHORT_BYTES


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it was raised from. What it was raised beside (`__context__`) is another matter."""
    seen = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _room_bytes() -> int | None:
    """Return what an allocation outside PyTorch could get; None: there is no limit, or the device does not answer.

    An error that broke the device's context, such as an index that is out of bounds, makes later calls fail likewise.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            return torch.cuda.mem_get_info()[0]
        except RuntimeError:
            return None
    return _host_room_bytes()


def _host_room_bytes() -> int | None:
    """Return what this process's limits on memory leave; None: it has none.

    A container's limit does not count: there an allocation succeeds, and the process is killed once it is used.
    """
    if sys.platform != "linux":
        return None
    pages = [int(each) for each in Path("/proc/self/statm").read_text().split()]
    used_pages = {resource.RLIMIT_AS: pages[0], resource.RLIMIT_DATA: pages[5]}
    left = [
        limit_bytes - num_pages * os.sysconf("SC_PAGE_SIZE")
        for which, num_pages in used_pages.items()
        if (limit_bytes := resource.getrlimit(which)[0]) != resource.RLIM_INFINITY
    ]
    return min(left, default=None)
