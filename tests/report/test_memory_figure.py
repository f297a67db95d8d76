"""What stands in the picture of a timeline: its phases, its spikes; and variants as bars."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from tests.report.hand_made import GIB, hand_made_prediction

from brim.memory import Timeline
from brim.memory.events import CATEGORIES, Place
from brim.report import LOOKS, memory_plot, variants_plot
from brim.report.memory_figure import downsampled, phases


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
    figure = memory_plot(hand_made_prediction(budget_bytes=141 * GIB), title="Mistral-7B", measured_bytes=19 * GIB)
    lines = lines_of(figure)
    assert not any("outside" in str(label) for label in lines)
    assert set(lines["measured, at most"].get_ydata()) == {19}
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


def timeline(marks, kinds):
    live = {name: np.full(len(kinds), GIB, dtype=np.int64) for name in CATEGORIES}
    places = tuple(Place(phase=kind) for kind in kinds)
    return Timeline(live_bytes=live, reserved_bytes=live["weights"], marks=tuple(marks), places=places)


def test_many_phases_are_named_where_they_change(prediction):
    """One mark a token, as generation has them."""
    marks = ((0, "prefill"), *((point, f"token {point}") for point in range(10, 50)))
    tokens = timeline(marks, ["prefill"] * 10 + ["decode"] * 40)
    figure = memory_plot(replace(prediction, phase="generate", timeline=tokens, step_peaks_bytes=()), title="Llama")
    said = [text.get_text() for text in figure.axes[0].texts]
    assert [each for each in said if each in ("prefill", "decode")] == ["prefill", "decode"]


def test_phases_are_named_by_what_is_done():
    step = ["forward"] * 3 + ["backward"] * 4
    one = timeline(
        [(0, "load"), (2, "step 1"), (9, "step 1: optimizer"), (11, "end")], ["load"] * 2 + step + ["optimizer"] * 2
    )
    assert phases(one) == [(0, "load"), (2, "step 1: forward"), (5, "step 1: backward"), (9, "step 1: optimizer")]
    micro_batches = timeline([(0, "step 1, micro-batch 1"), (7, "step 1, micro-batch 2")], step * 2)
    assert [label for _, label in phases(micro_batches)] == ["step 1: forward", "step 1: backward"] * 2
    generated = timeline([(0, "load"), (1, "batch 1"), (5, "end")], ["load", "prefill", "prefill", "decode", "decode"])
    assert phases(generated) == [(0, "load"), (1, "prefill"), (3, "decode")]


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


def test_variants_are_stacked_bars_with_their_totals_and_devices_are_lines_whose_names_do_not_touch(stand_apart):
    ways = {
        "full": {"weights": 26 * GIB, "gradients": 26 * GIB, "optimizer_state": 52 * GIB},
        "4-bit + LoRA": {"weights": 4 * GIB, "activations": 5 * GIB, "outside": GIB // 2 + 1},
    }
    cards = {"a": 22 * GIB, "b": 22 * GIB, "c": 23 * GIB, "a100-80gb": 80 * GIB}
    figure = variants_plot(ways, title="Llama: ways", subtitle="what it takes", cards=cards)
    (axes,) = figure.axes
    bars = [
        (to_hex(bar.get_facecolor()).upper(), bar.get_x() > 0.5, bar.get_y(), bar.get_height()) for bar in axes.patches
    ]
    assert {(LOOKS[part].colour, *place) for part, *place in (
        ("weights", False, 0, 26), ("gradients", False, 26, 26), ("optimizer_state", False, 52, 52),
        ("weights", True, 0, 4), ("activations", True, 4, 5), ("outside", True, 9, 0.5 + 2**-30),
    )} == {bar for bar in bars if bar[3]}  # fmt: skip
    assert [line.get_ydata()[0] for line in axes.lines] == [22, 22, 23, 80]
    (legend,) = figure.legends
    parts = ["outside PyTorch", "activations", "optimizer state", "gradients", "weights"]
    assert [text.get_text() for text in legend.get_texts()] == parts
    said = ["104.00 GiB", "9.50 GiB", "a, 22.00 GiB", "b, 22.00 GiB", "c, 23.00 GiB", "a100-80gb, 80.00 GiB"]
    assert [text.get_text() for text in axes.texts] == said
    assert [text.get_text() for text in axes.get_xticklabels()] == ["full", "4-bit\n+ LoRA"]
    stand_apart(figure, [*figure.texts, *axes.texts, *axes.get_xticklabels(), *legend.get_texts()])
    assert variants_plot({"full": {"weights": GIB}}, title="", subtitle="", cards={}).axes[0].get_ylim()[1] == 1.06
