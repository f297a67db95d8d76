"""What brim's own engine does to memory, as one stream."""

from __future__ import annotations

from brim.infer.cache_shape import CacheShape
from brim.infer.peak_passes import DECODE, FILL, PREFILL
from brim.infer.room import USUAL_PASS_TOKENS
from brim.memory.compose import Binding, play
from brim.memory.config_workload import ConfigWorkload
from brim.memory.events import EventStream
from brim.memory.recording import Recording, record


def slots_stream(workload: ConfigWorkload, rows: int, tokens: int, *, new_tokens: int) -> tuple[EventStream, Recording]:
    """The load, the cache, a pass over prompts and the last token of all rows; and the recording that it is of.

    rows: of prompts of so many tokens. The tokens between the first and the last take less.
    """
    shape = CacheShape(
        rows=rows,
        columns=tokens + new_tokens - 1,
        prompts=min(rows, max(1, USUAL_PASS_TOKENS // tokens)),
        prompt_tokens=tokens,
    )
    recording = record(workload.slots(shape), rows=rows, tokens=tokens)
    parts = {"load": "load", FILL: "cache", PREFILL: "prompts", DECODE: f"token {new_tokens}"}
    if new_tokens == 1:
        del parts[DECODE]
    stream = EventStream()
    bound: Binding = {}
    for part, label in parts.items():
        play(stream, recording.stream, recording.parts[part], bound, label=label)
    stream.mark("end")
    return stream, recording
