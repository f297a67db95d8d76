"""Predict a row: its workload is recorded, put together to steps, cut over the GPUs, run through the allocator."""

from __future__ import annotations

from benchmarks.memory_public.ranks import cut_weights, sharding_of
from benchmarks.memory_public.rows import Row
from benchmarks.memory_public.workloads import MeasuredRun
from brim.memory import MemoryPrediction
from brim.memory.allocator import AllocatorSettings
from brim.memory.events import EventStream, Place
from brim.memory.fsdp import shard
from brim.memory.prediction import Setting, predict
from brim.memory.trace import Recording, compose_steps, record, record_optimizer, with_workspaces

STEPS = 2  # the first bears the optimizer's state, those after it are alike

# Scalars that transformers' Trainer keeps: the loss since the last log, that of the step, the gradients' norm.
TRAINER_SCALARS = (4, 4, 4)
GRAD_SCALER_SCALARS = (4, 4)  # of fp16: the scale, and for how many steps it has held


def predict_row(row: Row) -> MemoryPrediction:
    """Predict what one GPU takes. Raises NotTracedError for GPTQ with FSDP."""
    stream, recording = composed(row)
    setting = Setting(
        phase="train",
        batch_size=row.batch_size,
        sequence_length=row.sequence_length,
        world_size=row.gpus,
        device=row.device.among(row.gpus),
        has_limit=True,
        allocator=AllocatorSettings(),
        choices=(),
    )
    if row.gpus == 1:
        return predict(stream, setting)
    rank = shard(stream, cut_weights(row, recording.weights, stream), sharding_of(row))
    return predict(rank.stream, setting, cuda_streams=rank.cuda_streams)


def composed(row: Row) -> tuple[EventStream, Recording]:
    """Return the load and some steps, not yet cut over the GPUs."""
    run = MeasuredRun(row)
    workload = run.workload()
    recording = record(workload, rows=row.batch_size, tokens=row.sequence_length)
    optimizer = record_optimizer(workload, recording)
    stream = compose_steps([[recording]] * STEPS, optimizer)
    if row.gpus == 1:
        stream = run.with_loading(stream, recording)
    stream = with_workspaces(stream, row.device.cublas_workspace_bytes)
    # input_ids, attention_mask and labels of the step's batch, until the next one takes their place.
    batch = (row.batch_size * row.sequence_length * 8,) * 3
    scaler = GRAD_SCALER_SCALARS if row.precision == "fp16" else ()
    _keep(stream, (*batch, *TRAINER_SCALARS, *scaler))
    return stream, recording


def _keep(stream: EventStream, sizes: tuple[int, ...]) -> None:
    """Add storages that live from the first step to the end."""
    position = next(position for position, label in stream.marks if label.startswith("step"))
    new = range(len(stream.sizes), len(stream.sizes) + len(sizes))
    stream.sizes.extend(sizes)
    stream.categories.extend(["temporary"] * len(sizes))
    stream.storages[position:position] = new
    stream.places[position:position] = [Place("forward")] * len(sizes)
    stream.marks[:] = [(at + len(sizes) * (at > position), label) for at, label in stream.marks]
