"""`brim compare`: what it prints; the comparison itself is tested in tests/api/test_compare.py."""

import json
from pathlib import Path

import pytest
from tests.report.hand_made_runs import two_by_three

from brim.workflows.compare import CompareResult
from brim.workflows.compare.results import ComparedRun


@pytest.fixture
def compared(monkeypatch):
    """What `brim.compare` was asked for, and gives: a list of its arguments, and of results to give."""

    class Stand:
        def __init__(self):
            self.asked = []
            self.failed = ()

        def __call__(self, files, **options):
            self.asked.append((files, options))
            runs = [
                ComparedRun(name=name, seed=seed, outcome="finished", figures=run, rows={}, error=None)
                for name, found in two_by_three().items()
                for seed, run in found.items()
            ]
            return CompareResult(
                output_directory=Path("out"),
                files={"a": "a.yaml", "b": "b.yaml"},
                digests={"a": "1", "b": "2"},
                seeds=(0, 1, 2),
                changes=(),
                runs=(*runs, *self.failed),
            )

    stand = Stand()
    monkeypatch.setattr("brim.workflows.compare.run.compare", stand)
    return stand


def test_configurations_and_overrides_in_any_order(brim, compared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r=8.yaml").touch()
    command = ("compare", "a.yaml", "x=1", "r=8.yaml", "y.z=[1, 2]", "--seeds", 5, "--dataset", "d.csv", "--resume")
    assert brim(*command, "--output-directory", "out").code == 0
    ((files, options),) = compared.asked
    assert files == ["a.yaml", "r=8.yaml"]
    assert options["overrides"] == ["x=1", "y.z=[1, 2]"]
    assert (options["seeds"], options["dataset"], options["resume"]) == (5, ["d.csv"], True)
    assert options["output_directory"] == Path("out")


def test_tables(brim, compared):
    done = brim("compare", "a.yaml", "b.yaml")
    assert (done.code, done.err) == (0, "")
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert lines[:4] == [
        "Final loss on the validation rows, and how it differs from that of a",
        "configuration             loss        difference  what the seeds show",
        "a              2.1000 ± 0.2484",
        "b              1.9010 ± 0.2509  -0.1990 ± 0.0025                lower",
    ]
    assert "b                 20    40  1,000–1,002  2.0 s  3.0 MiB" in lines
    assert lines[-1] == "folder: out"
    assert compared.asked[0][1]["seeds"] == 3


def test_markdown(brim, compared):
    done = brim("compare", "a.yaml", "b.yaml", "--markdown")
    assert "| b | 1.9010 ± 0.2509 | -0.1990 ± 0.0025 | lower |" in done.out.splitlines()


def test_json(brim, compared):
    done = brim("compare", "a.yaml", "b.yaml", "--json")
    told = json.loads(done.out)
    assert told["summaries"][1]["differences"]["validation"]["says"] == "lower"
    assert "train_curve" not in told["runs"][0]["figures"]


def test_a_failed_run_is_exit_code_1_and_the_tables_are_there(brim, compared):
    compared.failed = (ComparedRun(name="b", seed=3, outcome="failed", figures=None, rows={}, error="it broke\nfix"),)
    done = brim("compare", "a.yaml", "b.yaml")
    assert done.code == 1
    assert "- b, seed 3, failed: it broke\n" in done.out
    assert "1.9010" in done.out


def test_no_seeds_are_the_users_mistake(brim):
    assert brim("compare", "a.yaml", "b.yaml", "--seeds", 0).code == 2


def test_one_configuration_is_the_users_mistake(brim, project):
    done = brim("compare", "config.yaml")
    assert done.code == 2
    assert done.err == (
        "brim: there is nothing to compare: one configuration\n"
        "  expected: two or more configurations\n"
        "  fix: name another one; one alone is trained by `brim train`\n"
    )
