"""`brim predict --plan`: what would run together, before anything is loaded."""

from __future__ import annotations

import json
import re

import pytest

DATA = ("--dataset", "sums.jsonl")


@pytest.fixture
def untrained(project):
    config = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(config[: config.index("trainer:")] + "trainer:\n  type: none\n")
    return project


def test_the_plan_is_tables_in_80_columns(brim, untrained, monkeypatch):
    monkeypatch.setattr("brim.models.load.load_base", None)  # nothing is loaded
    done = brim("predict", "config.yaml", *DATA, "--plan", "--device", "t4")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].endswith(": generate for 40 rows, on t4")
    assert lines[2].startswith("40 rows, ")
    assert max(map(len, lines)) <= 80
    shapes = lines[lines.index("from row  rows together  tokens    GiB") + 1]
    assert shapes.split()[:2] == ["0", "40"]
    for label, text in (
        ("memory", "14.6 GiB"),
        ("rows", "40: all rows together"),
        ("time", r"about .* \(estimated\)"),
    ):
        assert re.search(rf"^{label} +{text}", done.out, flags=re.MULTILINE)


def test_the_plan_is_json(brim, untrained):
    arguments = ("predict", "config.yaml", *DATA, "--plan", "--json")
    plan = json.loads(brim(*arguments, "trainer.batch_size=3").out)
    assert (plan["shapes"][0]["rows"], plan["fixed_rows"], plan["would_take"]) == (3, 3, 40)
    assert plan["max_new_tokens"] == 6
    assert plan["engine"] == "slots"


def test_an_estimated_time_is_not_called_a_bound(brim, untrained):
    done = brim("predict", "config.yaml", *DATA, "--plan", "--device", "t4")
    (time,) = re.findall(r"^time.*(?:\n .*)*", done.out, flags=re.MULTILINE)
    assert "at most" not in time
    assert "loading and starting" in " ".join(time.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no output is named"),
        (("--output", "out.parquet", "--device", "t4"), "--device and --memory are for --plan"),
        (("--plan", "--device", "t4", "--memory", "14GiB"), "both --device and --memory are given"),
    ],
)
def test_flags_that_go_without_each_other(brim, project, flags, message):
    done = brim("predict", "config.yaml", *DATA, *flags)
    assert done.code == 2
    assert message in done.err
