"""Pictures as files, and what is refused before any work."""

import builtins

import pytest

from brim.errors import InputError, OutputError
from brim.report import PageTable, check_picture, save_picture
from brim.report.picture import new_figure


@pytest.fixture
def figure():
    return new_figure(2, 1, paper="#FEFEFD")


def test_png_and_html(figure, tmp_path):
    table = PageTable(caption="numbers", heads=("a",), rows=[("1",)])
    for name, start in (("a.png", b"\x89PNG"), ("a.HTML", b"<!DOCTYPE html>")):
        check_picture(tmp_path / name)
        save_picture(figure, tmp_path / name, title="t", tables=[table])
        assert (tmp_path / name).read_bytes().startswith(start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.HTML", "a.png"]


@pytest.mark.parametrize(("name", "what"), [("a.jpeg", "ending '.jpeg' is not known"), ("a", "has no ending")])
def test_another_ending_is_refused(tmp_path, name, what):
    with pytest.raises(OutputError, match=what) as caught:
        check_picture(tmp_path / name)
    assert caught.value.problems[0].expected == ".png or .html"


def test_a_folder_and_a_place_below_a_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "file" / "a.png", tmp_path / "folder.png"):
        with pytest.raises(OutputError, match="the picture cannot be written"):
            check_picture(path)


def test_an_earlier_picture_is_replaced(figure, tmp_path):
    (tmp_path / "a.html").write_text("old")
    check_picture(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == "old"
    save_picture(figure, tmp_path / "a.html", title="t", tables=[])
    assert "old" not in (tmp_path / "a.html").read_text()


def test_without_matplotlib_the_command_is_told(tmp_path, monkeypatch):
    there = builtins.__import__

    def missing(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return there(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match="needs matplotlib") as caught:
        check_picture(tmp_path / "a.png")
    assert "pip install 'brim[plots]'" in caught.value.problems[0].fix
