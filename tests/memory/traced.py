"""Streams of configurations' phases from few recorded layers or from all, and a small second recorder."""

import weakref
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import brim.memory.predict as memory
import brim.memory.traces as memory_traces
from brim.memory import ConfigWorkload
from brim.memory.cuda import CudaTarget
from brim.memory.generation import static_stream
from brim.memory.trace import compose_parts, depth_of_architecture, recording

A100 = CudaTarget(compute_capability=(8, 0))


class Births(TorchDispatchMode):
    """Storages that operators make: `log` has the bytes of each at its birth, their negative at its death, in order."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.sizes = []  # of births alone
        self._alive = {}

    @property
    def live_bytes(self):
        return sum(self.log)

    def know(self, *values):
        """Storages that were there before."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor, silent=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.know(args, kwargs)
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._watch(each)
        return out

    def _watch(self, tensor, *, silent=False):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        num_bytes = storage.nbytes()

        def die(_):
            del self._alive[key]
            if not silent:
                self.log.append(-num_bytes)

        self._alive[key] = weakref.ref(storage, die)
        if not silent:
            self.log.append(num_bytes)
            self.sizes.append(num_bytes)


def workload_of(config, phase, *, target=A100):
    """What brim runs for a configuration."""
    asked = memory.ask(config, phase=phase, device="a100-80gb", memory_bytes=None)
    return ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target)


def training(folder, **given):
    """A configuration that trains two rows at a time. given: keys of the trainer, or above it; `attention`, `kernels`."""
    above = {key: given.pop(key) for key in ("adapter", "precision", "quantization") if key in given}
    names = {"attention": "attn_implementation", "kernels": "kernels"}
    above["model_parameters"] = {name: given.pop(key) for key, name in names.items() if key in given}
    trainer = {"type": "finetune", "batch_size": 2, "effective_batch_size": 2, **given}
    return {"base_model": str(folder), "trainer": trainer, **above}


def all_layers():
    """A context in which every layer is recorded, and nothing is expanded."""
    return patch.object(recording, "depth_of_architecture", lambda asked: depth_of_architecture(asked).whole())


def stream_of(config, phase, *, rows=2, tokens=8, whole=False):
    """The composed stream of a phase. whole: from all layers."""
    workload = workload_of(config, phase)
    with all_layers() if whole else nullcontext():
        if phase == "train":
            return memory_traces.training_stream(workload, [(rows, tokens)] * 2)
        if phase == "evaluate":
            found = recording.record(workload.evaluation(), rows=rows, tokens=tokens)
            return compose_parts(found, ["load", "evaluate"])
        return static_stream(workload.generation(), rows, tokens, new_tokens=config["generation"]["max_new_tokens"])[0]


def log(stream):
    """+bytes or -bytes of each event."""
    return [stream.sizes[storage] if storage >= 0 else -stream.sizes[~storage] for storage in stream.storages]


def alive(stream, at=None):
    """Storages that are alive when a mark or a position is reached; at the end if there is none."""
    end = at if isinstance(at, int) else {name: position for position, name in stream.marks}.get(at)
    living = set()
    for storage in stream.storages[:end]:
        if storage >= 0:
            living.add(storage)
        else:
            living.remove(~storage)
    return living


def gradient_functions(tensor):
    """The names of the autograd graph's nodes, from an output on."""
    seen = set()
    names, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            waiting += [following for following, _ in node.next_functions]
    return names


def events(stream):
    """Every event with all that is known of it: the storage's number, size and category, and the place.

    Left out are numbers that transformers wraps into tensors outside the model, on the CPU, such as the window of each
    layer of a cache.
    """
    numbers = {}
    found = []
    marks = dict(stream.marks)
    for position, (storage, place) in enumerate(zip(stream.storages, stream.places, strict=True)):
        if position in marks:
            found.append((marks[position],))
        which = storage if storage >= 0 else ~storage
        if storage >= 0 and not (place.operator == "aten::lift_fresh" and place.layer is None):
            numbers[storage] = len(numbers)
        if which in numbers:
            number = numbers[which] if storage >= 0 else ~numbers[which]
            found.append((number, stream.sizes[which], stream.categories[which], place))
    return found


@contextmanager
def recorded_layers():
    """A context that yields the numbers of layers of each recording that is made in it; several: it was refused."""
    counts = []
    record = recording._record

    def counting(workload, depth, **shape):
        counts.append(depth.num_recorded)
        return record(workload, depth, **shape)

    with patch.object(recording, "_record", counting):
        yield counts
