"""Write the record of a benchmark: its figures with the machine, the versions and the command that gave them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

_PACKAGES = (
    "brim",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "trl",
    "tokenizers",
    "tensorboardX",
    "rich",
)


def write_report(name: str, *, figures: Mapping[str, Any], num_threads: int, folder: Path = RESULTS) -> Path:
    """Write <folder>/<name>.json. It holds no host name and no path of this machine.

    figures: what was measured. num_threads: torch's, the same for all contenders.
    """
    record = {
        "benchmark": name,
        "command": command(name, sys.argv[1:]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {**machine(), "torch_threads": num_threads},
        "versions": versions(),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A short table: the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=max(160, Console().width)).print(table)


def command(name: str, arguments: Sequence[str]) -> str:
    """Return the command that runs it again; of an absolute path only the last part is kept."""
    shown = (Path(a).name if Path(a).is_absolute() else a for a in arguments)
    return " ".join(["python -m", f"benchmarks.{name}", *shown])


def machine() -> dict[str, Any]:
    """Return cores, the CPU's model, memory, and how busy the machine was when asked."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return Python's version, and that of each package that matters and is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
