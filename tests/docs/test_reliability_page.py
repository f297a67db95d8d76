"""docs/reliability.md shows the figures of benchmarks/results/faults.json."""

import json
from pathlib import Path

import pytest
from faults.page import PAGE, with_table
from faults.report import REPORT, read_report

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not REPORT.exists(), reason="the campaign has not been run yet")
def test_the_page_has_the_reports_table():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, read_report()), "run `python -m faults.page`"


@pytest.mark.skipif(not REPORT.exists(), reason="the campaign has not been run yet")
def test_nothing_failed_and_no_path_of_a_machine_is_told():
    report = read_report()
    failed = {name: fault["rows"] for name, fault in report["faults"].items()}
    assert all(row["failed"] == 0 for rows in failed.values() for row in rows.values())
    assert "/tmp/" not in json.dumps(report)


def test_the_command_is_a_target_of_make():
    assert "\nfaults: " in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "`make faults`" in PAGE.read_text(encoding="utf-8")
