"""A prediction made by hand, and words of a figure that stand on each other."""

from itertools import combinations

import pytest
from tests.report.hand_made import hand_made_prediction


@pytest.fixture
def prediction():
    return hand_made_prediction()


@pytest.fixture
def stand_apart():
    """stand_apart(figure, texts): fail where two texts of a drawn figure overlap, or one lies beyond its edge."""

    def check(figure, texts):
        figure.draw_without_rendering()  # which places a legend
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
        assert [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)] == []
        width, height = figure.canvas.get_width_height()
        assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for _, box in boxes)

    return check
