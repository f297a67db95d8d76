"""Buffers are where they were when the step began."""

import torch
from torch import nn

from brim.batching.step import BufferKeeper


class Counter(nn.Module):
    """Adds one to a buffer and to a cache, makes another anew, and leaves one alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("added", torch.zeros(3))
        self.register_buffer("made", torch.zeros(3))
        self.register_buffer("constant", torch.ones(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self):
        self.added += 1
        self.made = self.made + 1
        self.cache += 1


def values(module):
    return {name: buffer.tolist() for name, buffer in module.state_dict().items()}


def test_each_way_to_change_a_buffer_is_undone_in_every_step():
    module = Counter()
    keeper = BufferKeeper(module)
    for number in range(3):
        keeper.save()
        before, added = values(module), module.added
        for _ in range(2):
            module()
            keeper.restore()
            assert values(module) == before
            assert module.added is added
            assert module.cache.item() > 0
        module()
        keeper.done()
        assert values(module) == {"added": [number + 1.0] * 3, "made": [number + 1.0] * 3, "constant": [1.0] * 3}


def test_what_does_not_change_is_copied_in_the_first_step_alone():
    module = Counter()
    keeper = BufferKeeper(module)
    copied = []
    for _ in range(3):
        keeper.save()
        copied.append(sorted(key.name for key in keeper._copies))
        module()
        keeper.done()
        assert not keeper._copies
    assert copied == [["added", "constant", "made"], ["added", "made"], ["added", "made"]]


def test_a_module_that_begins_to_train_is_looked_at_anew():
    module = nn.BatchNorm1d(2).eval()
    keeper = BufferKeeper(module)
    inputs = torch.randn(8, 2)
    for training in (False, False, True, True):
        module.train(training)
        before = values(module)
        keeper.save()
        module(inputs)
        assert (values(module) != before) == training
        keeper.restore()
        assert values(module) == before
        module(inputs)
        keeper.done()
