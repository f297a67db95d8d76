import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Births(TorchDispatchMode):
    """The size of every storage that an operator makes, in order."""

    def __init__(self):
        super().__init__()
        self.sizes = []
        self._storages = {}  # kept alive, so that an address is not used again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._new(args, kwargs)
        out = func(*args, **(kwargs or {}))
        self.sizes.extend(storage.nbytes() for storage in self._new(out))
        return out

    def _new(self, *values):
        tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        new = {address: storage for address, storage in storages.items() if address not in self._storages}
        self._storages |= new
        return list(new.values())


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield


@pytest.fixture
def births():
    return Births
