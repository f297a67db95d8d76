"""The HTML file: everything in it, nothing outside."""

import re

import pytest

from brim.report import PageTable, memory_plot, prediction_tables
from brim.report.picture import FAINT, INK, PAPER, page, svg


@pytest.fixture
def text(prediction):
    figure = memory_plot(prediction, title="a <model> & more")
    return page(figure, title="a <model>", tables=prediction_tables(prediction), lines=["one & two"])


def test_nothing_is_fetched_from_elsewhere(text):
    assert re.findall(r"(?:src|href)=\"(?!#)", text) == []
    assert "<script" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert set(re.findall(r"https?://[^\"\s)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_words_are_escaped(text):
    assert "<title>a &lt;model&gt;</title>" in text
    assert "<p>one &amp; two</p>" in text
    assert "<model>" not in text


def test_the_picture_takes_the_page_s_colours(text):
    for colour, name in ((INK, "ink"), (PAPER, "paper"), (FAINT, "faint")):
        assert f"var(--{name})" in text
        assert f"fill: {colour.lower()}" not in text.lower()
    assert "prefers-color-scheme: dark" in text


def test_words_of_the_picture_are_words(text):
    assert "step 2: optimizer" in text
    assert "allocations and releases, in their order" in text


def test_the_numbers_stand_below(text, prediction):
    assert f'<td class="number">{prediction.total_bytes:,}</td>' in text
    assert '<i style="background:#0072B2"></i>weights</td>' in text
    rows = re.findall(r"<tr>.*?</tr>", text)
    assert len(rows) == (1 + 7) + (1 + 7) + (1 + 7)


def test_the_same_figure_gives_the_same_text(prediction):
    one, other = (svg(memory_plot(prediction, title="m")) for _ in range(2))
    assert one == other


def test_numbers_are_right_and_words_left():
    from brim.report.picture import new_figure

    table = PageTable(caption="c", heads=("a", "b"), rows=[("x", "1")])
    text = page(new_figure(2, 1, paper=PAPER), title="t", tables=[table])
    assert '<tr><td>x</td><td class="number">1</td></tr>' in text
