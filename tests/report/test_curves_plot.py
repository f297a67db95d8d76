"""What stands in the picture of several configurations."""

from itertools import combinations

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from tests.report.hand_made_runs import figures, two_by_three

from brim.report import curves_plot
from brim.report.curves import COLOURS, look


@pytest.fixture
def figure():
    return curves_plot(two_by_three(), title="Loss over tokens: a, b", subtitle="means of 3 seeds")


def test_validation_and_training_have_a_panel_each(figure):
    validation, training = figure.axes
    assert validation.get_title(loc="left").startswith("validation loss")
    assert training.get_title(loc="left").startswith("training loss, in 10 equal stretches")
    assert validation.get_xlim() == training.get_xlim() == (0, pytest.approx(1002 * 1.01))


def test_each_configuration_is_a_mean_and_a_band_in_its_colour(figure):
    for axes in figure.axes:
        assert [to_hex(line.get_color()).upper() for line in axes.lines] == list(COLOURS[:2])
        assert [isinstance(band, PolyCollection) for band in axes.collections] == [True, True]
    line = figure.axes[0].lines[0]
    assert line.get_ydata()[-1] == pytest.approx(2.1 + 50 / 1001, abs=1e-4)
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    last = band[band[:, 0] == band[:, 0].max(), 1]
    # The seeds lie 0.1 apart, a's and b's alike but for 0.001: paired, half of that is left on each side.
    assert last.min() == pytest.approx(line.get_ydata()[-1] - 0.0005, abs=2e-4)
    assert last.max() == pytest.approx(line.get_ydata()[-1] + 0.0005, abs=2e-4)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_the_fall_of_the_first_steps_is_cut_and_that_is_said():
    """At 50 of 1,000 tokens the loss is 4.0; from a tenth on it is 3.0 at most."""
    (axes,) = curves_plot(
        {name: {0: figures(2.0, steps=20, evaluations=1)} for name in "ab"}, title="t", subtitle="s"
    ).axes
    assert axes.get_ylim()[1] < 3.5
    assert "(the first steps lie above)" in axes.get_title(loc="left")


def test_one_evaluation_is_no_curve():
    figure = curves_plot({"a": {0: figures(2.0, evaluations=1)}, "b": {0: figures(2.0)}}, title="t", subtitle="s")
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith("training loss")


@pytest.mark.parametrize("names", ["ab", [f"configuration-with-a-long-name-{n}" for n in range(7)]])
def test_no_words_stand_on_each_other(names):
    runs = {name: {seed: figures(2.0 + 0.1 * seed) for seed in range(2)} for name in names}
    figure = curves_plot(runs, title="Loss over tokens", subtitle="means of 2 seeds")
    figure.draw_without_rendering()
    texts = [*figure.texts, *figure.legends[0].get_texts()]
    texts += [part for axes in figure.axes for part in (axes._left_title, axes.xaxis.label)]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)] == []
    width, height = figure.canvas.get_width_height()
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for _, box in boxes)


def test_eighteen_configurations_look_different():
    assert len({look(number) for number in range(18)}) == 18


def test_a_name_with_dollars_is_no_formula():
    figure = curves_plot({"a$x_1$": {0: figures(2.0)}, "b": {0: figures(2.0)}}, title="$t_1$", subtitle="s")
    assert not any(text.get_parse_math() for text in [*figure.texts, *figure.legends[0].get_texts()])


def test_runs_of_few_steps_are_averaged_over_as_few_stretches():
    """A last step of one row is no point of its own."""
    runs = {"a": {0: figures(2.0, steps=10)}, "b": {0: figures(2.0, steps=1)}}
    training = curves_plot(runs, title="t", subtitle="s").axes[1]
    assert training.get_title(loc="left").startswith("training loss, in 2 equal stretches")
    assert [len(line.get_xdata()) for line in training.lines] == [2, 1]
    assert [line.get_marker() for line in training.lines] == ["", "o"]
