"""Squares of a GiB."""

from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from brim.report import Card, Filled, squares_plot
from brim.report.memory import GIB, square_bytes_for, squares

WAYS = [
    Filled(name="full", parts={"weights": 26 * GIB, "gradients": 26 * GIB, "optimizer_state": 52 * GIB}),
    Filled(name="4-bit + LoRA", parts={"weights": 4 * GIB, "activations": 5 * GIB, "outside": GIB // 2 + 1}),
]


def test_each_square_is_what_stands_at_its_middle():
    parts = {"weights": int(2.4 * GIB), "gradients": int(0.2 * GIB), "activations": int(1.6 * GIB)}
    assert squares(parts) == ["weights", "weights", "gradients", "activations"]


@given(st.lists(st.integers(0, 5 * GIB), min_size=3, max_size=3))
def test_there_are_as_many_as_the_whole_rounds_to_and_each_part_is_near_its_own(sizes):
    parts = dict(zip(("weights", "gradients", "activations"), sizes, strict=True))
    found = squares(parts)
    assert abs(len(found) - sum(sizes) / GIB) <= 0.5
    for part, size in parts.items():
        assert abs(found.count(part) - size / GIB) <= 1
    assert found == sorted(found, key=list(parts).index)


def test_nothing_is_no_square():
    assert squares({"weights": 0}) == []


@pytest.mark.parametrize(
    ("most_bytes", "square_bytes"),
    [(0, GIB), (2048 * GIB, GIB), (2048 * GIB + 1, 2 * GIB), (2**50, 512 * GIB), (2**80, 2**69)],
)
def test_squares_stand_for_more_where_they_would_be_too_many(most_bytes, square_bytes):
    assert square_bytes_for(most_bytes) == square_bytes


def test_a_huge_device_is_still_a_page_of_squares():
    console = Console(width=100, record=True, file=StringIO())
    console.print(Card(parts={"weights": 2**49}, budget_bytes=2**50, per_line=40))
    lines = console.export_text().splitlines()
    assert sum(line.count("W") for line in lines[:-1]) == 1024
    assert sum(line.count("·") for line in lines[:-1]) == 1024
    assert lines[-1].startswith("each is 512 GiB: ")
    huge = [Filled(name="full", parts={"weights": 2**50})]
    figure = squares_plot(huge, title="", subtitle="", cards={"t4": 15 * GIB})
    assert len(figure.axes[0].patches) == 2048
    assert figure.legends[0].get_title().get_text() == "a square is 512 GiB"


def picture(cards):
    return squares_plot(WAYS, title="Llama: ways", subtitle="what it takes", cards=cards)


def test_the_piles_have_a_patch_for_each_square_in_the_colour_of_its_part():
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    (axes,) = picture({"t4": 15 * GIB}).axes
    colours = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(colours) == 104 + 10
    assert colours.count("#0072B2") == 26 + 4
    assert colours.count("#009E73") == 52


def test_totals_names_devices_and_the_legend_are_written():
    figure = picture({"t4": 15 * GIB, "a100-80gb": 80 * GIB})
    (axes,) = figure.axes
    said = [text.get_text() for text in axes.texts]
    assert said == ["104.00 GiB", "full", "9.50 GiB", "4-bit\n+ LoRA", "t4, 15.00 GiB", "a100-80gb, 80.00 GiB"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "outside PyTorch",
        "activations",
        "optimizer state",
        "gradients",
        "weights",
    ]


def test_a_device_is_full_between_two_squares():
    (axes,) = picture({"t4": 15 * GIB}).axes
    wide = max(round(patch.get_x()) for patch in axes.patches[:104]) + 1
    step = axes.lines[0].get_xydata()
    row, part = divmod(15, wide)
    assert step[:, 1] == pytest.approx([row + 0.93, row + 0.93, row - 0.07, row - 0.07])
    assert step[1, 0] == pytest.approx(part - 0.07)


def test_names_of_devices_do_not_touch():
    figure = picture({"a": 22 * GIB, "b": 22 * GIB, "c": 23 * GIB, "d": 24 * GIB})
    names = [text for text in figure.axes[0].texts if text.get_text().startswith(("a,", "b,", "c,", "d,"))]
    boxes = sorted((name.get_window_extent().y0, name.get_window_extent().y1) for name in names)
    assert len(boxes) == 4
    assert all(below[1] <= above[0] for below, above in pairwise(boxes))
