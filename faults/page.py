"""The table in docs/reliability.md, from benchmarks/results/faults.json.

python -m faults.page
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults.catalogue import CATALOGUE
from faults.report import read_report

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
_BEGIN, _END = "<!-- from benchmarks/results/faults.json, by `python -m faults.page` -->", "<!-- end -->"


def write_page() -> None:
    """Put the report's table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_report()), encoding="utf-8")


def with_table(page: str, report: Mapping[str, Any]) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{table(report)}\n\n{_END}{after}"


def table(report: Mapping[str, Any]) -> str:
    """A line a row of the catalogue that the report has, and a line on what each was run with."""
    lines = [
        "| fault | where | what brim promises | trials | passed | not tried |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    ways: dict[str, list[str]] = {}
    for fault in CATALOGUE:
        told = report["faults"].get(fault.name)
        if told is None:
            continue
        ways.setdefault(_way(told), []).append(fault.name)
        for row in fault.rows:
            counts = told["rows"][row.name]
            tried = counts["passed"] + counts["failed"]
            figures = f"{tried:,} | {counts['passed']:,} | {counts['skipped']:,}"
            lines.append(f"| {row.fault} | {row.where} | {row.promise} | {figures} |")
    return "\n".join([*lines, "", *_said(ways)])


def _way(told: Mapping[str, Any]) -> str:
    machine, versions = told["machine"], told["versions"]
    return (
        f"`{told['command']}` on {told['date']} in {told['seconds'] / 60:.1f} min ({machine['cores']} cores, "
        f"{machine['system']}, Python {versions['python']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']})"
    )


def _said(ways: Mapping[str, list[str]]) -> list[str]:
    if len(ways) == 1:
        return [f"{next(iter(ways))}."]
    return [f"- {', '.join(names)}: {way}" for way, names in ways.items()]


if __name__ == "__main__":
    write_page()
