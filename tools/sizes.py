"""Show how large each package is, beside its budget: `make sizes`.

A budget is a ceiling for what exists and may only fall. `--lower` writes what there is where that is less. One is
raised by hand in tools/budgets.json, with a line under "raised" that says why. Exit status 1: one is exceeded.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.structure import House, Module, read_house

BUDGETS = Path(__file__).with_name("budgets.json")
FIGURES = ("modules", "code", "p90", "imports", "face")
_HEADS = ("package", "modules", "code lines", "functions p90", "imports %", "face")


def sizes(house: House) -> dict[str, dict[str, int]]:
    """Return the figures of each package, and of all.

    They are: modules without `__init__`, code lines (neither blank, comment nor docstring), the 90th percentile of
    functions' lines, lines of imports in percent of all, names of the face.
    """
    packages = house.packages()
    root = [module for name, modules in packages.items() if "." not in name.removeprefix("brim.") for module in modules
            if module.package == module.name]  # fmt: skip
    found = {"brim": _figures(root, len(house.faces.get("brim", {})))}
    for name in sorted(packages):
        if packages[name][0].package != packages[name][0].name:
            found[name] = _figures(packages[name], len(house.faces.get(name, {})))
    total = _figures(house.modules, 0)
    return {**found, "all": {**total, "face": sum(figures["face"] for figures in found.values())}}


def _figures(modules: Sequence[Module], num_names: int) -> dict[str, int]:
    functions = sorted(lines for module in modules for lines in module.function_lines)
    lines = sum(module.num_lines for module in modules)
    return {
        "modules": len(modules),
        "code": sum(module.num_code_lines for module in modules),
        "p90": functions[math.ceil(0.9 * len(functions)) - 1] if functions else 0,
        "imports": round(100 * sum(module.num_import_lines for module in modules) / max(lines, 1)),
        "face": num_names,
    }


def over(found: Mapping[str, Mapping[str, int]], budgets: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what exceeds its budget, in words; a package without one exceeds it."""
    lines = [
        f"{name}: {figures[figure]} {figure}, the budget is {budgets[name][figure]}"
        for name, figures in found.items()
        if name in budgets
        for figure in FIGURES
        if figures[figure] > budgets[name][figure]
    ]
    return lines + [f"{name} has no budget" for name in found if name not in budgets]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sizes", description=__doc__)
    parser.add_argument("--lower", action="store_true", help="write what there is where it is less than the budget")
    parser.add_argument("--quiet", action="store_true", help="print what is over its budget alone")
    asked = parser.parse_args(arguments)
    stored = json.loads(BUDGETS.read_text(encoding="utf-8"))
    found, budgets = sizes(read_house()), stored["budgets"]
    if not asked.quiet:
        _print(found, budgets)
    if asked.lower:
        stored["budgets"] = {
            name: {figure: min(figures[figure], budgets.get(name, figures)[figure]) for figure in FIGURES}
            for name, figures in found.items()
        }
        BUDGETS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        budgets = stored["budgets"]
    problems = over(found, budgets)
    for line in problems:
        print(f"over its budget: {line}. Make it smaller, or raise the budget in {BUDGETS.name} and say why")
    return 1 if problems else 0


def _print(found: Mapping[str, Mapping[str, int]], budgets: Mapping[str, Mapping[str, int]]) -> None:
    rows: list[tuple[str, ...]] = [_HEADS]
    for name, figures in found.items():
        budget = budgets.get(name, {})
        rows.append((name, *(f"{figures[figure]} / {budget.get(figure, '–')}" for figure in FIGURES)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        print(
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
        )


if __name__ == "__main__":
    sys.exit(main())
