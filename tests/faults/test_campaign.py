"""The campaign in its short form, which is the campaign itself with a few trials of each row; and what it is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.campaign import Plan, judge
from faults.cases import Case, Skip, trials
from faults.catalogue import CATALOGUE
from faults.disk import lost_from
from faults.forked import Brim
from faults.order import renames
from faults.report import Counts, counted
from faults.shim import Operation, build_shim, read_log, watch
from faults.subject import digests, saved_step

from faults import Settings, Trial

MAY_BE_SKIPPED = {  # where there is no C compiler, or no right to mount; torchrun takes minutes
    "kill-after", "kill-amid", "kill-again", "kill-anew", "kill-predict", "order", "disk-full", "damage-newest", "damage-both",
    "damage-manifest", "damage-run", "damage-model", "ranks-first", "torchrun",
}  # fmt: skip


# Each trial of the others is made in this process: tests/faults/test_bad_input.py, tests/data/test_bad_rows.py.
IN_PROCESSES = (  # forked from one, slow to start
    "kill", "ranks", "members", "torchrun", "nonfinite", "disk", "damage", "inputs", "hostile", "token",
)  # fmt: skip


def test_each_fault_is_tried():
    assert {fault.name for fault in CATALOGUE} == {"mistakes", "rows", *IN_PROCESSES}


@pytest.mark.process
def test_brim_keeps_its_promises_in_every_row_of_the_table():
    trials = [trial for _, trial in judge(Plan(names=IN_PROCESSES, short=True, seed=0))]
    assert [trial for trial in trials if trial.outcome == "failed"] == []
    assert {trial.row for trial in trials} == {
        row.name for fault in CATALOGUE if fault.name in IN_PROCESSES for row in fault.rows
    }
    assert {trial.row for trial in trials if trial.outcome == "skipped"} <= MAY_BE_SKIPPED


def test_what_was_wrong_is_a_failure_and_what_cannot_be_tried_is_skipped():
    def skip():
        raise Skip("no compiler")

    judges = {"a": lambda: "", "b": lambda: "lost", "c": skip}
    cases = [Case(row="r", name=name, judge=judge) for name, judge in judges.items()]
    assert list(trials(cases, Settings(folder=Path(), brim=Brim(), short=False, seed=0))) == [
        Trial(row="r", case="a", outcome="passed"),
        Trial(row="r", case="b", outcome="failed", why="lost"),
        Trial(row="r", case="c", outcome="skipped", why="no compiler"),
    ]


# What the judges see of a run's folder


def make_run(folder, *steps):
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(str(step))
    return folder


def logged(*steps):
    return "".join(json.dumps({"step": step, "event": "checkpoint"}) + "\n" for step in steps)


def test_the_last_saved_step_is_known_by_names_and_by_the_log(tmp_path):
    for number, (shown, log, saved) in enumerate(
        [
            ((), "", 0),
            ((2, 4), logged(2), 4),
            ((2,), logged(2, 4), 4),  # a checkpoint that is gone was saved all the same
            ((2,), logged(2) + logged(4)[:-4], 2),
        ]
    ):
        run = make_run(tmp_path / str(number), *shown)
        run.mkdir(exist_ok=True)
        (run / "metrics.jsonl").write_text(log)
        assert saved_step(run) == saved


def test_a_checkpoint_is_lost_unless_a_newer_one_is_there(tmp_path):
    before = digests(make_run(tmp_path / "before", 2, 4))
    assert lost_from(before, make_run(tmp_path / "same", 2, 4)) == ""
    assert lost_from(before, make_run(tmp_path / "newer", 4, 6)) == ""
    assert lost_from(before, make_run(tmp_path / "fewer", 4)) == "lost: checkpoints/step-00000002/state.json"
    changed = make_run(tmp_path / "changed", 2, 4, 6)
    (changed / "checkpoints" / "step-00000004" / "state.json").write_text("5")
    assert lost_from(before, changed) == "lost: checkpoints/step-00000004/state.json"


# The judge of the order of writes, on logs of a few lines


def operations(*lines):
    """name path [new path]"""
    split = [(*line.split(), None)[:3] for line in lines]
    return [
        Operation(number=number, name=name, num_bytes=9, path=path, new_path=new)
        for number, (name, path, new) in enumerate(split, start=1)
    ]


WRITE = ["create .a.tmp", "write .a.tmp"]
FOLDER = ["mkdir checkpoints/.s.tmp", "write checkpoints/.s.tmp/f", "fsync checkpoints/.s.tmp/f"]
SHOW = ["rename checkpoints/.s.tmp checkpoints/s", "fsync checkpoints"]
NEXT = [line.replace("/s", "/t").replace("/.s", "/.t") for line in (*FOLDER, *SHOW)]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([*WRITE, "fsync .a.tmp", "rename .a.tmp a", "fsync ."], ""),
        ([*WRITE, "rename .a.tmp a", "fsync ."], ".a.tmp was not synced"),
        ([*WRITE, "fsync .a.tmp", "write .a.tmp", "rename .a.tmp a", "fsync ."], ".a.tmp was not synced"),
        ([*WRITE, "fsync .a.tmp", "rename .a.tmp a"], ". was not synced"),
        ([*WRITE, "fsync .a.tmp", "rename .a.tmp a", "unlink b", "fsync ."], "unlink of b before . was synced"),
        (["fsync metrics.jsonl", *FOLDER, "write metrics.jsonl", *SHOW], ""),
        ([*FOLDER, "fsync metrics.jsonl", *SHOW], "metrics.jsonl was not synced"),
        (["fsync metrics.jsonl", *FOLDER, *SHOW, *NEXT], "metrics.jsonl was not synced"),
        (["fsync metrics.jsonl", *FOLDER, SHOW[0], "write metrics.jsonl", SHOW[1]], ""),
        (["fsync metrics.jsonl", *FOLDER, SHOW[0], "unlink a", SHOW[1]], "unlink of a before checkpoints was synced"),
        (["fsync metrics.jsonl", *FOLDER, "write checkpoints/.s.tmp/g", *SHOW], "checkpoints/.s.tmp/g was not synced"),
    ],
)
def test_a_name_is_shown_between_two_syncs(lines, wrong):
    *_, (_, found) = renames(operations(*lines))
    assert found == wrong


def test_a_temporary_file_whose_rename_was_not_seen_counts_as_the_file_that_was_synced_after_it():
    lines = ["fsync metrics.jsonl", "write checkpoints/.s.tmp/.tmpAbc", "fsync checkpoints/.s.tmp/m.safetensors", *SHOW]
    assert list(renames(operations(*lines))) == [("checkpoints/s", "")]
    ((_, wrong),) = renames(operations(lines[0], lines[2], lines[1], *lines[3:]))
    assert wrong == "checkpoints/.s.tmp/.tmpAbc was not synced"


# The library that sees and ends what a process writes

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
    def work(name, **how):
        folder = tmp_path / name
        folder.mkdir()
        environment = {**os.environ, "LD_PRELOAD": str(library), **watch(folder / "run", **how)}
        done = subprocess.run([sys.executable, "-S", "-c", WORK], cwd=folder, env=environment, check=False)
        return done.returncode, folder / "run"

    return work


@pytest.mark.process
def test_every_operation_below_the_folder_is_written_down(work, tmp_path):
    code, run = work("whole", log=tmp_path / "log")
    assert code == 0
    found = read_log(tmp_path / "log", run)
    assert [(each.name, each.path, each.new_path) for each in found] == OPERATIONS
    assert [each.number for each in found] == list(range(1, 10))
    assert [each.number for each in found if each.is_tearable] == [3]


@pytest.mark.process
def test_a_process_is_killed_once_the_operation_is_done_or_half_of_the_bytes_are_written(work):
    for number, left in [
        (1, []), (2, ["a"]), (4, ["a"]), (5, ["b"]), (7, ["b", "d", "d/e"]), (8, ["b", "d"]), (9, ["b"]),
    ]:  # fmt: skip
        code, run = work(str(number), kill_after=number)
        assert code == -9
        assert sorted(path.relative_to(run).as_posix() for path in run.rglob("*")) == left
    code, run = work("amid", kill_amid=3)
    assert (code, (run / "a").read_text()) == (-9, "01234")


# Counts of trials; the table made of them stands in docs/reliability.md

TRIALS = [
    Trial(row="kill-random", case="at 0.1", outcome="passed"),
    Trial(row="kill-random", case="at 0.2", outcome="failed", why="model differs"),
    Trial(row="disk-full", case="small", outcome="skipped", why="no mount"),
    Trial(row="disk-full", case="large", outcome="skipped", why="no mount"),
]


def test_trials_are_counted_by_row_and_failures_are_kept():
    assert counted(("x", trial) for trial in TRIALS) == {
        "kill-random": Counts(passed=1, failed=1, told=("failed: at 0.2: model differs",)),
        "disk-full": Counts(skipped=2, told=("skipped: no mount",)),
    }
