"""Pictures as files, and an HTML page with everything in it and nothing outside; faults/mistakes.py has what is refused."""

import re

import pytest

from brim.report import PageTable, check_picture, memory_plot, prediction_tables, save_picture
from brim.report.picture import FAINT, INK, PAPER, new_figure, page, svg


@pytest.fixture
def figure():
    return new_figure(2, 1)


def test_png_and_html_replace_an_earlier_picture(figure, tmp_path):
    table = PageTable(caption="numbers", heads=("a", "b"), rows=[("x", "1")])
    for name, start in (("a.png", b"\x89PNG"), ("a.HTML", b"<!DOCTYPE html>")):
        (tmp_path / name).write_text("old")
        check_picture(tmp_path / name)
        assert (tmp_path / name).read_text() == "old"
        save_picture(figure, tmp_path / name, title="t", tables=[table])
        assert (tmp_path / name).read_bytes().startswith(start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.HTML", "a.png"]
    assert '<tr><td>x</td><td class="number">1</td></tr>' in (tmp_path / "a.HTML").read_text(encoding="utf-8")


def test_a_page_holds_everything_escaped_and_fetches_nothing(prediction):
    figure = memory_plot(prediction, title="a <model> & more")
    text = page(figure, title="a <model>", tables=prediction_tables(prediction), lines=["one & two"])
    assert re.findall(r"(?:src|href)=\"(?!#)", text) == []
    assert "<script" not in text
    assert re.findall(r"url\((?!#)", text) == []
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"\s)]+", text)) <= namespaces
    assert "<title>a &lt;model&gt;</title>" in text
    assert "<p>one &amp; two</p>" in text
    assert "<model>" not in text
    # The picture takes the page's colours, and its words are words.
    for colour, name in ((INK, "ink"), (PAPER, "paper"), (FAINT, "faint")):
        assert f"var(--{name})" in text
        assert f"fill: {colour.lower()}" not in text.lower()
    assert "prefers-color-scheme: dark" in text
    assert "step 2: optimizer" in text
    assert "allocations and releases, in their order" in text
    # The numbers stand below.
    assert f'<td class="number">{prediction.total_bytes:,}</td>' in text
    assert '<i style="background:#0072B2"></i>weights</td>' in text
    assert len(re.findall(r"<tr>.*?</tr>", text)) == 3 * (1 + 7)
    assert svg(figure) == svg(memory_plot(prediction, title="a <model> & more")), "the same figure, the same text"
