"""Trying a size on a device: what it says, and that it leaves no trace."""

import random
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

from brim.batching.memory import Prober, find_batch_size, gradients_at_hand, no_trace, peak_meter, standing_for
from brim.batching.memory.meters import ResidentPeak
from brim.errors import NothingFitsError, ProbeError

MIB = 2**20
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12"


class Net(nn.Module):
    """Has all that a step changes: weights, buffers, drawn masks, and a weight that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3).to(torch.bfloat16)
        self.slanted = nn.Parameter(torch.randn(5, 3).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows):
        hidden = self.drop(self.norm(self.first(rows)))
        return self.last(hidden.to(torch.bfloat16)).float() @ self.slanted * self.scalar


class Loop:
    """A user's own loop. ends: what a step does at its end."""

    def __init__(self, make_optimizer, *, ends=lambda: None, steps_before=0):
        torch.manual_seed(7)
        self.net = Net().train()
        self.net.drop.eval()
        self.optimizer = make_optimizer(self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.ends = lambda: None
        for _ in range(steps_before):
            self.step(3)
        self.ends = ends

    def step(self, num_rows):
        rows = torch.randn(num_rows + 1, 6)
        np.random.rand()
        random.random()
        self.net.drop.train()
        self.net(rows).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.ends()

    def prober(self, **changes):
        given = {"model": self.net, "optimizer": self.optimizer, "others": [self.schedule], **changes}
        return Prober(self.step, **given)

    def everything(self):
        return bits(
            {
                "weights": dict(self.net.named_parameters()),
                "buffers": dict(self.net.named_buffers()),
                "gradients": {name: weight.grad for name, weight in self.net.named_parameters()},
                "modes": [module.training for module in self.net.modules()],
                "state": self.optimizer.state_dict(),
                "has_state": len(self.optimizer.state),
                "schedule": self.schedule.state_dict(),
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "python": random.getstate(),
            }
        )


def bits(value):
    """What can be compared: of tensors their bits, dtype and shape, and which object it is."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return id(value) if isinstance(value, nn.Parameter) else None, value.dtype, tuple(value.shape), flat
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value


def fail(error):
    raise error


OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "tensor_lr": lambda weights: torch.optim.Adam(weights, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),  # has its state from the start
}
ENDS = {
    "well": lambda: None,
    "out_of_memory": lambda: fail(RuntimeError(OUT_OF_MEMORY)),
    "another_error": lambda: fail(KeyError("labels")),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_probe_leaves_no_trace(optimizer, ends, steps_before):
    loop = Loop(OPTIMIZERS[optimizer], ends=ENDS[ends], steps_before=steps_before)
    before, prober = loop.everything(), loop.prober()
    if ends == "another_error":
        with pytest.raises(KeyError, match="labels"):
            prober(4)
    else:
        probe, fits = prober(4), ends == "well"
        born = optimizer != "adagrad" and not steps_before
        assert (probe.outcome, probe.steps) == (("fits", 2 if born else 1) if fits else ("out_of_memory", 0))
        assert (probe.peak_bytes is None) == (not fits)
    assert loop.everything() == before


def test_gradients_buffers_settings_and_groups_are_put_back():
    loop = Loop(OPTIMIZERS["adamw"])
    loop.net.first.weight.grad = gradient = torch.full((8, 6), 3.0)
    loop.prober()(2)
    assert loop.net.first.weight.grad is gradient
    assert torch.equal(gradient, torch.full((8, 6), 3.0))
    assert loop.net.first.bias.grad is None
    norm, net = nn.BatchNorm1d(2), nn.Linear(2, 2)
    buffer, optimizer = norm.running_mean, torch.optim.AdamW([net.weight], lr=0.1)
    before = bits(optimizer.state_dict())
    with no_trace(norm), no_trace(net, optimizer):
        norm.running_mean = torch.ones(2)  # a step that replaces a buffer
        buffer.add_(5)
        optimizer.param_groups[0]["lr"] = 7
        optimizer.add_param_group({"params": [net.bias]})
    assert norm.running_mean is buffer
    assert torch.equal(buffer, torch.zeros(2))
    assert bits(optimizer.state_dict()) == before


def test_what_a_rotary_embedding_notes_down_is_put_back_with_its_buffer():
    """Else it would take the frequencies of short rows for those of the longest row so far."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, max_position_embeddings=8, rope_parameters=dynamic)
    rotary, untouched = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(config)
    before, names = rotary.inv_freq.clone(), set(vars(rotary))

    def angles(module, length):
        return module(torch.zeros(1), torch.arange(length)[None])[0]

    with no_trace(rotary):
        angles(rotary, 30)
        assert not torch.equal(rotary.inv_freq, before)
        rotary.seen = 30
    assert torch.equal(rotary.inv_freq, before)
    assert set(vars(rotary)) == names
    assert torch.equal(angles(rotary, 20), angles(untouched, 20))


def test_steps_are_those_that_the_loop_counts_and_weights_do_not_change_without_an_optimizer():
    net = nn.Linear(1, 1)
    counted = {"rows": lambda size: 12 // size, "loss": lambda size: net(torch.ones(size, 1)).sum(), "flag": bool}
    assert Prober(counted["rows"], model=net)(4).steps == 3
    assert Prober(counted["loss"], model=net)(4).steps == 1
    assert Prober(counted["flag"], model=net, num_steps=3)(4).steps == 3
    with pytest.raises(ProbeError, match="batch size 16 says that it fits, and ran no step"):
        find_batch_size(Prober(counted["rows"], model=net), how="halving", most=16)
    with pytest.raises(ProbeError, match="changed weights, and no optimizer was given"):
        Loop(OPTIMIZERS["sgd"]).prober(optimizer=None)(2)
    with pytest.raises(NothingFitsError, match="not even one row fits"):
        find_batch_size(Loop(OPTIMIZERS["sgd"], ends=ENDS["out_of_memory"]).prober(), how="halving", most=4)


def test_what_stands_for_state_and_gradients_is_there_and_goes():
    net = nn.Linear(512, 4096)
    net.bias.requires_grad_(False)
    meter = ResidentPeak()
    meter.begin()
    resting = meter.peak_bytes()
    with gradients_at_hand(net.parameters()), standing_for(64 * MIB, "cpu"):
        assert tuple(net.weight.grad.aminmax()) == (0, 0)
        assert net.bias.grad is None
    assert 71 * MIB <= meter.peak_bytes() - resting < 74 * MIB
    assert net.weight.grad is None
    meter.begin()
    assert meter.peak_bytes() - resting < 2 * MIB
    own = net.weight.grad = torch.ones(4096, 512)
    with gradients_at_hand(net.parameters()):
        assert net.weight.grad is own
    assert net.weight.grad is own


def test_the_peak_of_a_probe_is_that_of_its_step():
    net = nn.Linear(1, 1)

    def step(size):
        torch.ones(size * 32 * MIB, dtype=torch.uint8)

    prober = Prober(step, model=net)
    large, small = prober(8).peak_bytes, prober(1).peak_bytes
    assert large - small == pytest.approx(7 * 32 * MIB, rel=0.02)
    assert prober.limit_bytes > large
    meter = peak_meter(torch.device("meta"))  # other devices say nothing
    meter.begin()
    assert (meter.peak_bytes(), meter.limit_bytes()) == (None, None)


UNDER_A_LIMIT = """
# An address space of 256 MiB more than there is after the imports
import gc, re, resource, torch
from torch import nn
import brim
from brim.batching.memory import Prober

MIB = 2**20

def mapped():
    return int(re.search(r"VmSize:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024

torch.set_num_threads(1)
net = nn.LayerNorm(2**18, bias=False)  # 1 MiB of weights
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
def step(size):
    rows = torch.ones(size, 2**18)
    (rows * net.weight).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
net(torch.ones(2**18)).sum().backward()
optimizer.zero_grad()
gc.freeze()  # each probe collects
limit = mapped() + 256 * MIB
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
prober = Prober(step, model=net, optimizer=optimizer)
assert prober.limit_bytes == limit
for how in ("binary", "linear"):
    found = brim.find_batch_size(prober, how=how, most=64, limit_bytes=prober.limit_bytes - 8 * MIB)
    print(how, found.size, found.num_out_of_memory, len(found.probes))
assert len(optimizer.state) == 0 and all(weight.grad is None for weight in net.parameters())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's")
def test_under_a_real_limit_it_runs_out_of_memory_survives_and_finds_the_same_by_the_line():
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = {how: tuple(map(int, rest)) for how, *rest in (line.split() for line in done.stdout.splitlines())}
    assert found["binary"][1] >= 1
    assert found["linear"][:2] == (found["binary"][0], 0)
    assert 3 <= found["linear"][2] <= 4  # where the line's size lies at the limit, the heap's pages ask for one more
    # At the peak a row is there five times, 1 MiB each: itself, multiplied, squared, and the gradients of the last two.
    assert 45 <= found["binary"][0] <= 51
