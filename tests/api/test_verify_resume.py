"""brim.verify_resume: on runs of a tiny model, in forked processes; what was corrupted must be seen."""

import hashlib
import json
import os
import sys
import traceback
import warnings

import pytest

import brim
from brim.api import resume_leg, resume_process, resuming
from brim.cli.main import main

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
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


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


FORGET = {
    "optimizer": ("restore_optimizer", "exp_avg"),
    "random states": ("restore_random_states", "cpu"),
}


@pytest.mark.parametrize("forgotten", FORGET)
def test_a_resumption_that_forgets_something_is_found_out(
    whole, temporary, forked, monkeypatch, capfd, tmp_path, forgotten
):
    name, tensor = FORGET[forgotten]
    monkeypatch.setattr(f"brim.train.loop.{name}", lambda *arguments: None)
    monkeypatch.setattr(
        sys, "argv", ["brim", "verify-resume", str(whole), "trainer.skip_all_evaluation=true", "--steps=2", "--json"]
    )
    monkeypatch.setattr("brim.api.resuming._MAY_CHANGE", (*resuming._MAY_CHANGE, "trainer.skip_all_evaluation"))
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 1
    proof = json.loads(capfd.readouterr().out)
    assert proof["holds"] is False
    wrong = {check["name"]: check["difference"] for check in proof["checks"] if not check["holds"]}
    assert "losses" in wrong or forgotten == "optimizer"
    assert wrong.keys() >= {forgotten, "weights"}
    assert tensor in wrong[forgotten]["where"]
    assert wrong[forgotten]["max_abs"] > 0
    assert wrong["weights"]["relative"] > 0
    assert list(temporary.iterdir()) == []
