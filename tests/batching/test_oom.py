"""Which exceptions say that memory ran out: messages in full, beside where they were seen; and one more try."""

import errno
import gc
import resource
import sys
import weakref
from pathlib import Path

import pytest
import torch

from brim.batching.memory import is_out_of_memory, or_explain, random_states, restore_random_states, second_try
from brim.batching.memory.oom import first_line
from brim.errors import OutOfMemoryError, WriteError

MEMORY_RAN_OUT = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB of which 2.35 GiB is free.",
    "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB",  # pytorch#175431
    "XPU out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 64.00 GiB",  # torch-xpu-ops#1170
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",  # physical-ai-studio#440
    "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB).",  # pytorch#105839
    "Invalid buffer size: 40.00 GB",  # aten/src/ATen/mps/MPSAllocator.mm
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 16777216 bytes. Error code 12 (Cannot allocate memory)",  # with RLIMIT_AS
    "[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried to allocate 16777216 bytes.",  # on Windows
    "std::bad_alloc",  # linear algebra and LSTM under RLIMIT_AS
    "unable to mmap 16000000 bytes from file </torch_81_17_0>: Cannot allocate memory (12)",  # Tensor.share_memory_
    "MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate",  # torch.fft under RLIMIT_AS
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",  # IIM#28
    "HIP error: out of memory",  # the same check, built for ROCm
    "CUDA driver error: out of memory",  # c10/cuda/driver_api.h: C10_CUDA_DRIVER_CHECK
    "Triton Error [CUDA]: out of memory",  # triton's driver.c, as of its other errors (triton#1302)
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",  # the driver's own name for it
    "cuda runtime error (2) : out of memory at /src/kernel.cu:58",  # MVIG-SJTU/AlphaPose#151
    "TensorStorage /io/tensor.h 168\ncuda failed with error 2 out of memory.",  # junjie18/CMT#15
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",  # pytorch#128601
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # since cuDNN 9
    # pytorch#4107, of large batches: toma, Lightning, accelerate and Composer count it
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::2147483648",  # accelerate.utils.memory
    "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call last):\n  …\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]
