"""Files and folders that appear whole or not at all."""

import pytest

from brim.files import sha256, whole_file, whole_folder, write_text


def test_a_file_appears_once_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "model"
    for content in ("old", "new"):
        with whole_folder(path) as temporary:
            (temporary / "a.txt").write_text(content)
    assert (path / "a.txt").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_fill_leaves_the_old_folder(tmp_path):
    path = tmp_path / "model"
    with whole_folder(path) as temporary:
        (temporary / "a.txt").write_text("old")
    with pytest.raises(ZeroDivisionError), whole_folder(path) as temporary:
        raise ZeroDivisionError
    assert (path / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_sha256_is_the_published_one(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
