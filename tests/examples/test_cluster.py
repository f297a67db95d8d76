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
FILES = ["trainjob.yaml", "jobset.yaml", "rayjob.yaml", "skypilot.yaml"]
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "boolean": (bool,), "integer or string": (int, str),
}  # fmt: skip


def loaded(name: str) -> Any:
    return YAML(typ="safe", pure=True).load(FOLDER / name)


def problems(value: Any, schema: Any, place: str = "") -> Iterator[str]:
    """Yield where a value departs from a schema of `cluster_schemas.yaml`."""
    if isinstance(schema, str):
        right = value in schema[1:].split("|") if schema.startswith("=") else type(value) in TYPES[schema]
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


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specifications of pods in a manifest."""
    if "containers" in manifest:
        return [manifest]
    inner = [each for value in manifest.values() for each in (value if isinstance(value, list) else [value])]
    return [pod for each in inner if isinstance(each, dict) for pod in pods(each)]


def command(name: str) -> list[str]:
    """Return the one command of a recipe that computes, as the shell hands it over, but for its variables."""
    if name in ("trainjob.yaml", "jobset.yaml"):
        spec = loaded(name)["spec"]
        given: list[str] = (spec["trainer"] if name == "trainjob.yaml" else pods(spec)[0]["containers"][0])["command"]
        return given
    if name == "rayjob.yaml":
        return shlex.split(loaded(name)["spec"]["entrypoint"])
    text = loaded(name)["run"] if name == "skypilot.yaml" else (FOLDER / name).read_text(encoding="utf-8")
    (line,) = re.findall(
        r"^(?!#).*\b((?:torchrun|brim train) .*?)(?:; then)?$", text.replace("\\\n", " "), re.MULTILINE
    )
    return shlex.split(re.sub(r"\$\w+", "1", line))


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_what_its_program_reads_and_no_other_key(name):
    given, schema = loaded(name), SCHEMAS[name.removesuffix(".yaml")]
    assert list(problems(given, schema)) == []
    given["nodes"] = 2
    assert list(problems(given, schema)) == [": nodes is unknown"]
    if name == "trainjob.yaml":
        given["spec"]["trainer"]["numNodes"] = "2"
        assert ".spec.trainer.numNodes: '2' is not integer" in problems(given, schema)
        del given["kind"]
        assert ": no kind" in problems(given, schema)


def test_a_job_set_is_as_many_nodes_as_torchrun_waits_for_and_a_ray_job_as_many_gpus_as_actors():
    jobset, rayjob = loaded("jobset.yaml"), loaded("rayjob.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    asked = get_args_parser().parse_args(command("jobset.yaml")[1:])
    nodes = job["template"]["spec"]
    assert {nodes["completions"], nodes["parallelism"], int(asked.nnodes)} == {2}
    # JobSet's names: set, job, number of the job, number of the pod; the service is named as the set.
    assert asked.master_addr == "{0}-{1}-0-0.{0}".format(jobset["metadata"]["name"], job["name"])
    (group,) = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (worker,) = pods(group)[0]["containers"]
    arguments = command("rayjob.yaml")
    gpus = group["replicas"] * worker["resources"]["limits"]["nvidia.com/gpu"]
    assert int(arguments[arguments.index("--gpus") + 1]) == gpus
    for pod in [pod for manifest in (jobset, rayjob) for pod in pods(manifest)]:
        mounted = {mount["name"]: mount["mountPath"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
        assert mounted["shared"] == "/shared"


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
    verb = "predict" if name == "rayjob.yaml" else "train"
    asked = get_command(app_of([verb, "plan"])).commands[verb].make_context(verb, arguments[2:]).params
    assert (arguments[1], asked["resume"]) == (verb, True)
    if verb == "train":
        assert asked["output_directory"] == Path("/shared/runs/demo")
        assert asked["gpus"] == ("all" if name == "one-node.sh" else None)  # torchrun says how many
    else:
        places = (asked["config_or_run"], asked["dataset"], asked["output"])
        assert places == (Path("/shared/runs/demo"), ["/shared/new.jsonl"], Path("/shared/answers.parquet"))
        assert (asked["gpus"], asked["overrides"]) == ("4", ["backend.type=ray"])


def test_the_page_shows_every_recipe():
    page = (FOLDER.parents[1] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\.\./examples/cluster/([\w.-]+)", page)) == sorted(
        path.name for path in FOLDER.iterdir()
    )
