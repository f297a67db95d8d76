"""A prediction made by hand, in the shape of a LoRA run: two steps of a model of eight layers."""

from __future__ import annotations

import numpy as np

from brim.memory import MemoryPrediction, Timeline
from brim.memory.events import CATEGORIES, Place

GIB = 2**30
LAYERS = 8


class Writer:
    """Live bytes by category, point by point."""

    def __init__(self):
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.points, self.places, self.marks = [], [], []

    def mark(self, label):
        self.marks.append((len(self.points), label))

    def add(self, category, num_bytes, place):
        self.live[category] += int(num_bytes)
        assert self.live[category] >= 0
        self.points.append(dict(self.live))
        self.places.append(place)


def hand_made_timeline(num_steps=2):
    """13 GiB of weights, 0.25 GiB of activations a layer, 2 GiB of logits, 1 GiB of states from the first step on."""
    write = Writer()
    write.mark("load")
    for layer in range(LAYERS):
        place = Place(phase="load", layer=layer, module=f"model.layers.{layer}", operator="aten.empty")
        write.add("weights", 13 * GIB // LAYERS, place)
    for step in range(1, num_steps + 1):
        write.mark(f"step {step}: forward")
        for layer in range(LAYERS):
            place = Place("forward", layer, f"model.layers.{layer}.mlp.down_proj", "aten.mm")
            for _ in range(8):
                write.add("temporary", GIB // 16, place)
                write.add("activations", GIB // 32, place)
                write.add("temporary", -(GIB // 16), place)
        write.mark(f"step {step}: backward")
        head = Place("backward", None, "lm_head", "aten._log_softmax_backward_data")
        write.add("logits_and_loss", 2 * GIB, head)
        write.add("logits_and_loss", -2 * GIB, head)
        for layer in reversed(range(LAYERS)):
            place = Place("backward", layer, f"model.layers.{layer}.mlp.down_proj", "aten.mm")
            for _ in range(8):
                write.add("activations", -(GIB // 32), place)
                write.add("temporary", GIB // 8, place)
                write.add("gradients", GIB // 128, place)
                write.add("temporary", -(GIB // 8), place)
        write.mark(f"step {step}: optimizer")
        update = Place("optimizer", None, "", "aten._foreach_sqrt")
        if step == 1:
            write.add("optimizer_state", GIB, update)
        write.add("temporary", GIB // 2, update)
        write.add("temporary", -(GIB // 2), update)
        write.add("gradients", -write.live["gradients"], update)
    live = {name: np.array([point[name] for point in write.points], dtype=np.int64) for name in CATEGORIES}
    allocated = np.sum(list(live.values()), axis=0)
    reserved = np.maximum.accumulate(allocated) + GIB // 4
    return Timeline(live_bytes=live, reserved_bytes=reserved, marks=tuple(write.marks), places=tuple(write.places))


def hand_made_prediction(**changes):
    timeline = hand_made_timeline()
    allocated = timeline.allocated_bytes()
    peak = int(allocated.argmax())
    reserved, outside = int(timeline.reserved_bytes.max()), GIB // 2
    budget = changes.get("budget_bytes", 24 * GIB)
    total = reserved + outside
    halves = np.split(np.arange(len(allocated)), [timeline.marks[4][0]])
    fields = {
        "phase": "train",
        "device": "a10g",
        "batch_size": 4,
        "sequence_length": 4096,
        "world_size": 1,
        "allocated_bytes": int(allocated[peak]),
        "reserved_bytes": reserved,
        "outside_bytes": outside,
        "total_bytes": total,
        "end_allocated_bytes": int(allocated[-1]),
        "by_category": {name: int(timeline.live_bytes[name][peak]) for name in CATEGORIES},
        "peak": timeline.places[peak],
        "step_peaks_bytes": tuple(int(allocated[half].max()) for half in halves),
        "timeline": timeline,
        "budget_bytes": budget,
        "fits": None if budget is None else total <= budget,
        "reason": f"{total:,} bytes are needed and {budget or 0:,} are there",
        "choices": ("sequence_length: 4096 (preprocessing.global_max_sequence_length)",),
    }
    return MemoryPrediction(**{**fields, **changes})
