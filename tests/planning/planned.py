"""What a planner sees: tiny models, work of a made-up one by a formula that is known, and costs by hand."""

from dataclasses import replace

import numpy as np
from tests.batching.cost_examples import linear_costs
from tests.memory.tiny_architectures import write_folder

import brim.memory.predict as memory
from brim.memory import ConfigWorkload
from brim.memory.cuda import CudaTarget
from brim.memory.devices import Budget, DeviceSpeed, cpu_device, find_device
from brim.memory.events import Work, WorkCount, WorkPlace
from brim.planning.candidates import Task, WayCosts
from brim.planning.costs import Traces, TrainingSteps
from brim.planning.plan import Way, Wire

LLAMA = {"vocab_size": 2000, "max_position_embeddings": 4096}  # so many words that the loss has several chunks


def asked_of(folder, phase, *, device="cpu", family="llama", layers=2, **config):
    """What is asked for of a tiny model, its workload, and the device."""
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    model = write_folder(folder / family, family, **depth, **(LLAMA if family == "llama" else {}))
    asked = memory.ask({"base_model": str(model), **config}, phase=phase, device=device, memory_bytes=None)
    found = cpu_device() if device == "cpu" else find_device(device)
    target = CudaTarget.of(found.gpu_capability)
    return asked, ConfigWorkload(asked.config, asked.folder, asked.architecture, target=target), found


def traces_of(kind, folder, phase, *, cache_folder=None, **given):
    """Traces of a kind of workload, and what was asked for. given: see asked_of."""
    asked, workload, found = asked_of(folder, phase, **given)
    return Traces(kind(workload), found, folder=cache_folder), asked


def shapes_of(folder, *, device="cpu", cache_folder=None, **given):
    """Traces of a training's steps. given: keys of `trainer` or above it."""
    above = {key: given.pop(key) for key in tuple(given) if key in ("adapter", "precision", "model_parameters")}
    above["trainer"] = {"type": "finetune", "batch_size": 1, "effective_batch_size": 32, **given}
    traces, _ = traces_of(TrainingSteps, folder, "train", device=device, cache_folder=cache_folder, **above)
    return traces


PRODUCT = WorkPlace("forward", 0, "layers.0.product", "aten::mm", "matrix", "bfloat16")
AGAIN = WorkPlace("recompute", 0, "layers.0.product", "aten::mm", "matrix", "bfloat16")
ATTENTION = WorkPlace("forward", 0, "layers.0.attention", "flash_attention", "attention", "bfloat16")
NORM = WorkPlace("forward", None, "norm", "aten::mul", "vector", "float32")


def hand_counted(rows, length, *, checkpointed=False):
    """Weights of 10**6 bytes, 1,000 FLOPs and 100 bytes a token, 8 FLOPs for each pair of tokens."""
    tokens = rows * length
    places = {
        PRODUCT: Work(1000 * tokens, 10**6 + 100 * tokens, 4),
        ATTENTION: Work(8 * tokens * length, 60 * tokens, 2),
        NORM: Work(0, 400 * tokens, 3),
    }
    if checkpointed:
        places[AGAIN] = places[PRODUCT]
    return WorkCount(places=places)


def speed(*, host_s=0.0, is_asynchronous=True, least_s=0.0):
    """10**6 FLOP/s (attention half), 10**6 bytes a second."""
    rates = {"flops_by_dtype": {"bfloat16": 1e6}, "attention_share": 0.5, "bytes_per_s": 1e6}
    waits = {"host_s_per_kernel": host_s, "least_s_per_kernel": least_s, "is_asynchronous": is_asynchronous}
    return DeviceSpeed(name="slow", source="by hand", **rates, **waits)


# Costs by hand: 1,000 bytes and 10 a token; 1 s and 10 ms a token. The fastest cuts of the two effective batches of four
# are 2 × 100 and 2 × 7 tokens (4.14 s), and 4 × 80 tokens (4.2 s).

COSTS = linear_costs()
LENGTHS = np.array([40, 100, 7, 7, 80, 33, 33, 60])


def way_costs(**changes):
    known = WayCosts(
        way=Way(gradient_checkpointing=False, chunked_loss=True),
        costs=COSTS,
        least_bytes=1200,
        state_bytes=100,
        saved_bytes=150,
        update_s=0.5,
        overhead_bytes=lambda shapes: 0,
        bound_by=lambda shapes: "arithmetic",
        advice=lambda shapes: (f"{len(shapes)} shapes",),
        traced_at=lambda rows, tokens: COSTS,
    )
    return replace(known, **changes)


def wire(**changes):
    """Two ranks; 0.25 s a step for the sums."""
    sent = {"update_bytes": 250, "round_bytes": 0, "bytes_per_s": 1000.0}
    return Wire(num_ranks=2, link="string", source="by hand", **{**sent, **changes})


def task(**changes):
    return replace(Task(lengths=LENGTHS, effective_batch_size=4, fixed_rows=None, largest=False), **changes)


def budget(reserved_bytes):
    limits = {"limit_bytes": reserved_bytes + 700, "outside_bytes": 500, "margin_bytes": 200}
    return Budget(device="cpu", limit_reason="memory.budget", margin_reason="memory.margin", **limits)
