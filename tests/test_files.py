"""Files and folders that appear whole or not at all."""

import pytest

from brim.errors import WriteError
from brim.storage import (
    finish_replacing,
    is_half_replaced,
    make_folder,
    remove_folder,
    remove_unfinished,
    whole_file,
    whole_folder,
    write_text,
    writing,
)


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


def test_folders_are_made_with_those_above_them(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        make_folder(tmp_path / "file" / "c")


def test_the_systems_error_is_told_with_what_and_where(tmp_path):
    with pytest.raises(WriteError) as caught, writing("the ledger", tmp_path / "ledger.parquet"):
        raise OSError(28, "a library's long text")
    assert str(caught.value) == (
        f"{tmp_path}/ledger.parquet: the ledger could not be written: No space left on device\n"
        "  fix: make room or make the folder writable, then continue with --resume"
    )
    assert caught.value.exit_code == 1


def test_the_files_of_a_whole_folder_may_be_read_by_those_who_may_read_a_new_file(tmp_path):
    with whole_folder(tmp_path / "folder") as folder:
        (folder / "weights").touch(mode=0o600)
    (tmp_path / "new").touch()
    assert (tmp_path / "folder" / "weights").stat().st_mode == (tmp_path / "new").stat().st_mode