WHERE_MEMORY_IS_SHORT = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",  # lm-evaluation-harness#1689
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",  # pytorch#81620: no room to load its kernels
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "GET was unable to find an engine to execute this computation",  # pytorch#108645
]
UNTIL_THE_LAST = {  # and whether little room says it at the last, too
    "could not create a primitive": True,  # convolutions under RLIMIT_AS; else in oneDNN#1500, pytorch#143651
    "could not create a memory object": True,  # oneDNN's dnnl.hpp
    "could not execute a primitive": True,  # the same: a scratchpad that is taken while it runs
    # where oneDNN has no implementation, too
    "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable ONEDNN_VERBOSE=all": False,
}
SOMETHING_ELSE = [
    "CUDA error: an illegal memory access was encountered",  # some tools count it
    "CUDA error: device-side assert triggered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: too many resources requested for launch",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(...)`",
    "Triton Error [CUDA]: an illegal memory access was encountered",  # triton#1302
    "out of resource: shared memory, Required: 135200, Hardware limit: 101376.",  # triton's OutOfResources
    # torch.utils.data: fewer rows do not help
    "DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
    "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",  # ranks have to agree, none can retry alone
    "unsupported memory format option Preserve",
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 2x3)",
    "Invalid buffer size",  # no size: another's message
    "the std::bad_alloc handler is missing",
    "unable to mmap 4096 bytes from file <weights.bin>: No such device (19)",
    "it could not create a primitive",  # another's message
    "",
]


def test_messages_that_say_it_and_those_of_something_else():
    for message in MEMORY_RAN_OUT:
        for is_last in (False, True):
            assert is_out_of_memory(RuntimeError(message), is_last=is_last, room_bytes=lambda: 80 << 30), message
    for message in SOMETHING_ELSE:
        assert not is_out_of_memory(RuntimeError(message), room_bytes=lambda: 0), message


def test_what_has_several_causes_is_decided_by_the_room_that_is_left():
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    for message in WHERE_MEMORY_IS_SHORT:
        for room, expected in [(0, True), ((512 << 20) - 1, True), (512 << 20, False), (None, False)]:
            assert is_out_of_memory(RuntimeError(message), room_bytes=lambda room=room: room) == expected, message
        assert not is_out_of_memory(RuntimeError(message))  # this process has no limit


@pytest.mark.parametrize(("message", "is_named_at_the_last"), UNTIL_THE_LAST.items())
def test_what_onednn_does_not_explain_counts_under_a_limit_until_nothing_smaller_is_left(message, is_named_at_the_last):
    error = RuntimeError(message)
    for room, at_the_last in ((0, is_named_at_the_last), (80 << 30, False)):
        assert is_out_of_memory(error, room_bytes=lambda room=room: room)
        assert is_out_of_memory(error, is_last=True, room_bytes=lambda room=room: room) == at_the_last
    assert not is_out_of_memory(error, room_bytes=lambda: None)
    assert not is_out_of_memory(error)  # this process has no limit


def test_types_that_say_it_and_those_that_do_not():
    out = torch.OutOfMemoryError("whatever it says")
    for error in (
        out,
        torch.AcceleratorError("CUDA error: out of memory"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(f"weights: cannot be mapped (os error {errno.ENOMEM})"),  # as Rust has it
    ):
        assert is_out_of_memory(error), error
    for error in (
        ValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
        RuntimeError(),
        RuntimeError(("CUDA error", "an illegal memory access was encountered")),
    ):
        assert not is_out_of_memory(error), error
    # An error that was raised from one counts, one in its handling does not, and a circle of causes ends.
    failed, mistake, first, second = (ValueError(name) for name in ("the layer failed", "a mistake", "a", "b"))
    failed.__cause__ = mistake.__context__ = out
    first.__cause__, second.__cause__ = second, first
    assert [is_out_of_memory(error) for error in (failed, mistake, first)] == [True, False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory bind on Linux alone")
def test_the_room_is_what_the_tighter_of_two_limits_leaves_beside_what_the_process_has(monkeypatch):
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY),) * 2)
    error = RuntimeError(WHERE_MEMORY_IS_SHORT[0])
    for which, place in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        used_bytes = int(Path("/proc/self/statm").read_text().split()[place]) * resource.getpagesize()
        for mib, expected in ((500, True), (600, False)):
            limits[which] = used_bytes + (mib << 20)
            assert is_out_of_memory(error) == expected


# One more try after memory ran out


class Action:
    def __init__(self, *errors):
        self.errors, self.held, self.alive = list(errors), None, []

    def __call__(self):
        if self.held is not None:
            self.alive.append(self.held() is not None)
        tensor = torch.zeros(3)
        self.held = weakref.ref(tensor)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.\nFrames follow."


def test_what_fails_once_is_done_the_first_try_holds_nothing_and_other_errors_pass_through():
    messages, action = [], Action(RuntimeError(OUT))
    gc.disable()
    try:
        assert second_try(action, on_failure=messages.append) == "done"
    finally:
        gc.enable()
    assert messages == ["DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."]
    assert action.alive == [False]
    with pytest.raises(MemoryError, match="again"):
        second_try(Action(MemoryError(), MemoryError("again")))
    action = Action(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        second_try(action)
    assert action.alive == []
    assert first_line(MemoryError()) == "MemoryError"  # an error without words is named


def test_memory_that_runs_out_is_explained_and_what_is_explained_already_passes():
    def explain(message):
        return OutOfMemoryError(what=f"step 3: {message}")

    def unwritten():
        raise WriteError(what="the file is not written") from MemoryError()

    assert or_explain(Action(), explain) == "done"
    with pytest.raises(
        OutOfMemoryError, match=r"^step 3: DefaultCPUAllocator: can't allocate memory.* 4 bytes\.$"
    ) as caught:
        or_explain(Action(RuntimeError(OUT)), explain)
    assert caught.value.__context__ is None  # whose traceback would keep tensors alive
    with pytest.raises(WriteError, match="not written"):
        or_explain(unwritten, explain)


def test_random_states_rewind():
    states = random_states()
    first = torch.rand(4)
    restore_random_states(states | {"cuda:7": torch.zeros(16, dtype=torch.uint8)})  # of a device that is not here
    assert torch.equal(torch.rand(4), first)
