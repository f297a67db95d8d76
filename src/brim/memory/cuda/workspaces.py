"""When cuBLAS takes its workspace from the caching allocator.

The first matrix product of a thread reserves a handle, and with it a workspace for the stream, which stays for good
(CublasHandlePool.cpp of PyTorch); the backward pass has a thread of its own. `device.cublas_workspace_bytes` says how
large it is. cuBLASLt, which runs `linear` with a bias, shares it since torch 2.11 (pytorch/pytorch#168175); the
megabyte that it keeps for itself in 2.10 is left out.
"""

from __future__ import annotations

# Operators that reserve a handle. Attention's fused kernels, `_grouped_mm` and bitsandbytes' kernels do not.
CUBLAS_OPERATORS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addmv", "mv", "dot", "vdot", "linear", "matmul")
)
