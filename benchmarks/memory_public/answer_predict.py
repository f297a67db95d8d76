"""Predict what an Answer.AI run takes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.memory_public.answer import AnswerRow, answer_workload, sharding_of_answer
from benchmarks.memory_public.answer_reserved import with_late_reuse, with_output_kept, with_wrapping
from brim.memory.allocator import CachingAllocator, replay
from brim.memory.fsdp import shard
from brim.memory.trace import compose_steps, record, record_optimizer, with_workspaces

_STEPS = 3
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPrediction:
    """Hold peaks of one GPU."""

    allocated_bytes: int
    reserved_bytes: int


def predict_answer(row: AnswerRow) -> AnswerPrediction:
    """Predict within the card's memory: what is cached is given back before it runs out."""
    workload, sharding = answer_workload(row), sharding_of_answer(row)
    recording = record(workload, rows=row.batch_size, tokens=row.sequence_length)
    stream = compose_steps([[recording]] * _STEPS, record_optimizer(workload, recording))
    stream = with_workspaces(stream, row.device.cublas_workspace_bytes)
    logits_bytes = row.batch_size * row.sequence_length * row.architecture.vocab_size * _FP32_BYTES
    rank = shard(with_output_kept(stream, logits_bytes), recording.weights, sharding)
    allocated = replay(rank.stream, CachingAllocator(), cuda_streams=rank.cuda_streams).allocated_bytes.max()
    waiting = with_late_reuse(with_wrapping(rank, recording.weights, world_size=sharding.world_size))
    card = CachingAllocator(capacity_bytes=row.device.budget_bytes)
    reserved = replay(waiting.stream, card, cuda_streams=waiting.cuda_streams).reserved_bytes.max()
    return AnswerPrediction(allocated_bytes=int(allocated), reserved_bytes=int(reserved))
