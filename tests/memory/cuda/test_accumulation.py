"""Which gradients are added in place, against what autograd does with tensors that are not fake."""

from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from brim.memory.cuda.autocast import AccumulationInPlace

WATCHED = {
    f"aten::{name}{place}"
    for name in ("add", "index_add", "index_put", "scatter_add", "scatter")
    for place in ("", "_")
}


class Additions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch._C._current_autograd_node() is not None and func._schema.name in WATCHED:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def residual(x, w):
    h = x * 2
    y = h + (h @ w).relu()
    return (y + (y @ w).relu()) * 2


def parallel(x, w):
    h = x * 2
    return (h + (h @ w).relu() + (h @ w).tanh()) * 2


def doubled(x, w):
    h = x * 2
    return (h + h) * 2


def kept(x, w):
    h = x * 2
    h.relu().register_hook(lambda grad: None)
    y = h.relu()
    y.retain_grad()
    return (y + y.tanh() + h) * 2


def viewed(x, w):
    h = x * 2
    return torch.cat([h.view(-1), h.t().reshape(-1), h[:2].reshape(-1)]) * 2


ROWS = (0, 3, 3)


def selected(x, w):
    return (x * 2).index_select(0, torch.tensor(ROWS))


def indexed(x, w):
    return (x * 2)[torch.tensor(ROWS)]


def gathered(x, w):
    return (x * 2).gather(0, torch.tensor(ROWS)[:, None].expand(3, 8))


def largest(x, w):
    return (x * 2).topk(2).values + (x * 3).max(-1, keepdim=True).values


def backward(graph, mode):
    with mode:
        x, w = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
        out = graph(x, w)
        return out, torch.ones_like(out)


@pytest.mark.parametrize("graph", [residual, parallel, doubled, kept, viewed, selected, indexed, gathered, largest])
def test_as_autograd_adds_tensors_that_are_not_fake(graph):
    with FakeTensorMode() as fake, Additions() as seen, AccumulationInPlace():
        out, grad = backward(graph, fake)
        seen.names.clear()
        out.backward(grad)

    out, grad = backward(graph, nullcontext())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        out.backward(grad)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    assert seen.names == [named(event) for event in events if is_watched(event) and not is_watched(event.cpu_parent)]


def named(event):
    return event.name.replace("_index_put_impl_", "index_put_")


def is_watched(event):
    return event is not None and named(event) in WATCHED


def test_without_it_a_fake_gradient_is_never_added_in_place():
    with ExitStack() as stack:
        fake = stack.enter_context(FakeTensorMode())
        seen = stack.enter_context(Additions())
        out, grad = backward(parallel, fake)
        seen.names.clear()
        out.backward(grad)
    assert "aten::add_" not in seen.names[:1]
    assert "aten::add" in seen.names
