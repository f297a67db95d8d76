"""The house: imports go down, packages are entered by their faces, chapters have their size, what is quick stays so."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest
from tools.structure import LAYERS, House, read_house

import brim

MOST_MODULES, MOST_LINES, FEWEST_LINES = 12, 450, 80
# Modules under 80 lines, each with the reason that it stands alone.
SMALL = {
    "brim.__main__": "`python -m brim`",
    "brim.lazy": "below everything",
    "brim.memory.bitsandbytes.layout": "what bitsandbytes stores, without importing it",
}
# What starts without torch, with all that it imports: `brim --help`, `brim check` and what reads files alone.
TORCH_FREE = [
    "brim.cli.app",
    "brim.cli.check",
    "brim.cli.predict",
    "brim.cli.train",
    "brim.config.load",
    "brim.data.read.files",
    "brim.data.table.preparation",
    "brim.distributed.launch",
    "brim.batching.growth",
    "brim.distributed.dealing",
    "brim.memory.closed_form.breakdown",
    "brim.planning.costs.time",
    "brim.report.memory_figure",
    "brim.report.plan",
    "brim.workflows.compare.run",
    "brim.workflows.measure.messages",
]
SLOW = ["torch", "transformers", "peft", "datasets", "bitsandbytes"]


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


def test_imports_go_down_and_through_faces(house):
    wrong = []
    for module in house.modules:
        for found in house.imports(module):
            place = f"{module.path.name}:{found.line} of {module.name}"
            if found.is_relative:
                wrong.append(f"{place}: a relative import")
                continue
            if found.source == "brim" and found.name == "__version__":
                continue
            target = _package(house, found.module)
            if LAYERS.index(found.module.split(".")[1]) > LAYERS.index(module.layer):
                wrong.append(f"{place}: upward, of {found.module}")
            if target != module.package and found.source != target:
                wrong.append(f"{place}: past the face of {target}, of {found.module}")
            if module.package.startswith(f"{target}."):
                wrong.append(f"{place}: of the package around it, {found.module}")
    assert wrong == []


def _package(house: House, name: str) -> str:
    above = name.rpartition(".")[0]
    return name if above == "brim" or name in house.faces else above


def test_nothing_imports_itself_in_a_circle(house):
    graph: dict[str, set[str]] = defaultdict(set)
    packages: dict[str, set[str]] = defaultdict(set)
    for module in house.modules:
        for found in house.imports(module):
            if not found.is_relative and found.module != "brim":
                graph[module.name].add(found.module)
                if _package(house, found.module) != module.package:
                    packages[module.package].add(_package(house, found.module))
    assert _circle(graph) is None
    assert _circle(packages) is None


def _circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return a circle of the graph, or None."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return None


def test_chapters_have_their_size_and_packages_twelve_at_most(house):
    large = {module.name for module in house.modules if module.num_lines > MOST_LINES}
    small = {module.name for module in house.modules if module.num_lines < FEWEST_LINES}
    assert sorted(large) == [], "look for the second topic"
    assert sorted(small - set(SMALL)) == [], "look for the chapter that it belongs to"
    assert sorted(set(SMALL) - small) == [], "take it off the list"
    crowded = {name: len(modules) for name, modules in house.packages().items() if len(modules) > MOST_MODULES}
    assert crowded == {}


def test_what_starts_quickly_imports_nothing_slow():
    code = f"""
import importlib, sys
for name in {TORCH_FREE}:
    importlib.import_module(name)
    slow = [each for each in {SLOW} if each in sys.modules]
    assert not slow, (name, slow)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_are_these_and_all_resolve():
    assert sorted(brim.__all__) == brim.__all__
    for name in brim.__all__:
        assert getattr(brim, name).__name__.removeprefix("brim.") == name
    with pytest.raises(AttributeError, match=r"module 'brim' has no attribute 'nonsense'$"):
        _ = brim.nonsense
    with pytest.raises(AttributeError, match=r"has no attribute 'WriteError': it is brim.errors.WriteError"):
        _ = brim.WriteError


def test_what_is_imported_is_left_out_of_collections_only_while_the_command_starts():
    code = """
import gc
from brim import lazy

def num_frozen():
    with lazy.importing():
        assert not gc.isenabled()
        new = [[] for _ in range(5000)]
    assert gc.isenabled()
    return gc.get_freeze_count()

assert num_frozen() == 0
lazy.freezes_imports = True
before = num_frozen()
assert before > 5000
lazy.freezes_imports = False
circle = []
circle.append(circle)
assert 0 < num_frozen() <= before
del circle
assert gc.collect() > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
