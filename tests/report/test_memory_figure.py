"""What stands in the picture of a timeline: its phases, its spikes, and a measurement laid on it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from tests.report.hand_made import GIB, hand_made_prediction, hand_made_timeline

from brim.memory import Timeline
from brim.memory.events import CATEGORIES, Place
from brim.report import LOOKS, Overlay, memory_plot
from brim.report.memory_figure import Spike, aligned, downsampled, phases, spikes, with_steps


@pytest.fixture
def figure(prediction):
    return memory_plot(prediction, title="Mistral-7B")


def lines_of(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_each_category_is_an_area_in_its_colour_and_they_reach_the_peak(figure, prediction):
    (axes,) = figure.axes
    areas = {area.get_label(): area for area in axes.collections if isinstance(area, PolyCollection)}
    shown = [name for name in CATEGORIES if prediction.timeline.live_bytes[name].any()]
    assert {label: to_hex(area.get_facecolor()[0]).upper() for label, area in areas.items()} == {
        LOOKS[name].label: LOOKS[name].colour for name in shown
    }
    tops = [path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths()]
    assert max(tops) == pytest.approx(prediction.allocated_bytes / GIB)


def test_reserved_memory_and_the_device_are_lines_unless_it_is_far_above(figure, prediction):
    lines = lines_of(figure)
    assert lines["reserved by PyTorch"].get_ydata().max() * GIB == prediction.reserved_bytes
    assert set(lines["a10g, less 0.50 GiB\noutside PyTorch"].get_ydata()) == {23.5}
    assert figure.axes[0].get_ylim()[1] > 23.5
    figure = memory_plot(hand_made_prediction(budget_bytes=141 * GIB), title="Mistral-7B")
    assert not any("outside" in str(label) for label in lines_of(figure))
    assert any("fits in 141.00 GiB" in text.get_text() for text in figure.texts)


def test_title_numbers_and_spikes_are_written_and_no_words_stand_on_each_other(figure, prediction, stand_apart):
    said = [text.get_text() for text in figure.texts]
    assert "Mistral-7B: train, 4 rows × 4,096 tokens, on a10g" in said
    assert "allocated 18.00 GiB at most, reserved 18.25, with what lies outside 18.75: fits in 24.00 GiB" in said
    assert said.count("_log_softmax_backward_data in lm_head") == 2
    bold = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
    assert bold[4:8] == ["6", "step 2: backward", "18.00", "_log_softmax_backward_data in lm_head"]
    (axes,) = figure.axes
    stand_apart(
        figure, [*figure.texts, *axes.texts, *axes.get_legend().get_texts(), axes.xaxis.label, axes.yaxis.label]
    )
    figure = memory_plot(prediction, title="a $x_1$ b")
    assert not figure.texts[-2].get_parse_math()
    assert any(text.get_text().startswith("a $x_1$ b: train") for text in figure.texts)


def test_spikes_are_the_highest_points_of_the_phases(prediction):
    found = spikes(prediction.timeline)
    assert [spike.during for spike in found] == [
        "load",
        *(f"step {step}: {phase}" for step in (1, 2) for phase in ("forward", "backward", "optimizer")),
    ]
    where = "_log_softmax_backward_data in lm_head"
    assert found[5] == Spike(point=found[5].point, during="step 2: backward", live_bytes=18 * GIB, where=where)


def test_a_measured_line_lies_over_the_areas_less_what_was_there_before(prediction):
    timeline = prediction.timeline
    allocated = timeline.allocated_bytes()
    overlay = Overlay(
        label="measured on cpu",
        live_bytes=np.repeat(allocated, 3) + 2 * GIB,
        marks=tuple((3 * point, label) for point, label in timeline.marks),
        baseline_bytes=2 * GIB,
    )
    line = lines_of(memory_plot(prediction, title="Mistral-7B", overlay=overlay))["measured on cpu"]
    assert line.get_ydata().max() == pytest.approx(allocated.max() / GIB)
    highest = line.get_xdata()[line.get_ydata().argmax()]
    assert highest == pytest.approx(int(allocated.argmax()), abs=1)


def test_many_phases_without_steps_are_named_where_they_change(prediction):
    """One mark a token, as generation has them."""
    places = tuple(Place(phase="prefill" if point < 10 else "decode") for point in range(50))
    live = {name: np.full(50, GIB, dtype=np.int64) for name in CATEGORIES}
    marks = ((0, "prefill"), *((point, f"token {point}") for point in range(10, 50)))
    tokens = Timeline(live_bytes=live, reserved_bytes=live["weights"], marks=marks, places=places)
    figure = memory_plot(replace(prediction, phase="generate", timeline=tokens, step_peaks_bytes=()), title="Llama")
    said = [text.get_text() for text in figure.axes[0].texts]
    assert [each for each in said if each in ("prefill", "decode")] == ["prefill", "decode"]


def test_later_steps_are_like_the_second():
    two, five = hand_made_timeline(2), with_steps(hand_made_timeline(2), 5)
    whole = hand_made_timeline(5)
    for category in CATEGORIES:
        assert (five.live_bytes[category] == whole.live_bytes[category]).all()
    assert five.marks == whole.marks
    assert five.places == whole.places
    assert (five.reserved_bytes[len(two.places) :] == two.reserved_bytes[-1]).all()
    for num_steps in (0, 1, 2):
        same = with_steps(two, num_steps)
        assert same.marks == two.marks
        assert (same.reserved_bytes == two.reserved_bytes).all()


def test_twenty_measured_steps_have_names_that_do_not_touch(prediction, stand_apart):
    whole = hand_made_timeline(20)
    allocated = whole.allocated_bytes()
    overlay = Overlay(label="measured on cpu", live_bytes=allocated, marks=whole.marks, num_steps=20)
    figure = memory_plot(prediction, title="m", overlay=overlay)
    line = lines_of(figure)["measured on cpu"]
    assert np.diff(line.get_xdata()).min() >= 0
    assert line.get_xdata()[-1] == len(allocated) - 1
    names = [text for text in figure.axes[0].texts if text.get_text().startswith("step")]
    assert [name.get_text() for name in names] == [f"step {number}" for number in range(1, 21, 2)]
    stand_apart(figure, names)


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


def test_phases_are_named_by_what_is_done():
    assert phases(TWO_STEPS) == [
        (0, "load"),
        (2, "step 1: forward"),
        (5, "step 1: backward"),
        (9, "step 1: optimizer"),
        (11, "step 2: forward"),
        (14, "step 2: backward"),
        (18, "step 2: optimizer"),
    ]
    micro_batches = timeline([(0, "step 1, micro-batch 1"), (7, "step 1, micro-batch 2")], STEP * 2)
    assert [label for _, label in phases(micro_batches)] == ["step 1: forward", "step 1: backward"] * 2
    generated = timeline([(0, "load"), (1, "batch 1"), (5, "end")], ["load", "prefill", "prefill", "decode", "decode"])
    assert phases(generated) == [(0, "load"), (1, "prefill"), (3, "decode")]


def test_measured_points_lie_where_their_phases_do():
    measured = [(0, "load"), (20, "step 1: forward"), (50, "step 1: backward"), (90, "step 1: optimizer")]
    x = aligned(110, measured, TWO_STEPS)
    assert [x[0], x[20], x[35], x[50], x[70], x[90], x[109]] == [0, 2, 3.5, 5, 7, 9, 19]
    assert (np.diff(x) >= 0).all()
    twice = timeline([(0, "step 1, micro-batch 1"), (7, "step 1, micro-batch 2")], STEP * 2)
    measured = [(0, "step 1: forward"), (2, "step 1: backward"), (10, "step 1: forward"), (12, "step 1: backward")]
    x = aligned(14, measured, twice)
    assert [x[2], x[10], x[12]] == [3, 7, 10]
    assert aligned(5, [(0, "elsewhere")], TWO_STEPS).tolist() == [0, 4.75, 9.5, 14.25, 19]
    assert aligned(1, [], TWO_STEPS).tolist() == [0]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=400), st.integers(6, 60))
def test_order_ends_and_extremes_are_kept(values, most):
    values = np.array(values)
    kept = downsampled(values, most=most)
    if len(values) <= most:
        assert len(kept) == len(values)
    assert len(kept) <= most
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()
