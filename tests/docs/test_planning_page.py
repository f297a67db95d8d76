"""docs/planning.md: its configuration is valid, and what it names exists."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from pathlib import Path

from ruamel.yaml import YAML
from tests.planning.hand_made import plan_that_moves
from typer.testing import CliRunner

from brim.batching import Search
from brim.batching.microbatch import FIRST_WAIT_STEPS
from brim.cli.app import app
from brim.config import load_config
from brim.planning import TrainingPlan
from brim.report import plan_table

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


def test_the_configuration_is_valid_and_of_defaults_but_for_the_batch():
    written = YAML(typ="safe").load(block("yaml"))
    config = load_config({"base_model": "base", **written}).config
    trainer = {"type": "finetune", "effective_batch_size": 32, "max_batch_size": 64}
    assert config == load_config({"base_model": "base", "trainer": trainer}).config


def test_each_search_is_named():
    named = re.search(r"batch_search: (\w+) +# or (.*)", PAGE)
    assert named is not None
    assert {named[1], *named[2].split(", ")} == set(Search.__args__)


def test_the_commands_have_these_options():
    shown = CliRunner().invoke(app, ["plan", "--help"]).output
    assert set(re.findall(r"--[a-z]+", block(""))) <= set(re.findall(r"--[a-z]+", shown))


def test_the_columns_are_those_of_the_tables():
    from rich.console import Console

    printed = io.StringIO()
    Console(width=80, file=printed).print(plan_table(plan_that_moves(), title="m"))
    tables = re.findall(r"\| column \| what it is \|\n\| --- \| --- \|\n((?:\|.*\n)+)", PAGE)
    for first, begin, table in (("checkpointing", 2, tables[0]), ("phase", 0, tables[1])):
        header = next(line for line in printed.getvalue().splitlines() if line.startswith(first))
        named = ", ".join(re.findall(r"^\| ([^|]+) \|", table, flags=re.MULTILINE))
        assert re.split(r" {2,}", header.strip())[begin:] == named.split(", ")
    assert len(tables) == 2


def test_the_fields_of_a_plan_exist():
    (named,) = re.findall(r"^\| `plan` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", named)) <= {field.name for field in fields(TrainingPlan)}
    assert json.dumps(plan_that_moves().as_dict())


def test_the_figures_are_those_of_the_code():
    assert f"After {FIRST_WAIT_STEPS} clean steps in a row" in PAGE
