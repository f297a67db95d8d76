"""What a training step waits for: on a GPU, a value that the host reads lets all that was queued run dry."""

import traceback
from collections import Counter
from dataclasses import replace

import pytest
import torch
from benchmarks.gpu.correct import VALUES_READ
from tests.train.scarce import CPU, LENGTHS, Run
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from brim.config import DeviceFacts, load_config, resolve
from brim.models import equip
from brim.train import Loop, build_optimizer
from brim.train.optimizer import FixedBetas


class HostReads(TorchDispatchMode):
    """Note who reads values, or makes a shape of them, while it is entered.

    On a CPU every tensor is the host's. Here all count as the device's, but for those that `torch.tensor` makes without
    a device or on the "cpu", which are the host's everywhere: optimizers count their steps in such ones. Reads that are
    no operators on a CPU (`tolist`, `cpu`, `numpy`) are seen as Python calls them.
    """

    def __init__(self):
        super().__init__()
        self.places = Counter()
        self._calls = _Calls(self)

    def __enter__(self):
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.replace("::", ".").removeprefix("aten.")
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        is_masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if is_masked or (f"aten::{name}" in VALUES_READ and kwargs.get("output_size") is None):
            self.note(name, args[0])
        return func(*args, **kwargs)

    def note(self, what, tensor):
        if not getattr(tensor, "is_of_the_host", False):
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            caller = next(frame for frame in reversed(frames) if frame.filename != __file__)
            self.places[f"{what} in {caller.name}"] += 1


class _Calls(TorchFunctionMode):
    def __init__(self, reads):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("tolist", "cpu", "numpy", "__array__") or (name == "to" and "cpu" in args):
            self._reads.note(name, args[0])
        out = func(*args, **kwargs)
        if func is torch.tensor and kwargs.get("device") in (None, "cpu"):
            out.is_of_the_host = True
        return out


@pytest.mark.parametrize(
    "read",
    [
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, bool, float, int),
        *(torch.nonzero, torch.unique, torch.bincount, lambda x: torch.equal(x, x), lambda x: x[x > 1]),
        lambda x: torch.arange(1).repeat_interleave(x),
        lambda x: x.index_put_((x > 1,), x),
    ],
)
def test_each_kind_of_reading_is_noted_and_what_the_host_holds_is_not(read):
    with HostReads() as reads:
        read(torch.tensor([3], device=CPU))
        assert reads.places
        reads.places.clear()
        torch.tensor([3]).item()
        assert not reads.places


LORA = {"adapter": {"type": "lora", "dropout": 0.0, "target_modules": "all-linear"}}
DROPPING = {"adapter": {"type": "lora", "dropout": 0.3, "target_modules": "all-linear"}}


def run_of(folder, *, trainer, **keys):
    """A loop on scarce.py's model, given what a configuration names: two steps of eight rows."""
    given = {"base_model": "not read", "precision": "fp32", "trainer": {"type": "finetune", **trainer}, **keys}
    config = resolve(load_config(given).config, DeviceFacts(kind="cpu", bf16=False)).config
    run = Run(folder, lengths=LENGTHS[:16], epochs=1)
    llm = equip(run.model, config, None, CPU, trainable=True)
    optimizer = build_optimizer(config.trainer.optimizer, (p for p in llm.model.parameters() if p.requires_grad))
    run.job = replace(run.job, llm=llm, optimizer=optimizer, rates=FixedBetas(optimizer))
    run.loop = Loop(run.job, run.loop.state)
    return run


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("keys", "trainer"),
    [
        ({}, {"chunked_loss": False}),
        ({}, {"optimizer": {"type": "sgd"}}),
        (LORA, {"enable_gradient_checkpointing": True}),
        (DROPPING, {"chunked_loss": False}),
        (DROPPING, {"dropout_by_row": True, "enable_gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_a_step_reads_once_and_its_micro_batches_never(tmp_path, packing, keys, trainer):
    run = run_of(tmp_path, trainer={"packing": packing, "chunked_loss": True, **trainer}, **keys)
    with HostReads() as reads:
        run.train()
    assert [step["num_micro_batches"] for step in run.log.steps] == [4, 4]
    assert reads.places == {"tolist in clipped": 2}
