"""Processes of one run: each knows its place, all end when one fails, its message is shown and its exit code is kept."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from brim.distributed import Place, joined, launch_processes, num_processes
from brim.distributed.launch import Launched
from brim.errors import BrimError, InputError

WORKER = str(Path(__file__).with_name("worker.py"))
PLACES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def launched(tmp_path, capfd):
    """launched(how) -> what the launch returned, after it was seen that it left no process and only rank 0's output."""

    def launch(how: str, **more: float) -> Launched:
        try:
            return launch_processes([sys.executable, WORKER, how, str(tmp_path)], 2, **more)
        finally:
            assert [pid for pid in pids(tmp_path) if state(pid) is not None] == []
            out, err = capfd.readouterr()
            assert (out, err) == ("rank 0 of 2\n", "")

    return launch


def pids(folder: Path) -> list[int]:
    return [int((folder / f"pid{rank}").read_text()) for rank in range(2)]


def state(pid: int) -> str | None:
    """The letter of a process's state; None if it has ended, whether or not its parent has noticed."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if letter in "ZX" else letter


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("done", 0, ""),
        ("bad input", 2, "brim: no such file or folder: nowhere.yaml\n  expected"),
        ("crash", 1, "no such library"),
        ("follows", 2, "the cause"),
        ("stopped", 1, "the other one is gone"),
        ("interrupted", 130, "rank 0 has heard 1"),
    ],
)
def test_the_first_failure_is_told_and_its_exit_code_kept(launched, how, code, message):
    ended = launched(how, patience_s=1.0)
    assert (ended.code, ended.message[: len(message) or None]) == (code, message)


@pytest.mark.process
@pytest.mark.parametrize("how", ["killed", "reduce"])
def test_a_killed_process_is_named_whatever_the_others_say_of_it(launched, how):
    with pytest.raises(BrimError, match=r"rank 1, of 2, was ended by SIGKILL.*\n  fix: .*--resume"):
        launched(how)


@pytest.mark.process
def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    """The one that is stopped, too."""
    code = "import sys; from brim.distributed import launch_processes; launch_processes(sys.argv[1:], 2)"
    command = [sys.executable, "-c", code, sys.executable, WORKER, "orphaned", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        wait_until(
            lambda: (tmp_path / "pid0").exists() and (tmp_path / "pid1").exists() and state(pids(tmp_path)[1]) == "T"
        )
        assert state(pids(tmp_path)[0]) is not None
        launcher.kill()
    wait_until(lambda: all(state(pid) is None for pid in pids(tmp_path)))


def wait_until(holds) -> None:
    """Wait for what must come soon; a minute is enough on any machine."""
    for _ in range(6_000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it did not come")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Place()),
        ({"RANK": "3", "LOCAL_RANK": "1"}, Place()),  # other tools' leftovers
        ({"WORLD_SIZE": "1"}, Place(is_launched=True)),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Place(rank=3, local_rank=1, world_size=4, local_world_size=2, is_launched=True),
        ),
        (
            {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"},
            Place(world_size=4, local_world_size=4, is_launched=True),
        ),
    ],
)
def test_a_launcher_says_each_process_its_place(monkeypatch, variables, place):
    set_place(monkeypatch, variables)
    assert Place.of_environment() == place
    assert place.is_first == (place.rank == 0)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK is not set, but WORLD_SIZE=2 is"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK is '2'"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is '1'"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE is '4'"),
    ],
)
def test_a_place_that_cannot_be_is_refused(monkeypatch, variables, told):
    set_place(monkeypatch, variables)
    with pytest.raises(InputError) as refused:
        Place.of_environment()
    (problem,) = refused.value.problems
    assert (problem.where, problem.what) == ("environment", told)
    assert "torchrun" in problem.fix


def set_place(monkeypatch, variables):
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("gpus", "num_workers", "num_gpus", "number"),
    [(None, None, 8, 1), (None, 4, 8, 4), ("2", 4, 8, 2), ("all", 4, 8, 8), ("3", None, 0, 3), ("1", 4, 0, 1)],
)
def test_as_many_processes_as_are_asked_for(monkeypatch, gpus, num_workers, num_gpus, number):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert num_processes(gpus, num_workers) == number


@pytest.mark.parametrize(
    ("gpus", "num_workers", "num_gpus", "where"),
    [
        ("9", None, 8, "--gpus"),
        (None, 9, 8, "backend.trainer.num_workers"),
        ("all", None, 0, "--gpus all"),
        ("99999", None, 0, "--gpus"),
        ("0", None, 8, "command line"),
        ("two", None, 8, "command line"),
    ],
)
def test_gpus_that_are_not_there_are_refused(monkeypatch, gpus, num_workers, num_gpus, where):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    with pytest.raises(InputError) as refused:
        num_processes(gpus, num_workers)
    assert [problem.where for problem in refused.value.problems] == [where]


def test_a_process_that_does_not_see_its_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    place = Place(rank=1, local_rank=1, world_size=2, local_world_size=2, is_launched=True)
    with pytest.raises(InputError, match="LOCAL_RANK is 1, but this process sees 1 GPU"), joined(place):
        pass
