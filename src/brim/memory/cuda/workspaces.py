"""When cuBLAS takes its workspace from the caching allocator.

The first matrix product of a thread reserves a handle, and with it a workspace for the stream, which stays for good
(CublasHandlePool.cpp of PyTorch); the backward pass has a thread of its own. `device.cublas_workspace_bytes` says how
large it is. cuBLASLt, which runs `linear` with a bias, shares it since torch 2.7; before, it took a megabyte for each
product and gave it back (TORCH_CUBLASLT_UNIFIED_WORKSPACE, CUBLASLT_WORKSPACE_SIZE).
"""

from __future__ import annotations

# Operators that reserve a handle. Attention's fused kernels, `_grouped_mm` and bitsandbytes' kernels do not.
CUBLAS_OPERATORS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addmv", "mv", "dot", "vdot", "linear", "matmul")
)

LT_OPERATORS = frozenset({"aten::addmm", "aten::_addmm_activation"})


def lt_workspace_bytes(torch_version: tuple[int, int]) -> int:
    """What cuBLASLt allocates for the time of one product, beside cuBLAS' workspace."""
    return 0 if torch_version >= (2, 7) else 2**20
