import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from brim.memory.cuda import foreach_as_on_cuda

pytestmark = pytest.mark.usefixtures("fake")


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def weights():
    made = [torch.nn.Parameter(torch.empty(4, 4)) for _ in range(3)]
    for each in made:
        each.grad = torch.empty(4, 4)
    return made


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_an_optimizer_works_on_lists(name):
    optimizer = getattr(torch.optim, name)(weights(), lr=0.1)
    with foreach_as_on_cuda(), Names() as seen:
        optimizer.step()
    assert any(each.startswith("aten::_foreach_") for each in seen.names)
    assert "aten::addcdiv_" not in seen.names


def test_clipping_measures_all_gradients_at_once():
    with foreach_as_on_cuda(), Names() as seen:
        clip_grad_norm_(weights(), 1.0)
    assert {"aten::_foreach_norm", "aten::_foreach_mul_"} <= set(seen.names)
    assert "aten::mul_" not in seen.names


def test_adafactor_reads_its_step():
    optimizer = torch.optim.Adafactor(weights())
    with foreach_as_on_cuda():
        optimizer.step()
    assert all("row_var" in optimizer.state[each] for each in optimizer.param_groups[0]["params"])


def test_outside_nothing_has_changed():
    with foreach_as_on_cuda():
        pass
    with Names() as seen:
        torch.optim.SGD(weights(), lr=0.1).step()
    assert not any("foreach" in each for each in seen.names)
