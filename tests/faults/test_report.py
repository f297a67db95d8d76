"""Counts of trials, and the table made of them."""

from faults.page import table, with_table
from faults.report import Counts, counted

from faults import Trial

TRIALS = [
    Trial(row="kill-random", case="at 0.1", outcome="passed"),
    Trial(row="kill-random", case="at 0.2", outcome="failed", why="model differs"),
    Trial(row="disk-full", case="small", outcome="skipped", why="no mount"),
    Trial(row="disk-full", case="large", outcome="skipped", why="no mount"),
]


def report(**counts):
    how = {
        "command": "python -m faults", "date": "2026-11-21", "seconds": 90.0, "machine": {"cores": 2, "system": "Linux"},
        "versions": {"python": "3.11", "torch": "2.13", "transformers": "5.23"},
    }  # fmt: skip
    rows = ("kill-random", "kill-after", "kill-amid", "kill-again", "kill-anew", "kill-predict", "order")
    none = {"passed": 0, "failed": 0, "skipped": 0}
    return {"faults": {"kill": {**how, "rows": {row: {**none, **counts.get(row[5:], {})} for row in rows}}}}


def test_trials_are_counted_by_row_and_failures_are_kept():
    assert counted(("x", trial) for trial in TRIALS) == {
        "kill-random": Counts(passed=1, failed=1, told=("failed: at 0.2: model differs",)),
        "disk-full": Counts(skipped=2, told=("skipped: no mount",)),
    }


def test_the_table_has_a_line_a_row_and_says_how_it_was_made():
    lines = table(report(random={"passed": 199, "failed": 1}, after={"skipped": 3})).splitlines()
    assert lines[2].startswith(
        "| SIGKILL | random moments of `brim train` | `--resume` goes on from the last checkpoint"
    )
    assert lines[2].endswith("| 200 | 199 | 0 |")
    assert lines[3].endswith("| 0 | 0 | 3 |")
    assert len(lines) == 2 + 7 + 2
    assert lines[-1] == (
        "`python -m faults` on 2026-11-21 in 1.5 min (2 cores, Linux, Python 3.11, torch 2.13, transformers 5.23)."
    )


def test_only_what_stands_between_the_marks_of_a_page_is_replaced():
    mark = "<!-- from benchmarks/results/faults.json, by `python -m faults.page` -->"
    page = f"before\n\n{mark}\n\nstale words\n\n<!-- end -->\n\nafter\n"
    new = with_table(page, report())
    assert new.startswith(f"before\n\n{mark}\n\n| fault |")
    assert new.endswith("<!-- end -->\n\nafter\n")
    assert "stale words" not in new
    assert with_table(new, report()) == new
