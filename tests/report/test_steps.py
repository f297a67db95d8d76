"""More steps of training than were predicted."""

import numpy as np
from tests.report.hand_made import hand_made_prediction, hand_made_timeline

from brim.memory.trace import CATEGORIES
from brim.report import Overlay, memory_plot
from brim.report.memory_figure import with_steps


def test_later_steps_are_like_the_second():
    two, five = hand_made_timeline(2), with_steps(hand_made_timeline(2), 5)
    whole = hand_made_timeline(5)
    for category in CATEGORIES:
        assert (five.live_bytes[category] == whole.live_bytes[category]).all()
    assert five.marks == whole.marks
    assert five.places == whole.places
    assert (five.reserved_bytes[len(two.places) :] == two.reserved_bytes[-1]).all()


def test_as_many_or_fewer_stay_as_they_are():
    two = hand_made_timeline(2)
    for num_steps in (0, 1, 2):
        same = with_steps(two, num_steps)
        assert same.marks == two.marks
        assert (same.reserved_bytes == two.reserved_bytes).all()


def test_twenty_measured_steps_have_names_that_do_not_touch():
    whole = hand_made_timeline(20)
    allocated = whole.allocated_bytes()
    overlay = Overlay(label="measured on cpu", live_bytes=allocated, marks=whole.marks, num_steps=20)
    figure = memory_plot(hand_made_prediction(), title="m", overlay=overlay)
    (axes,) = figure.axes
    (line,) = [line for line in axes.lines if line.get_label() == "measured on cpu"]
    assert np.diff(line.get_xdata()).min() >= 0
    assert line.get_xdata()[-1] == len(allocated) - 1
    names = [text for text in axes.texts if text.get_text().startswith("step")]
    assert [name.get_text() for name in names] == [f"step {number}" for number in range(1, 21, 2)]
    figure.draw_without_rendering()
    boxes = [name.get_window_extent() for name in names]
    assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[n + 1 :])
