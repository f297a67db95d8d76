"""brim.verify_resume: on runs of a tiny model, in forked processes; what was corrupted must be seen."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from types import SimpleNamespace

import pandas as pd
import pytest

import brim
from brim.cli import main
from brim.workflows.verify_resume import leg as resume_leg, leg as resume_process
from brim.workflows.verify_resume.leg import Leg
from brim.workflows.verify_resume.run import Trial

NUM_STEPS = 12
# 28 rows: four steps of 4, then steps of 8, of which the last of an epoch takes what is left.
SCHEDULE = "0sp:4 16sp:8"


@pytest.fixture(scope="module")
def settings(tiny_base):
    return {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.1},
        "preprocessing": {"split": "fixed"},
        "trainer": {
            "type": "finetune",
            "train_steps": NUM_STEPS,
            "batch_size": 2,
            "effective_batch_size": 8,
            "batch_schedule": SCHEDULE,
            "learning_rate": 0.05,
            "steps_per_checkpoint": 3,
            "early_stop": 1,
        },
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "sums.csv"
    lines = [f"add {n % 7} and {n % 11} =,{n % 7 + n % 11},{0 if n % 10 < 7 else 1}" for n in range(40)]
    path.write_text("question,answer,split\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("dataset", ["none.csv", None], ids=["missing", "none given"])
def test_without_its_data_nothing_is_begun(settings, rows, tmp_path, monkeypatch, dataset):
    run = tmp_path / "run"
    brim.Model(settings).train(pd.read_csv(rows), output_directory=run, say=None)
    monkeypatch.setattr("brim.workflows.verify_resume.run.Trial", None)
    with pytest.raises(brim.BrimError, match="no such file: none.csv" if dataset else "there is no data set"):
        brim.verify_resume(run, dataset=dataset, say=None)


@pytest.fixture(scope="module")
def whole(settings, rows, tmp_path_factory):
    """A finished run. Never written to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    brim.Model(settings).train(rows, output_directory=run)
    return run


