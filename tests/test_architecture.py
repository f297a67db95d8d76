"""Imports go one way, and what must start quickly does not import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import brim

ROOT = Path(brim.__file__).parent
# From the lowest room to the highest: a module may import from its own room and from those before it.
ROOMS = [
    "errors",
    "units",
    "notes",
    "secrets",
    "files",
    "cache_folder",
    "digests",
    "config",
    "batching",
    "models",
    "data",
    "train",
    "infer",
    "memory",
    "planning",
    "report",
    "api",
    "cli",
]
TORCH_FREE = [
    "errors",
    "units",
    "notes",
    "secrets",
    "files",
    "digests",
    "config",
    "batching",
    "batching.adaptation",
    "batching.noise_scale",
    "models.folder",
    "models.needs",
    "models.quantization",
    "data",
    "infer.room",
    "memory.events",
    "memory.prediction",
    "memory.allocator",
    "memory.device",
    "memory.replay",
    "memory.work",
    "memory.device_speed",
    "memory.napkin",
    "memory.measure.process",
    "memory.measure.result",
    "planning.cache",
    "planning.engine_choice",
    "planning.generation_cut",
    "planning.generation_plan",
    "planning.phase_costs",
    "planning.phases",
    "planning.plan",
    "planning.plan_cache",
    "planning.time_advice",
    "planning.time_estimate",
    "planning.time_fit",
    "planning.time_probe",
    "report.memory_table",
    "report.generation_lines",
    "report.generation_table",
    "report.phase_table",
    "report.plan_table",
    "report.short_plan",
    "report.memory_squares_plot",
    "report.napkin_table",
    "report.picture",
    "api.compare",
    "cli.app",
    "cli.memory_request",
]
SLOW = ["torch", "transformers", "peft", "datasets", "bitsandbytes"]


def modules():
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in ROOMS)


def imported_rooms(path):
    """Rooms that a module imports at run time; imports for type checkers alone are as good as none."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "brim":
            yield [*node.module.split("."), node.names[0].name][1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("brim."))


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_go_down(path):
    room = path.parts[0].removesuffix(".py")
    above = [other for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room)]
    assert above == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_quick_modules_import_nothing_slow(module):
    code = f"import brim.{module}, sys; print([name for name in {SLOW} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_the_public_names_are_these_and_all_resolve():
    assert sorted(brim.__all__) == brim.__all__
    for name in brim.__all__:
        assert getattr(brim, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'brim' has no attribute 'nonsense'"):
        _ = brim.nonsense
