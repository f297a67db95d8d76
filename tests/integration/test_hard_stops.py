"""What cannot be caught: a kill, a full disk. In processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PATIENCE_S = 120
LIMITED = """
import resource, sys
from brim.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.argv = ["brim", *sys.argv[1:]]
main()
"""


@pytest.fixture
def config(tiny_base, sums_file, tmp_path):
    path = tmp_path / "config.yaml"
    settings = {
        "base_model": str(tiny_base),
        "dataset": str(sums_file),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": "lora",
        "preprocessing": {"split": {"type": "fixed"}},
        "trainer": {"type": "finetune", "epochs": 60, "effective_batch_size": 8, "batch_size": 4, "early_stop": -1},
    }
    YAML(typ="safe").dump(settings, path)
    return path


def brim(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from brim.cli import main; main()", *map(str, arguments)]


def records(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "peak_bytes")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if line.get("event") != "checkpoint"]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "ended before it was killed"
        metrics = run / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("learning_rate") >= step:
            return
        time.sleep(0.01)
    raise AssertionError("the run did not get there")


def test_killed_runs_go_on_to_the_bit(config, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(brim("train", config, "--output-directory", whole), env=ENVIRONMENT, check=True, capture_output=True)
    for step in (10, 101):
        process = subprocess.Popen(
            brim("train", config, "--output-directory", parts, "--resume"),
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_step(parts, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(
        brim("train", config, "--output-directory", parts, "--resume"), env=ENVIRONMENT, check=True, capture_output=True
    )
    assert b"continuing after step" in done.stdout + done.stderr
    assert records(parts) == records(whole)
    weights = "model/adapter_model.safetensors"
    assert (parts / weights).read_bytes() == (whole / weights).read_bytes()


def test_a_full_disk_is_one_message_and_the_earlier_checkpoint_stays_whole(config, tmp_path):
    run = tmp_path / "run"
    few = "trainer.train_steps=4"
    subprocess.run(
        brim("train", config, few, "--output-directory", run), env=ENVIRONMENT, check=True, capture_output=True
    )
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    size = (run / "model" / "adapter_model.safetensors").stat().st_size
    other = tmp_path / "other"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LIMITED.format(limit=size - 1),
            "train",
            str(config),
            few,
            "--output-directory",
            str(other),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the checkpoint of step 4 could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((other / "checkpoints").glob("step-*")) == []
    # The same limit where the checkpoints are there already, and the model is what no longer fits.
    import shutil

    shutil.rmtree(run / "model")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(limit=size - 1), "train", str(run), "--resume"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the model could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()} == before