@pytest.fixture
def forked(monkeypatch):
    """Processes are forked from this one, which has the libraries. What a test changes holds in them, too."""

    def start(leg):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads, which do nothing here
            child = os.fork()
        if child == 0:
            code = 1
            try:
                sys.stdout = sys.stderr = leg.log.open("w")
                resume_process.main(str(leg.order))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    monkeypatch.setattr(resume_leg, "start", start)


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    """Where the copies go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def digests(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def names_of(proof):
    return [check.name for check in proof.checks if not check.holds]


def test_a_run_is_the_same_over_a_switch_of_its_batch_size_and_is_only_read(whole, temporary, forked):
    before, told = digests(whole), []
    proof = brim.verify_resume(whole, say=told.append)
    assert (proof.holds, [check.difference for check in proof.checks]) == (True, [None] * len(proof.checks))
    assert (proof.device, proof.precision, proof.promise.states) == ("cpu", "fp32", "bits")
    # The checkpoints are those of steps 9 and 12, of 12: neither leaves four steps.
    assert (proof.checkpoint_step, proof.start_step, proof.num_steps) == (0, 1, 4)
    assert proof.effective_batch_sizes == (4, 4, 4, 8)
    assert (proof.stopped_after, proof.killed_in, proof.killed_where) == (4, 5, "between its micro-batches")
    compared = {check.name: check.compared for check in proof.checks}
    assert compared.keys() >= {
        *("rows", "batch sizes", "micro-batches", "learning rates", "losses", "evaluations"),
        *("weights", "optimizer", "random states", "counters"),
    }
    assert compared["losses"] == "4 steps"
    assert compared["weights"] == "8 tensors"  # A and B of q_proj and v_proj in two layers
    assert compared["optimizer"] == "24 tensors"  # two moments and a count of each
    assert proof.own_log == "has the same figures for 4 of these steps"
    assert "(Ctrl-C) after step 4" in told[4]
    assert digests(whole) == before
    assert list(temporary.iterdir()) == []


def test_a_resumption_that_forgets_something_is_found_out(whole, temporary, forked, monkeypatch, capfd):
    monkeypatch.setattr("brim.train.loop.restore_optimizer", lambda *arguments: None)
    monkeypatch.setattr("brim.train.loop.restore_random_states", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", ["brim", "verify-resume", str(whole), "--from-step=9", "--steps=2", "--json"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 1
    proof = json.loads(capfd.readouterr().out)
    assert proof["holds"] is False
    wrong = {check["name"]: check["difference"] for check in proof["checks"] if not check["holds"]}
    assert wrong.keys() >= {"optimizer", "random states", "weights", "losses"}
    assert wrong.keys().isdisjoint({"rows", "batch sizes", "micro-batches", "learning rates"})
    assert wrong["losses"]["where"] == "step 11"  # the one after the stop, with other dropout
    assert ".exp_avg" in wrong["optimizer"]["where"]
    assert "cpu" in wrong["random states"]["where"]
    assert wrong["weights"]["max_abs"] > 0
    assert list(temporary.iterdir()) == []


@pytest.fixture
def copy(whole, tmp_path):
    """A run that may be spoilt."""
    return shutil.copytree(whole, tmp_path / "run")


def flip(run, step):
    file = run / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_none_that_is_whole_is_an_error(copy, monkeypatch):
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    starts, told = [], []
    monkeypatch.setattr(Trial, "proof", lambda trial: starts.append(trial._start) or stop())
    with pytest.raises(KeyboardInterrupt):
        brim.verify_resume(copy, steps=3)
    flip(copy, 9)
    with pytest.raises(KeyboardInterrupt):
        brim.verify_resume(copy, steps=3, say=told.append)
    assert [(start.checkpoint, start.step) for start in starts] == [(9, 9), (0, 1)]
    assert told[0] == "the checkpoint of step 9 is damaged, and is passed over"
    flip(copy, 12)
    with pytest.raises(brim.CheckpointError, match="no whole checkpoint is left: those of steps 9, 12 are damaged"):
        brim.verify_resume(copy, steps=3)


def stop(*arguments):
    raise KeyboardInterrupt


def test_ctrl_c_leaves_no_folder_behind_unless_it_is_to_be_kept(whole, temporary, monkeypatch):
    monkeypatch.setattr(resume_leg, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        brim.verify_resume(whole)
    assert list(temporary.iterdir()) == []
    told = []
    with pytest.raises(KeyboardInterrupt):
        brim.verify_resume(whole, keep=True, say=told.append)
    (kept,) = temporary.iterdir()
    assert told[-1] == f"both runs, and what their processes said, are kept in {kept}"


def test_ctrl_c_ends_the_process_that_trains(monkeypatch, tmp_path):
    script = "import os, signal, sys, time; sys.stdin.readline(); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    monkeypatch.setattr(resume_leg, "COMMAND", [sys.executable, "-c", script])
    started = []

    class Interrupting(subprocess.Popen):
        """Lets the process go on, and so interrupt this one, only once it is waited for."""

        def wait(self, timeout=None):
            if self not in started:
                started.append(self)
                self.stdin.write(b"\n")
                self.stdin.flush()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        resume_leg.start(leg_in(tmp_path, config="none.yaml"))
    assert started[0].poll() == -signal.SIGKILL


def test_a_process_does_not_outlive_the_one_that_started_it(monkeypatch, tmp_path):
    """That one is killed, and cannot end it."""
    script = resume_leg.COMMAND[2].rpartition("from brim.workflows.verify_resume.leg")[0]
    waits = f"{script}\nimport time\nprint('ready', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen(
        [*resume_leg.COMMAND[:2], waits, resume_leg.COMMAND[3]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.communicate(timeout=60)  # closes its stdin
    assert process.returncode == -signal.SIGKILL


def leg_in(folder, **changes):
    told = folder / "told"
    told.mkdir(exist_ok=True)
    return Leg(
        **{"config": "", "overrides": (), "dataset": None, "run": "", "told": str(told), "stop_after": 1, **changes}
    )


def test_a_real_process_hands_its_error_on(tmp_path):
    (tmp_path / "config.yaml").write_text("base_modle: x\n")
    leg = leg_in(tmp_path, config=str(tmp_path / "config.yaml"), told=str(tmp_path / "process-1"))
    with pytest.raises(brim.ConfigError, match=r"config.yaml:1: .*unknown key base_modle\n.*did you mean base_model\?"):
        resume_leg.go(leg)


def test_a_process_that_breaks_down_is_told_with_its_last_line(monkeypatch, tmp_path):
    monkeypatch.setattr(resume_leg, "COMMAND", [sys.executable, "-c", "raise SystemExit('no memory')"])
    with pytest.raises(brim.BrimError, match=r"ended by itself \(exit code 1\): no memory") as raised:
        resume_leg.go(leg_in(tmp_path, told=str(tmp_path / "process-1")))
    assert raised.value.exit_code == 1


def test_a_folder_in_which_a_process_trains_is_refused(whole):
    descriptor = os.open(whole, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(brim.InputError, match="a process is training in this folder"):
            brim.verify_resume(whole)
    finally:
        os.close(descriptor)


def test_too_little_room_is_told_beforehand(whole, temporary, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(brim.OutputError, match="1000 B left") as raised:
        brim.verify_resume(whole)
    assert raised.value.exit_code == 2
    assert list(temporary.iterdir()) == []


def spoilt(name, content):
    return lambda run: (run / name).write_text(content)


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (shutil.rmtree, {}, "this is not the folder of a run"),
        (lambda run: (run / "config.yaml").unlink(), {}, "this folder is not a run"),
        (spoilt("plan.json", "{"), {}, "what the run's plan says of its length cannot be read"),
        (spoilt("config.yaml", "base_model: x\ntrust_remote_code: true\n"), {}, "trust_remote_code is true"),
        (spoilt("config.yaml", "base_model: x\ntrainer: {type: none}\n"), {}, "nothing can be interrupted"),
        (str, {"steps": 0}, "--steps: 0 is no number of steps"),
        (str, {"from_step": -1}, "--from-step: -1 is no number of steps"),
        (str, {"from_step": NUM_STEPS}, f"no step is left after step {NUM_STEPS}"),
    ],
)
def test_what_the_user_got_wrong_is_said_before_a_process_starts(copy, monkeypatch, spoil, options, message):
    monkeypatch.setattr(resume_leg, "start", None)
    spoil(copy)
    with pytest.raises(brim.InputError, match=message):
        brim.verify_resume(copy, **options)


def test_other_rows_are_refused_also_where_the_run_begins_anew(whole, rows, forked, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text(rows.read_text().replace("add 1", "sub 1"))
    with pytest.raises(brim.OutputError, match=r"rows are not those that this run was started with") as raised:
        brim.verify_resume(whole, steps=1, from_step=1, dataset=other)
    assert raised.value.problems[0].where == str(whole)
