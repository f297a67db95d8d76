"""The recipes for several machines: scripts and files parse, and say to torchrun and to brim what these understand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from torch.distributed.run import get_args_parser
from typer.main import get_command

from brim.cli.app import app_of

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SCHEMAS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("cluster_schemas.yaml"))
SCRIPTS = ["one-node.sh", "two-nodes.sh", "slurm.sbatch"]
FILES = {"trainjob.yaml": "trainjob", "skypilot.yaml": "skypilot"}
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "boolean": (bool,), "integer or string": (int, str),
}  # fmt: skip


def loaded(name: str) -> Any:
    return YAML(typ="safe", pure=True).load(FOLDER / name)


def problems(value: Any, schema: Any, place: str = "") -> Iterator[str]:
    """Yield where a value departs from a schema of `cluster_schemas.yaml`."""
    if isinstance(schema, str):
        right = value == schema[1:] if schema.startswith("=") else type(value) in TYPES[schema]
        yield from () if right else (f"{place}: {value!r} is not {schema}",)
    elif isinstance(schema, list):
        for index, each in enumerate(value if isinstance(value, list) else [f"{place} is no list"]):
            yield from problems(each, schema[0], f"{place}[{index}]")
    elif not isinstance(value, dict):
        yield f"{place}: {value!r} is no mapping"
    else:
        keys = {key.rstrip("!"): inner for key, inner in schema.items()}
        yield from (f"{place}: no {key[:-1]}" for key in schema if key.endswith("!") and key[:-1] not in value)
        for key, inner in value.items():
            if key in keys or "*" in keys:
                yield from problems(inner, keys.get(key, keys.get("*")), f"{place}.{key}")
            else:
                yield f"{place}: {key} is unknown"


def command(name: str) -> list[str]:
    """Return the one command of a recipe that trains, as the shell hands it over, but for its variables."""
    if name == "trainjob.yaml":
        given: list[str] = loaded(name)["spec"]["trainer"]["command"]
        return given
    text = loaded(name)["run"] if name == "skypilot.yaml" else (FOLDER / name).read_text(encoding="utf-8")
    (line,) = re.findall(
        r"^(?!#).*\b((?:torchrun|brim train) .*?)(?:; then)?$", text.replace("\\\n", " "), re.MULTILINE
    )
    return shlex.split(re.sub(r"\$\w+", "1", line))


@pytest.mark.parametrize(("name", "schema"), FILES.items())
def test_a_file_has_what_its_program_reads_and_no_other_key(name, schema):
    given = loaded(name)
    assert list(problems(given, SCHEMAS[schema])) == []
    given["nodes"] = 2
    assert list(problems(given, SCHEMAS[schema])) == [": nodes is unknown"]
    if schema == "trainjob":
        given["spec"]["trainer"]["numNodes"] = "2"
        assert ".spec.trainer.numNodes: '2' is not integer" in problems(given, SCHEMAS[schema])
        del given["kind"]
        assert ": no kind" in problems(given, SCHEMAS[schema])


@pytest.mark.process
def test_scripts_are_bash():
    """With those in a file, and each shell's own mistake is found."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS]
    texts += [loaded("skypilot.yaml")[key] for key in ("setup", "run")]
    wrong = [
        subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr for text in [*texts, "if"]
    ]
    assert wrong[:-1] == [""] * len(texts)
    assert wrong[-1]
    directives = re.findall(r"^#SBATCH (.*)$", texts[2], re.MULTILINE)
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", each) for each in directives)
    assert texts[2].index("#SBATCH " + directives[-1]) < texts[2].index("set -euo")  # Slurm stops at the first command


@pytest.mark.parametrize("name", [*SCRIPTS, *FILES])
def test_what_is_started_goes_on_from_shared_storage(name):
    arguments = command(name)
    if arguments[0] == "torchrun":
        asked = get_args_parser().parse_args(arguments[1:])
        assert (asked.module, asked.training_script) == (True, "brim")
        arguments = ["brim", *asked.training_script_args]
    train = get_command(app_of(["train", "plan"])).commands["train"]
    asked = train.make_context("train", arguments[2:]).params
    assert (arguments[1], asked["resume"], asked["output_directory"]) == ("train", True, Path("/shared/runs/demo"))
    assert asked["gpus"] == ("all" if name == "one-node.sh" else None)  # torchrun says how many


def test_the_page_shows_every_recipe():
    page = (FOLDER.parents[1] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\.\./examples/cluster/([\w.-]+)", page)) == sorted(
        path.name for path in FOLDER.iterdir()
    )
