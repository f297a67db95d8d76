"""Phases by name, and a measurement laid on them."""

import numpy as np

from brim.memory import Timeline
from brim.memory.trace import CATEGORIES, Place
from brim.report.memory_figure import aligned, phases


def timeline(marks, kinds):
    num = len(kinds)
    return Timeline(
        live_bytes={name: np.zeros(num, dtype=np.int64) for name in CATEGORIES},
        reserved_bytes=np.zeros(num, dtype=np.int64),
        marks=tuple(marks),
        places=tuple(Place(phase=kind) for kind in kinds),
    )


STEP = ["forward"] * 3 + ["backward"] * 4
TWO_STEPS = timeline(
    [(0, "load"), (2, "step 1"), (9, "step 1: optimizer"), (11, "step 2"), (18, "step 2: optimizer"), (20, "end")],
    ["load"] * 2 + STEP + ["optimizer"] * 2 + STEP + ["optimizer"] * 2,
)


def test_a_step_turns_from_forward_to_backward():
    assert phases(TWO_STEPS) == [
        (0, "load"),
        (2, "step 1: forward"),
        (5, "step 1: backward"),
        (9, "step 1: optimizer"),
        (11, "step 2: forward"),
        (14, "step 2: backward"),
        (18, "step 2: optimizer"),
    ]


def test_micro_batches_have_the_names_of_their_step():
    found = timeline([(0, "step 1, micro-batch 1"), (7, "step 1, micro-batch 2")], STEP * 2)
    names = [label for _, label in phases(found)]
    assert names == ["step 1: forward", "step 1: backward"] * 2


def test_a_batch_is_named_by_what_is_done():
    generated = timeline([(0, "load"), (1, "batch 1"), (5, "end")], ["load", "prefill", "prefill", "decode", "decode"])
    assert phases(generated) == [(0, "load"), (1, "prefill"), (3, "decode")]


def test_measured_points_lie_where_their_phases_do():
    measured = [(0, "load"), (20, "step 1: forward"), (50, "step 1: backward"), (90, "step 1: optimizer")]
    x = aligned(110, measured, TWO_STEPS)
    assert [x[0], x[20], x[35], x[50], x[70], x[90], x[109]] == [0, 2, 3.5, 5, 7, 9, 19]
    assert (np.diff(x) >= 0).all()


def test_a_phase_that_comes_twice_is_matched_twice():
    predicted = timeline([(0, "step 1, micro-batch 1"), (7, "step 1, micro-batch 2")], STEP * 2)
    measured = [(0, "step 1: forward"), (2, "step 1: backward"), (10, "step 1: forward"), (12, "step 1: backward")]
    x = aligned(14, measured, predicted)
    assert [x[2], x[10], x[12]] == [3, 7, 10]


def test_unknown_names_and_a_single_point_do_no_harm():
    assert aligned(5, [(0, "elsewhere")], TWO_STEPS).tolist() == [0, 4.75, 9.5, 14.25, 19]
    assert aligned(1, [], TWO_STEPS).tolist() == [0]
