"""A prediction made by hand, in the shape of a LoRA run: two steps of a model of eight layers."""

from __future__ import annotations

import numpy as np

from brim.memory import MemoryPrediction, Timeline
from brim.memory.events import CATEGORIES, Place

GIB = 2**30
LAYERS = 8


def hand_made_timeline():
    """13 GiB of weights, 0.25 GiB of activations a layer, 2 GiB of logits, 1 GiB of states from the first step on."""
    live, points, places, marks = dict.fromkeys(CATEGORIES, 0), [], [], []

    def add(category, num_bytes, place):
        live[category] += num_bytes
        points.append(dict(live))
        places.append(place)

    def for_a_moment(category, num_bytes, place):
        add(category, num_bytes, place)
        add(category, -num_bytes, place)

    def mark(label):
        marks.append((len(points), label))

    mark("load")
    for layer in range(LAYERS):
        add("weights", 13 * GIB // LAYERS, Place("load", layer, f"model.layers.{layer}", "aten.empty"))
    for step in (1, 2):
        mark(f"step {step}: forward")
        for layer in range(LAYERS):
            place = Place("forward", layer, f"model.layers.{layer}.mlp.down_proj", "aten.mm")
            for _ in range(8):
                add("temporary", GIB // 16, place)
                add("activations", GIB // 32, place)
                add("temporary", -(GIB // 16), place)
        mark(f"step {step}: backward")
        for_a_moment("logits_and_loss", 2 * GIB, Place("backward", None, "lm_head", "aten._log_softmax_backward_data"))
        for layer in reversed(range(LAYERS)):
            place = Place("backward", layer, f"model.layers.{layer}.mlp.down_proj", "aten.mm")
            for _ in range(8):
                add("activations", -(GIB // 32), place)
                add("temporary", GIB // 8, place)
                add("gradients", GIB // 128, place)
                add("temporary", -(GIB // 8), place)
        mark(f"step {step}: optimizer")
        update = Place("optimizer", None, "", "aten._foreach_sqrt")
        if step == 1:
            add("optimizer_state", GIB, update)
        for_a_moment("temporary", GIB // 2, update)
        add("gradients", -live["gradients"], update)
    by_category = {name: np.array([point[name] for point in points], dtype=np.int64) for name in CATEGORIES}
    reserved = np.maximum.accumulate(np.sum(list(by_category.values()), axis=0)) + GIB // 4
    return Timeline(live_bytes=by_category, reserved_bytes=reserved, marks=tuple(marks), places=tuple(places))


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
