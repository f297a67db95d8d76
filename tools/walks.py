"""Count how many modules and functions a command runs through: `make walks`.

`python -m tools.walks` runs `brim check`, `memory`, `train` and `predict` on a few rows of the demo's data, each in a
process of its own, and counts of `src/brim`: modules that are loaded, modules of which a function ran, functions that
ran, calls from one module to another (each pair once), and how many of those lead from one package to another. Calls
that come back through a library (a hook, a callback) count as calls of the module that was left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.same import LLAMA, ROOT

NUM_ROWS = 64
_HEADS = ("command", "loaded", "modules", "functions", "calls", "between packages")

# Runs in the child: the names of modules of brim, of functions that ran, and of calls between modules.
_RECORD = """
import collections, json, runpy, sys, threading
root, functions, calls = sys.argv[1], set(), set()
def module(frame):
    name = frame.f_code.co_filename
    return name[len(root) + 1 : -3].replace("/", ".") if name.startswith(root) else None
def profile(frame, event, argument):
    if event != "call" or frame.f_code.co_name == "<module>":
        return
    entered = module(frame)
    if entered is None:
        return
    functions.add((entered, frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name))
    caller = frame.f_back
    while caller is not None and module(caller) is None:
        caller = caller.f_back
    if caller is not None and module(caller) != entered and caller.f_code.co_name != "<module>":
        calls.add((module(caller), entered))
threading.setprofile(profile)
sys.setprofile(profile)
code, out, sys.argv = 0, sys.argv[2], ["brim", *sys.argv[3:]]
try:
    runpy.run_module("brim", run_name="__main__")
except SystemExit as ended:
    code = ended.code or 0
sys.setprofile(None)
loaded = [name for name in sys.modules if name.partition(".")[0] == "brim"]
found = {"code": code, "loaded": loaded, "functions": sorted(functions), "calls": sorted(calls)}
open(out, "w").write(json.dumps(found))
"""


def main() -> int:
    print(("{:<10}" + "{:>12}" * 4 + "{:>18}").format(*_HEADS))
    with tempfile.TemporaryDirectory() as folder:
        given = commands(Path(folder))
        for name in ("check", "memory", "train", "predict"):
            found = walk(given[name], Path(folder))
            figures = (len(found["loaded"]), *counted(found["functions"], found["calls"]))
            print(("{:<10}" + "{:>12,}" * 4 + "{:>18,}").format(name, *figures))
    return 0


def counted(functions: Sequence[tuple[str, str]], calls: Sequence[tuple[str, str]]) -> tuple[int, int, int, int]:
    """Return modules of which a function ran, functions, calls between modules, and those between packages."""
    between = [(caller, called) for caller, called in calls if _package(caller) != _package(called)]
    return len({module for module, _ in functions}), len(functions), len(calls), len(between)


def _package(module: str) -> str:
    """Return the package below brim that a module lies in: "brim.memory.trace.record" -> "memory"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else ""


def walk(arguments: Sequence[str], folder: Path) -> Mapping[str, list[tuple[str, str]]]:
    """Run one command and return what it loaded, ran and called."""
    out = folder / "walk.json"
    command = [sys.executable, "-c", _RECORD, str(ROOT / "src"), str(out), *arguments]
    environment = {**os.environ, "BRIM_CACHE_DIR": str(folder / "cache")}  # what earlier runs have kept is not run
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        raise SystemExit(f"brim {' '.join(arguments)} failed:\n{done.stderr}")
    found: dict[str, list[tuple[str, str]]] = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def commands(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return commands by their verbs, after writing what each needs into the folder."""
    base = ROOT / "examples" / "stdlib_code" / "base-model"
    rows = [
        {"instruction": f"def add_{n}(a, b):", "input": "", "output": f"    return a + b + {n}\n"} for n in range(80)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[:NUM_ROWS]), encoding="utf-8")
    few = folder / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows[NUM_ROWS:]), encoding="utf-8")
    config = folder / "config.yaml"
    settings = {
        "base_model": str(base),
        "input_features": [{"name": "instruction", "type": "text"}],
        "output_features": [{"name": "output", "type": "text"}],
        "adapter": {"type": "lora"},
        "trainer": {"type": "finetune", "epochs": 1, "effective_batch_size": 16},
        "generation": {"max_new_tokens": 16},
    }
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML, too
    large = folder / "llama"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return {
        "check": ("check", "config.yaml", "--dataset", "rows.jsonl"),
        "memory": ("memory", "config.yaml", f"base_model={large}", "--device", "t4", "--sequence-length", "512"),
        "plan": ("plan", "config.yaml", "--dataset", "rows.jsonl"),
        "train": ("train", "config.yaml", "--dataset", "rows.jsonl", "--output-directory", "run"),
        "predict": ("predict", "run", "--dataset", "few.jsonl", "--output", "out.jsonl"),
        "evaluate": ("evaluate", "run", "--dataset", "few.jsonl"),
    }


if __name__ == "__main__":
    sys.exit(main())
