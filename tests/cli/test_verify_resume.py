"""`brim verify-resume`: its table, its JSON and its exit codes. What is tried stands in tests/api."""

import json
import os
import signal
from dataclasses import replace

import pytest
from tests.api.hand_made_proof import DIFFERENCE, PROOF, differing

from brim.cli.studies import _ends_as_ctrl_c
from brim.workflows.verify_resume.comparison import Promise

BROKEN = differing(PROOF, "optimizer")


@pytest.fixture
def told(monkeypatch):
    """told(proof): what the command is answered; the list of what it asked for."""
    asked = []

    def answer(proof):
        monkeypatch.setattr(
            "brim.workflows.verify_resume.run.verify_resume", lambda *a, **k: asked.append((a, k)) or proof
        )
        return asked

    return answer


def test_a_promise_that_is_kept_is_a_table_and_exit_code_0(brim, tmp_path, told):
    asked = told(PROOF)
    done = brim("verify-resume", tmp_path, "memory.budget=1GiB", "--steps", 4, "--from-step", 10, "--keep")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(
        "steps 11 to 14 of results/demo, from the checkpoint of step 10; cpu, fp32\n"
        "rows of a step: 4 (2 steps), then 8 (2 steps)\n"
        "disturbed: stopped by Ctrl-C after step 12, continued, killed by SIGKILL in step\n"
        "13 between its micro-batches, continued\n"
        "\n"
        "                compared    promised  found\n"
        "rows            4 steps     equal     equal\n"
    )
    assert done.out.endswith(
        "counters        141 values  equal     equal\n"
        "\n"
        "the run's own log has the same figures for 4 of these steps\n"
        "the interruption changed nothing, to the bit (12.0 s)\n"
    )
    (arguments, options) = asked[0]
    assert arguments == (tmp_path,)
    assert options == {
        "steps": 4, "from_step": 10, "dataset": None, "overrides": ["memory.budget=1GiB"], "keep": True
    }  # fmt: skip


def test_a_promise_that_is_broken_names_what_differs_and_is_exit_code_1(brim, tmp_path, told):
    told(BROKEN)
    done = brim("verify-resume", tmp_path)
    assert done.code == 1
    assert "optimizer       24 tensors  equal     differs by 0.5\n" in done.out
    assert " ".join(done.out.split()).endswith(
        "optimizer: first at 0.exp_avg[7]: 0.25 without a break, 0 with; 1,200 values differ; at most by 0.5 the run's own log has the same figures for 4 of these steps the interruption changed what it must "
        "not: optimizer (12.0 s)"
    )


def test_what_is_not_promised_may_differ(brim, tmp_path, told):
    why = "on a GPU, not on a CPU"
    close = Promise(states="open", figures="close", loss_tolerance=1e-5, same_cut=True, why=why)
    near = replace(DIFFERENCE, relative=1e-6)
    proof = differing(replace(PROOF, promise=close), "losses", promise="close", tolerance=1e-5, difference=near)
    told(differing(proof, "optimizer", promise="open"))
    done = brim("verify-resume", tmp_path)
    assert done.code == 0
    assert "losses          4 steps     within 1e-05  differs by 1e-06 of its size\n" in done.out
    assert "optimizer       24 tensors  nothing       differs by 0.5 " in done.out
    assert f"the interruption changed nothing that is promised (12.0 s): {why}" in " ".join(done.out.split())
    assert not differing(proof, "losses", promise="close", tolerance=1e-7, difference=near).holds


def test_json_has_the_whole_proof_and_null_for_infinity(brim, tmp_path, told):
    told(BROKEN)
    done = brim("verify-resume", tmp_path, "--json")
    assert done.code == 1
    proof = json.loads(done.out)
    assert (proof["holds"], proof["run"], proof["folder"]) == (False, "results/demo", None)
    assert proof["effective_batch_sizes"] == [4, 4, 8, 8]
    (wrong,) = (check for check in proof["checks"] if not check["holds"])
    assert wrong["name"] == "optimizer"
    assert wrong["difference"] == {
        "where": "0.exp_avg[7]", "undisturbed": "0.25", "disturbed": "0", "num": 1_200, "max_abs": 0.5, "relative": None
    }  # fmt: skip


def test_what_is_no_run_and_what_has_one_step_is_exit_code_2(brim, project, finished_run, digests):
    before = digests(project, finished_run)
    done = brim("verify-resume", "nope")
    assert (done.code, done.err.splitlines()[0]) == (2, "brim: no such file or folder: nope")
    done = brim("verify-resume", "config.yaml")
    assert (done.code, done.err.splitlines()[0]) == (2, "brim: config.yaml: this is not the folder of a run")
    done = brim("verify-resume", finished_run)
    assert (done.code, done.err.splitlines()[0]) == (2, "brim: no step is left after step 1: the run has 1")
    assert digests(project, finished_run) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_as_by_ctrl_c_and_not_where_that_is_ignored(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), _ends_as_ctrl_c():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    signal.signal(number, signal.SIG_IGN)
    try:
        with _ends_as_ctrl_c():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
