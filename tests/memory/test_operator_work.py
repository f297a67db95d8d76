"""FLOPs, bytes and kernels of single operators, by hand."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brim.memory.trace import attention_flops
from brim.memory.trace.operators import operator_work


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.works = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        work = operator_work(func, args, kwargs or {}, out)
        if work is not None:
            self.works.append(work)
        return out


def works(run):
    with Counted() as counted:
        run()
    return [(work.unit, work.dtype, work.flops, work.num_bytes, work.kernels) for work in counted.works]


A = torch.zeros(4, 6)
B = torch.zeros(6, 10)
F32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: A @ B, [("matrix", F32, 2 * 4 * 6 * 10, 4 * (24 + 60 + 40), 1)]),
        (lambda: A.bfloat16() @ B.bfloat16(), [
            ("vector", BF16, 0, 24 * 6, 1), ("vector", BF16, 0, 60 * 6, 1), ("matrix", BF16, 480, 2 * 124, 1),
        ]),
        (lambda: torch.bmm(A.expand(3, 4, 6), B.expand(3, 6, 10)),
         [("matrix", F32, 3 * 480, 4 * (24 + 60 + 3 * 40), 1)]),  # what is expanded lies there once
        (lambda: torch.addmm(torch.zeros(10), A, B), [("vector", F32, 0, 40, 1), ("matrix", F32, 480, 4 * 134, 1)]),
        (lambda: A + A, [("vector", F32, 0, 3 * 96, 1)]),
        (lambda: A.mul_(2.0), [("vector", F32, 0, 2 * 96, 1)]),
        (lambda: A.zero_(), [("vector", F32, 0, 96, 1)]),
        (lambda: A.clone().t().view(6, 4)[:2].detach(), [("vector", F32, 0, 2 * 96, 1)]),  # views are free
        (lambda: torch.empty(9), []),
        (lambda: torch.nn.functional.embedding(torch.zeros(5, dtype=torch.int64), torch.empty(100, 8)),
         [("vector", "int64", 0, 40, 1), ("vector", F32, 0, 2 * 160 + 40, 1)]),
        (lambda: torch._foreach_add_([torch.empty(7), torch.empty(65536 * 640)], 1.0),
         [("vector", F32, 0, 2 * 4 * (7 + 65536 * 640), 3)]),  # 641 chunks, 320 a launch
    ],
    ids=["mm", "mm in bf16", "bmm", "addmm", "add", "in place", "zero", "views", "empty", "embedding", "foreach"],
)  # fmt: skip
def test_operators(run, expected):
    assert works(run) == expected


def test_attention_is_two_products_forward_and_five_backward():
    shapes = (2, 8, 32, 16), (2, 4, 32, 16), (2, 4, 32, 16)
    scores = 2 * 8 * 32 * 32
    assert attention_flops(*shapes, causal=False, backward=False) == 2 * 2 * scores * 16
    assert attention_flops(*shapes, causal=True, backward=False) == 2 * scores * 16
    assert attention_flops(*shapes, causal=False, backward=True) == 5 * 2 * scores * 16


def test_attention_of_pytorch_is_counted_by_its_arguments():
    q = torch.zeros(1, 2, 8, 4, requires_grad=True)

    def run(causal):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()

    for causal, share in ((True, 2), (False, 1)):
        found = [flops for unit, _, flops, _, _ in works(lambda c=causal: run(c)) if unit == "attention"]
        assert found == [4 * 2 * 8 * 8 * 4 // share, 10 * 2 * 8 * 8 * 4 // share]
