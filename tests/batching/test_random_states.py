"""The states of torch's generators, and back."""

import torch

from brim.batching import random_states, restore_random_states


def test_random_states_rewind():
    states = random_states()
    first = torch.rand(4)
    restore_random_states(states)
    assert torch.equal(torch.rand(4), first)


def test_states_of_devices_that_are_not_here_are_left_out():
    restore_random_states(random_states() | {"cuda:7": torch.zeros(16, dtype=torch.uint8)})
