"""`brim compare` and `brim verify-resume`: tables, JSON and exit codes. What they do stands in tests/workflows."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hand_made_proof import DIFFERENCE, PROOF, differing
from tests.report.hand_made_runs import comparison_of_two_by_three

from brim.workflows.compare.results import ComparedRun
from brim.workflows.verify_resume.comparison import Promise

# compare


@pytest.fixture
def compared(monkeypatch):
    """What `brim.compare` was asked for, and gives: a list of its arguments, and of results to give."""

    class Stand:
        def __init__(self):
            self.asked = []
            self.failed = ()

        def __call__(self, files, **options):
            self.asked.append((files, options))
            return comparison_of_two_by_three(more=self.failed)

    stand = Stand()
    monkeypatch.setattr("brim.workflows.compare.run.compare", stand)
    return stand


def test_configurations_and_overrides_in_any_order(brim, compared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r=8.yaml").touch()
    command = ("compare", "a.yaml", "x=1", "r=8.yaml", "y.z=[1, 2]", "--seeds", 5, "--dataset", "d.csv", "--resume")
    command = (*command, "--gpus", 2)
    assert brim(*command, "--output-directory", "out").code == 0
    ((files, options),) = compared.asked
    assert files == ["a.yaml", "r=8.yaml"]
    assert options["overrides"] == ["x=1", "y.z=[1, 2]", "backend.trainer.num_workers=2"]
    assert (options["seeds"], options["dataset"], options["resume"]) == (5, ["d.csv"], True)
    assert options["output_directory"] == Path("out")


def test_tables_markdown_and_json(brim, compared, golden):
    done = brim("compare", "a.yaml", "b.yaml")
    assert (done.code, done.err, compared.asked[0][1]["seeds"]) == (0, "", 3)
    golden("cli/compare.txt", done.out)
    done = brim("compare", "a.yaml", "b.yaml", "--markdown")
    assert "| b | 1.9010 ± 0.2509 | -0.1990 ± 0.0025 | lower |" in done.out.splitlines()
    told = json.loads(brim("compare", "a.yaml", "b.yaml", "--json").out)
    assert told["summaries"][1]["differences"]["validation"]["says"] == "lower"
    assert "train_curve" not in told["runs"][0]["figures"]


def test_a_failed_run_is_exit_code_1_and_the_tables_are_there(brim, compared):
    compared.failed = (ComparedRun(name="b", seed=3, outcome="failed", figures=None, rows={}, error="it broke\nfix"),)
    done = brim("compare", "a.yaml", "b.yaml")
    assert (done.code, "1.9010" in done.out, "- b, seed 3, failed: it broke\n" in done.out) == (1, True, True)


# verify-resume


@pytest.fixture
def told(monkeypatch):
    """told(proof): what the command is answered; the list of what it asked for."""
    asked = []

    def answer(proof):
        verify = "brim.workflows.verify_resume.run.verify_resume"
        monkeypatch.setattr(verify, lambda *a, **k: asked.append((a, k)) or proof)
        return asked

    return answer


def test_a_promise_that_is_kept_is_a_table_and_exit_code_0(brim, tmp_path, told, golden):
    asked = told(PROOF)
    command = ("verify-resume", tmp_path, "memory.budget=1GiB", "--steps", 4, "--from-step", 10, "--keep")
    done = brim(*command)
    assert (done.code, done.err) == (0, "")
    golden("cli/verify_resume.txt", done.out)
    (arguments, options) = asked[0]
    assert arguments == (tmp_path,)
    assert options == {
        "steps": 4, "from_step": 10, "dataset": None, "overrides": ["memory.budget=1GiB"], "keep": True
    }  # fmt: skip
    told(replace(PROOF, num_processes=2))
    assert "; cpu, 2 processes, fp32" in " ".join(brim(*command, "--gpus", 2).out.split())


def test_a_promise_that_is_broken_names_what_differs_and_is_exit_code_1(brim, tmp_path, told, golden):
    told(differing(PROOF, "optimizer"))
    golden("cli/verify_resume_that_differs.txt", brim("verify-resume", tmp_path, code=1).out)
    proof = json.loads(brim("verify-resume", tmp_path, "--json", code=1).out)
    assert (proof["holds"], proof["run"], proof["folder"]) == (False, "results/demo", None)
    assert proof["effective_batch_sizes"] == [4, 4, 8, 8]
    (wrong,) = (check for check in proof["checks"] if not check["holds"])
    assert wrong["name"] == "optimizer"
    assert wrong["difference"] == {
        "where": "0.exp_avg[7]", "undisturbed": "0.25", "disturbed": "0", "num": 1_200, "max_abs": 0.5, "relative": None
    }  # fmt: skip


def test_what_is_not_promised_may_differ(brim, tmp_path, told, golden):
    why = "on a GPU, not on a CPU"
    close = Promise(states="open", figures="close", loss_tolerance=1e-5, same_cut=True, why=why)
    near = replace(DIFFERENCE, relative=1e-6)
    proof = differing(replace(PROOF, promise=close), "losses", promise="close", tolerance=1e-5, difference=near)
    told(differing(proof, "optimizer", promise="open"))
    golden("cli/verify_resume_without_a_promise.txt", brim("verify-resume", tmp_path, code=0).out)
    assert not differing(proof, "losses", promise="close", tolerance=1e-7, difference=near).holds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_as_by_ctrl_c_and_not_where_that_is_ignored(brim, tmp_path, monkeypatch, number):
    def ended(*arguments, **options):
        os.kill(os.getpid(), number)
        return PROOF

    monkeypatch.setattr("brim.workflows.verify_resume.run.verify_resume", ended)
    before = signal.getsignal(number)
    assert brim("verify-resume", tmp_path).code == 130
    assert signal.getsignal(number) == before
    signal.signal(number, signal.SIG_IGN)
    try:
        assert brim("verify-resume", tmp_path).code == 0
    finally:
        signal.signal(number, before)
