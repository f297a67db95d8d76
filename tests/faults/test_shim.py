"""The library that counts and kills, in processes that do little."""

import os
import subprocess
import sys

import pytest
from faults.shim import build_shim, read_log, watch

WORK = """
import os, shutil
from pathlib import Path
run = Path("run")
run.mkdir()
(run / "a").write_text("0123456789")
os.fsync(os.open(run / "a", os.O_RDONLY))
(run / "a").rename(run / "b")
Path("elsewhere").write_text("not counted")
(run / "d").mkdir()
(run / "d" / "e").touch()
shutil.rmtree(run / "d")
"""
OPERATIONS = [
    ("mkdir", ".", None), ("create", "a", None), ("write", "a", None), ("fsync", "a", None), ("rename", "a", "b"),
    ("mkdir", "d", None), ("create", "d/e", None), ("unlink", "d/e", None), ("rmdir", "d", None),
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = build_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("needs Linux and a C compiler")
    return library


@pytest.fixture
def work(library, tmp_path):
    def work(**how):
        environment = {**os.environ, "LD_PRELOAD": str(library), **watch(tmp_path / "run", **how)}
        return subprocess.run([sys.executable, "-c", WORK], cwd=tmp_path, env=environment, check=False).returncode

    return work


def test_every_operation_below_the_folder_is_written_down(work, tmp_path):
    assert work(log=tmp_path / "log") == 0
    found = read_log(tmp_path / "log", tmp_path / "run")
    assert [(each.name, each.path, each.new_path) for each in found] == OPERATIONS
    assert [each.number for each in found] == list(range(1, 10))
    assert [each.number for each in found if each.is_tearable] == [3]


@pytest.mark.parametrize(
    ("number", "left"),
    [(1, []), (2, ["a"]), (4, ["a"]), (5, ["b"]), (7, ["b", "d", "d/e"]), (8, ["b", "d"]), (9, ["b"])],
)
def test_a_process_is_killed_once_the_operation_is_done(work, tmp_path, number, left):
    assert work(kill_after=number) == -9
    run = tmp_path / "run"
    assert sorted(path.relative_to(run).as_posix() for path in run.rglob("*")) == left


def test_a_process_is_killed_when_half_of_the_bytes_are_written(work, tmp_path):
    assert work(kill_amid=3) == -9
    assert (tmp_path / "run" / "a").read_text() == "01234"
