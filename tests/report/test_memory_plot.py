"""What stands in the picture of a timeline."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from tests.report.hand_made import GIB, hand_made_prediction

from brim.memory import Timeline
from brim.memory.trace import CATEGORIES, Place
from brim.report import LOOKS, Overlay, memory_plot
from brim.report.memory_figure import Spike, spikes


@pytest.fixture
def figure(prediction):
    return memory_plot(prediction, title="Mistral-7B")


def test_each_category_is_an_area_in_its_colour(figure, prediction):
    from matplotlib.colors import to_hex

    (axes,) = figure.axes
    areas = {area.get_label(): area for area in axes.collections if isinstance(area, PolyCollection)}
    shown = [name for name in CATEGORIES if prediction.timeline.live_bytes[name].any()]
    assert list(areas) == [LOOKS[name].label for name in shown]
    assert [to_hex(area.get_facecolor()[0]).upper() for area in areas.values()] == [
        LOOKS[name].colour for name in shown
    ]


def test_the_areas_reach_the_allocated_peak(figure, prediction):
    (axes,) = figure.axes
    tops = [path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths()]
    assert max(tops) == pytest.approx(prediction.allocated_bytes / GIB)


def test_reserved_memory_and_the_device_are_lines(figure, prediction):
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["reserved by PyTorch"].get_ydata().max() * GIB == prediction.reserved_bytes
    device = lines["a10g, less 0.50 GiB\noutside PyTorch"]
    assert set(device.get_ydata()) == {23.5}
    assert axes.get_ylim()[1] > 23.5


def test_a_device_far_above_is_left_to_the_words():
    figure = memory_plot(hand_made_prediction(budget_bytes=141 * GIB), title="Mistral-7B")
    assert not any("outside" in str(line.get_label()) for line in figure.axes[0].lines)
    assert any("fits in 141.00 GiB" in text.get_text() for text in figure.texts)


def test_title_numbers_and_the_spikes_are_written(figure):
    said = [text.get_text() for text in figure.texts]
    assert "Mistral-7B: train, 4 rows × 4,096 tokens, on a10g" in said
    assert "allocated 18.00 GiB at most, reserved 18.25, with what lies outside 18.75: fits in 24.00 GiB" in said
    assert said.count("_log_softmax_backward_data in lm_head") == 2
    bold = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
    assert bold[4:8] == ["6", "step 2: backward", "18.00", "_log_softmax_backward_data in lm_head"]


def test_no_words_stand_on_each_other(figure):
    (axes,) = figure.axes
    figure.draw_without_rendering()  # which places the legend
    texts = [*figure.texts, *axes.texts, *axes.get_legend().get_texts(), axes.xaxis.label, axes.yaxis.label]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    touching = [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]
    assert touching == []
    width, height = figure.canvas.get_width_height()
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for _, box in boxes)


def test_spikes_are_the_highest_points_of_the_phases(prediction):
    found = spikes(prediction.timeline)
    assert [spike.during for spike in found] == [
        "load",
        *(f"step {step}: {phase}" for step in (1, 2) for phase in ("forward", "backward", "optimizer")),
    ]
    assert found[5] == Spike(
        point=found[5].point,
        during="step 2: backward",
        live_bytes=18 * GIB,
        where="_log_softmax_backward_data in lm_head",
    )


def test_a_measured_line_lies_over_the_areas_less_what_was_there_before(prediction):
    timeline = prediction.timeline
    allocated = timeline.allocated_bytes()
    overlay = Overlay(
        label="measured on cpu",
        live_bytes=np.repeat(allocated, 3) + 2 * GIB,
        marks=tuple((3 * point, label) for point, label in timeline.marks),
        baseline_bytes=2 * GIB,
    )
    (axes,) = memory_plot(prediction, title="Mistral-7B", overlay=overlay).axes
    (line,) = [line for line in axes.lines if line.get_label() == "measured on cpu"]
    assert line.get_ydata().max() == pytest.approx(allocated.max() / GIB)
    highest = line.get_xdata()[line.get_ydata().argmax()]
    assert highest == pytest.approx(int(allocated.argmax()), abs=1)


def test_a_name_with_dollars_is_no_formula(prediction):
    figure = memory_plot(prediction, title="a $x_1$ b")
    assert not figure.texts[-2].get_parse_math()
    assert any(text.get_text().startswith("a $x_1$ b: train") for text in figure.texts)


def test_many_phases_without_steps_are_named_where_they_change(prediction):
    """One mark a token, as generation has them."""
    places = tuple(Place(phase="prefill" if point < 10 else "decode") for point in range(50))
    live = {name: np.full(50, GIB, dtype=np.int64) for name in CATEGORIES}
    marks = ((0, "prefill"), *((point, f"token {point}") for point in range(10, 50)))
    tokens = Timeline(live_bytes=live, reserved_bytes=live["weights"], marks=marks, places=places)
    figure = memory_plot(replace(prediction, phase="generate", timeline=tokens, step_peaks_bytes=()), title="Llama")
    said = [text.get_text() for text in figure.axes[0].texts]
    assert [each for each in said if each in ("prefill", "decode")] == ["prefill", "decode"]
