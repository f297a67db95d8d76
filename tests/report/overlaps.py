"""Words of a figure that stand on each other."""

from __future__ import annotations

from itertools import combinations
from typing import Any


def assert_no_words_stand_on_each_other(figure: Any, texts: list[Any]) -> None:
    """Fail where two texts of a drawn figure overlap, or one lies beyond its edge."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)] == []
    width, height = figure.canvas.get_width_height()
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for _, box in boxes)
