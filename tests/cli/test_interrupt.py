"""Ctrl-C, as a real signal to a real process."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brim.errors import Problem

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")

LONGEST_WAIT_S = 120
BRIM = [sys.executable, "-c", "from brim.cli import main; main()"]
# As the installed command does, with a word on stdout once a module is being loaded.
LOADING = """
import builtins
from brim.cli import main
load = builtins.__import__
def announce(name, *rest, **more):
    if name == {module!r}:
        builtins.__import__ = load
        print("loading", flush=True)
    return load(name, *rest, **more)
builtins.__import__ = announce
main()
"""


def start(command, *arguments):
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def steps(run: Path):
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if '"learning_rate"' in line]


def wait_for(condition, process):
    """Until the condition holds; the process must live that long."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_while_training_saves_a_checkpoint_and_resume_finishes(project):
    long = ("train", "config.yaml", "trainer.train_steps=16", "trainer.early_stop=-1", "--dataset", "sums.jsonl")
    run = project / "run"
    # So many steps that it cannot be done before the signal arrives.
    typed = (*long, "trainer.steps_per_checkpoint=1", "--output-directory", run)
    process = start(BRIM, *typed)
    wait_for(lambda: len(steps(run)) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST_WAIT_S)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in out + err
    stopped = max(steps(run))
    assert 2 <= stopped < 16
    assert err.endswith(
        f"brim: {run}: stopped after step {stopped}\n"
        f"  fix: continue with `{shlex.join(['brim', *map(str, typed), '--resume'])}`\n"
    )
    assert (run / "checkpoints" / f"step-{stopped:08d}" / "manifest.json").exists()
    assert not (run / "model").exists()

    done = subprocess.run(
        [*BRIM, "train", str(run), "--resume"], capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {stopped} " in done.stderr
    assert steps(run) == list(range(1, 17))
    assert (run / "model" / "adapter_model.safetensors").exists()


SCRIPT = """
import brim
overrides = ["trainer.train_steps=16", "trainer.early_stop=-1", "trainer.steps_per_checkpoint=1"]
while True:
    try:
        brim.Model("config.yaml", overrides=overrides).train("sums.jsonl", output_directory="run", resume=RESUME, say=None)
    except Exception:  # which must not swallow Ctrl-C
        raise SystemExit("swallowed")
    break
"""


def test_ctrl_c_in_a_script_is_pythons_own_and_says_how_to_go_on(project):
    script = [sys.executable, "-c"]
    process = start([*script, SCRIPT.replace("RESUME", "False")])
    wait_for(lambda: len(steps(project / "run")) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST_WAIT_S)
    stopped = max(steps(project / "run"))
    assert (process.returncode, out) == (-signal.SIGINT, ""), err  # 130 in a shell
    assert err.count("Traceback") == 1
    assert err.endswith(
        f"\nKeyboardInterrupt: run: stopped after step {stopped}\n  fix: continue with --resume, in Python with resume=True\n"
    )
    assert stopped < 16
    again = subprocess.run(
        [*script, SCRIPT.replace("RESUME", "True")], capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    assert again.returncode == 0, again.stderr
    assert steps(project / "run") == list(range(1, 17))


def test_with_json_an_interruption_is_json_too(project, brim, monkeypatch):
    from brim.train import Loop

    def stop(loop, stop):
        raise KeyboardInterrupt(Problem(what="stopped after step 3", where="run", fix="continue with --resume"))

    monkeypatch.setattr(Loop, "run", stop)
    done = brim("train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "run", "--json")
    assert done.code == 130
    assert json.loads(done.out)["error"] == {
        "kind": "KeyboardInterrupt",
        "exit_code": 130,
        "problems": [
            {
                "what": "stopped after step 3",
                "where": "run",
                "expected": "",
                "fix": "continue with `brim train config.yaml --dataset sums.jsonl --output-directory run --json "
                "--resume`",
            },
        ],
    }


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_before_training_starts_leaves_nothing_behind(project, digests, module):
    before = digests(project)
    command = [sys.executable, "-c", LOADING.format(module=module)]
    process = start(command, "train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "run")
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST_WAIT_S)
    assert (process.returncode, err) == (130, "brim: interrupted\n"), out
    assert digests(project) == before
