"""Optimizers and gradient norms over lists of tensors, which PyTorch does on CUDA by default and not on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils


@contextmanager
def foreach_as_on_cuda() -> Iterator[None]:
    """Clip and update within this: fake CPU tensors are taken for CUDA's where PyTorch asks what can work on lists.

    An optimizer reads its step count, which a fake tensor does not hold; it reads 1 here, since no shape depends on
    it. `torch.optim` keeps each parameter's step count on the CPU, so that its births are no events of the GPU.
    """
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    with ExitStack() as stack:
        for module in (optimizer, _foreach_utils):
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", types))
            stack.enter_context(patch.object(module, "_get_foreach_kernels_supported_devices", lambda: devices))
        stack.enter_context(patch.object(FakeTensor, "item", lambda tensor: 1.0))
        yield
