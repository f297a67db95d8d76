"""Entries stay, damaged ones are said, the oldest go, and a folder that cannot be written to fails nothing."""

from __future__ import annotations

import os

import pytest

from brim.storage import Cache, digest, forget_oldest


def test_what_is_kept_comes_back(tmp_path):
    cache = Cache(tmp_path / "deep" / "folder", "plans")
    assert cache.read("a") is None
    cache.write("a", {"x": [1, 2.5, None]})
    cache.write("a", {"x": [3]})
    cache.write("b", "other")
    assert (cache.read("a"), cache.read("b"), cache.note) == ({"x": [3]}, "other", None)
    assert sorted(path.name for path in (tmp_path / "deep" / "folder" / "plans").iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize("content", [b"", b'{"x": ', b"\xff\xfe", b"[" * 100_000, b"[]", b"3", b'{"value": 1}'])
def test_a_damaged_entry_is_said_and_written_anew(tmp_path, content):
    cache = Cache(tmp_path, "plans")
    path = tmp_path / "plans" / "a.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert cache.read("a") is None
    assert cache.note == f"{path} is damaged, and is not used"
    cache.write("a", 1)
    assert Cache(tmp_path, "plans").read("a") == 1


@pytest.mark.parametrize("changed", ["2", "NaN", '"1"', "null"])
def test_a_value_that_is_not_what_was_written_is_damaged(tmp_path, changed):
    cache = Cache(tmp_path, "plans")
    cache.write("a", {"bytes": 1})
    path = tmp_path / "plans" / "a.json"
    path.write_text(path.read_text().replace('"bytes": 1', f'"bytes": {changed}'))
    assert cache.read("a") is None
    assert cache.note == f"{path} is damaged, and is not used"


def test_where_nothing_can_be_written_nothing_fails(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file", "plans")
    assert cache.read("a") is None
    cache.write("a", 1)
    assert cache.note is not None
    assert cache.note.startswith("nothing is kept for later runs: an entry of the cache could not be written: ")


def test_a_folder_in_the_place_of_an_entry_is_said(tmp_path):
    (tmp_path / "plans" / "a.json").mkdir(parents=True)
    cache = Cache(tmp_path, "plans")
    assert cache.read("a") is None
    assert cache.note == f"{tmp_path / 'plans' / 'a.json'} cannot be read, and is not used: Is a directory"


def _age(path, seconds):
    os.utime(path, ns=(10**18 - seconds * 10**9,) * 2)


def test_what_was_used_longest_ago_goes(tmp_path):
    cache = Cache(tmp_path, "plans", most_bytes=500)
    for number, name in enumerate("abcd"):
        cache.write(name, "x" * 98)  # 189 bytes with its quotes and checksum
        if number < 2:
            _age(tmp_path / "plans" / f"{name}.json", 100 - number)
    assert sorted(path.stem for path in (tmp_path / "plans").iterdir()) == ["c", "d"]


def test_what_is_read_is_used(tmp_path):
    cache = Cache(tmp_path, "plans")
    for number, name in enumerate("abc"):
        cache.write(name, "x" * 98)
        _age(tmp_path / "plans" / f"{name}.json", 100 - number)
    cache.read("a")
    forget_oldest(tmp_path / "plans", most_bytes=400)
    assert sorted(path.stem for path in (tmp_path / "plans").iterdir()) == ["a", "c"]


def test_equal_facts_have_one_name():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert len(digest({})) == 32
