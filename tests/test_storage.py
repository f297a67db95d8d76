"""Files and folders that appear whole or not at all, manifests that tell what was changed, and where the cache lies."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from brim.errors import WriteError
from brim.storage import (
    cache_folder,
    finish_replacing,
    is_half_replaced,
    make_folder,
    remove_folder,
    remove_unfinished,
    sha256,
    verified,
    whole_file,
    whole_folder,
    write_manifest,
    write_text,
    writing,
)

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # as published


def test_a_file_appears_once_it_is_whole_and_a_failed_write_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_the_old_one_and_a_failed_fill_leaves_it(tmp_path):
    path = tmp_path / "above" / "model"
    for content in ("old", "new"):
        with whole_folder(path) as temporary:
            (temporary / "a.txt").write_text(content)
            (temporary / "a.txt").chmod(0o600)
    with pytest.raises(ZeroDivisionError), whole_folder(path) as temporary:
        raise ZeroDivisionError
    assert (path / "a.txt").read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "new").touch()
    assert (path / "a.txt").stat().st_mode == (tmp_path / "new").stat().st_mode, "who may read a new file may read it"
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        make_folder(tmp_path / "new" / "c")


@pytest.mark.parametrize("stands", [True, False])
def test_the_old_folder_is_there_whatever_rename_a_kill_came_after(tmp_path, stands):
    path, aside = tmp_path / "model", tmp_path / ".model.old"
    aside.mkdir()
    (aside / "a.txt").write_text("old")
    if stands:
        path.mkdir()
        (path / "a.txt").write_text("new")
    assert is_half_replaced(path) is not stands
    finish_replacing(path)
    assert (path / "a.txt").read_text() == ("new" if stands else "old")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_goes_and_what_killed_writes_left_goes_but_nothing_else(tmp_path):
    for name in ("a", ".b.tmp", ".c.old", ".hidden", "d.tmp", ".a.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    remove_folder(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.tmp", ".c.old", ".hidden", "d.tmp"]
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "d.tmp"]


def test_the_systems_error_is_told_with_what_and_where(tmp_path):
    with pytest.raises(WriteError) as caught, writing("the ledger", tmp_path / "ledger.parquet"):
        raise OSError(28, "a library's long text")
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path}/ledger.parquet"
    assert problem.what == "the ledger could not be written: No space left on device"
    assert "--resume" in problem.fix
    assert caught.value.exit_code == 1


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "a").write_bytes(b"abc")
    (folder / "below" / "b").write_bytes(b"")
    write_manifest(folder)
    return folder


def test_a_manifest_has_the_published_digest_of_every_file_but_itself(folder):
    assert sha256(folder / "a") == ABC
    assert json.loads((folder / "manifest.json").read_text())["a"] == ABC
    write_manifest(folder)
    assert verified(folder) == ["a", "below/b"]


def test_a_changed_file_and_a_missing_one_are_named(folder):
    (folder / "a").write_bytes(b"abd")
    with pytest.raises(ValueError, match=r"^a changed since it was written$"):
        verified(folder)
    (folder / "a").unlink()
    with pytest.raises(OSError, match=r"No such file or directory: .*/folder/a'"):
        verified(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "below/../../secret", "", ".", "..\\\\secret"])
def test_a_manifest_that_names_what_lies_outside_or_is_none_is_refused(folder, name):
    (folder.parent / "secret").write_bytes(b"abc")
    (folder / "manifest.json").write_text(json.dumps({name: ABC}))
    with pytest.raises(ValueError, match="names paths outside the folder"):
        verified(folder)
    for text in ("[]", "3", "{"):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"is not a list of files and digests|Expecting"):
            verified(folder)


@pytest.mark.parametrize("name", ["a", "manifest.json"])
@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_what_may_never_end_is_not_read(folder, name, spoil):
    (folder / name).unlink()
    spoil(folder / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        verified(folder)


def test_the_caches_own_variable_comes_first_and_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("BRIM_CACHE_DIR", "")
    assert cache_folder() == tmp_path / "xdg" / "brim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "brim"
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    assert cache_folder() == Path(tempfile.gettempdir())
