"""What tests of the memory prediction share."""

from collections.abc import Iterator

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def fake() -> Iterator[None]:
    """Tensors that are made have no contents."""
    with FakeTensorMode():
        yield
