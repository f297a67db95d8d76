"""What transformers' own `generate` does to memory, as one stream."""

from __future__ import annotations

from contextlib import suppress

from brim.memory.config_workload import ConfigWorkload
from brim.memory.events import EventStream
from brim.memory.generation import TRACED_TOKENS, UnlikeStepsError, compose_generation
from brim.memory.recording import Recording, record

_SPECIAL_LENGTHS = 4  # of eight lengths that follow each other one is special, and three are traced


def static_stream(
    workload: ConfigWorkload, rows: int, tokens: int, *, new_tokens: int
) -> tuple[EventStream, Recording]:
    """Recorded at the prompts' length, and once more where the last tokens are written."""
    traced = workload.generation()
    early = record(traced, rows=rows, tokens=tokens)
    further = new_tokens - TRACED_TOKENS
    if further <= 0:
        return compose_generation(early, early, new_tokens=new_tokens), early
    for more in range(_SPECIAL_LENGTHS):  # a few tokens more, where a length is a special one
        if more:
            early = record(traced, rows=rows, tokens=tokens + more)
        for after in (0, 1):
            late = record(traced, rows=rows, tokens=tokens + further + after)
            with suppress(UnlikeStepsError):
                return compose_generation(early, late, new_tokens=new_tokens), early
    raise UnlikeStepsError(f"no lengths from {tokens} tokens on are alike")
