"""Search for a batch size under a real memory limit by brim, accelerate's decorator and Lightning's tuner.

    python -m benchmarks.batching_search

50 random small language models, each with a random limit on the address space of a CPU process (RLIMIT_AS). All
contenders run the same training step of the same model, each in a fork of its own. The true maximum is found by trying:
the largest size that a fresh process runs. brim's prediction is traced beforehand; what of a process is not tensors is
learned from other cases, which are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import print_table, write_report
from benchmarks.search_contenders import MOST, STEPS
from benchmarks.search_worker import Work
from brim.workflows.measure.run import RETURNED_AT_ONCE

NUM_CASES = 50
NUM_CALIBRATION = 6
NUM_DEFAULT = 10  # cases under the C library's own thresholds
GOAL_AT_ONCE, GOAL_SHARE = 0.95, 0.98
_LANES = 2
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# The arena of another thread is 64 MiB of address space, which malloc turns to when its own is refused more.
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
_BRIM = ("brim predict", "brim linear", "brim binary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Hold bytes of a process at its peak that are not in the prediction, over cases that are not counted."""

    beyond_bytes: tuple[int, ...]

    @property
    def constant_bytes(self) -> int:
        """Return the middle of them."""
        return round(median(self.beyond_bytes))

    @property
    def margin_bytes(self) -> int:
        """Return the range of them."""
        return max(self.beyond_bytes) - min(self.beyond_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Hold an environment in which cases are tried, and where what was found is kept."""

    name: str
    environment: Mapping[str, str]
    num_cases: int
    only: Sequence[str]  # contenders; none: all
    folder: Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches for a batch size under a real memory limit.")
    parser.add_argument("--cases", type=int, default=NUM_CASES)
    parser.add_argument("--default-cases", type=int, default=NUM_DEFAULT)
    parser.add_argument("--only", nargs="*", default=[], help="contenders, by name")
    parser.add_argument("--folder", help="keeps what each case found; cases that are there are not tried again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(given.folder or name)
        folder.mkdir(parents=True, exist_ok=True)
        pinned = Setting(
            name="pinned",
            environment={**RETURNED_AT_ONCE, **_ONE_ARENA},
            num_cases=given.cases,
            only=given.only,
            folder=folder,
        )
        default = Setting(
            name="default", environment={}, num_cases=given.default_cases, only=given.only or _BRIM, folder=folder
        )
        figures = figures_of(pinned)
        _write(figures, None)
        if given.default_cases:
            _write(figures, figures_of(default))


def figures_of(setting: Setting) -> dict[str, Any]:
    """Return the figures: calibrate, then try the cases."""
    calibration = Calibration(
        beyond_bytes=tuple(case["beyond_bytes"] for case in _worked(setting, "calibration", None))
    )
    cases = [_with_traces(case) for case in _worked(setting, "counted", calibration)]
    return {
        "environment": {**setting.environment},
        "calibration": {
            **asdict(calibration),
            "constant_bytes": calibration.constant_bytes,
            "margin_bytes": calibration.margin_bytes,
        },
        "contenders": summary(cases),
        "runs": [_told(case) for case in cases],
    }


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize by contender. A size above the largest that a fresh process runs counts as that one."""
    names = list(cases[0]["found"]) if cases else []
    return {name: _summary([(case["largest"], case["found"][name]) for case in cases]) for name in names}


def _summary(found: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    answered = [(largest, each) for largest, each in found if each.get("size")]
    shares = [min(each["size"] / largest, 1.0) for largest, each in answered]
    return {
        "out_of_memory": _spread([len(each.get("out_of_memory", ())) for _, each in found]),
        "probes": _spread([len(each.get("tried", ())) for _, each in found]),
        "seconds": _spread([each["seconds"] for _, each in found if "seconds" in each]),
        "share_of_largest": _spread(shares),
        "cases_without_out_of_memory": sum(not each.get("out_of_memory") for _, each in found),
        "cases_of_one_probe_without_out_of_memory": sum(
            len(each.get("tried", ())) == 1 and not each.get("out_of_memory") for _, each in found
        ),
        "cases_at_98_percent": sum(share >= GOAL_SHARE for share in shares),
        "cases_within_one_row": sum(largest - each["size"] <= 1 for largest, each in answered),
        "cases_answered_with_a_size_never_run": sum(not _has_run(each) for _, each in answered),
        "cases_answered_above_largest": sum(each["size"] > largest for largest, each in answered),
        "cases_without_answer": len(found) - len(answered),
    }


def _with_traces(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the case with the seconds of the prediction in those of the search that it is made for."""
    found = dict(case["found"])
    predict = found.get("brim predict")
    if predict is not None:
        seconds = round(predict["seconds"] + case["foretold_s"], 3)
        found["brim predict"] = {**predict, "seconds": seconds, "traces_s": round(case["foretold_s"], 3)}
    return {**case, "found": found}


def _has_run(found: Mapping[str, Any]) -> bool:
    return found["size"] in found["tried"] and found["size"] not in found["out_of_memory"]


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    whole = {"median": median(values), "least": min(values), "most": max(values), "sum": sum(values)}
    return {name: round(value, 4) for name, value in whole.items()}


def _worked(setting: Setting, seed: str, calibration: Calibration | None) -> list[dict[str, Any]]:
    """Return what the workers found, in order. Raises RuntimeError where one of them failed."""
    results = setting.folder / f"{setting.name}-{seed}.jsonl"
    there = {case["case"]["number"] for case in _read(results)}
    num_cases = NUM_CALIBRATION if calibration is None else setting.num_cases
    missing = [number for number in range(num_cases) if number not in there]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    lanes = []
    for lane in range(_LANES):
        work = Work(
            seed=seed,
            numbers=missing[lane::_LANES],
            only=list(setting.only),
            constant_bytes=None if calibration is None else calibration.constant_bytes,
            margin_bytes=0 if calibration is None else calibration.margin_bytes,
            results=str(results),
        )
        if work.numbers:
            command = [sys.executable, "-m", "benchmarks.search_worker", json.dumps(asdict(work))]
            lanes.append(subprocess.Popen(command, env={**inherited, **_ONE_THREAD, **setting.environment}))
    codes = [lane.wait() for lane in lanes]
    if any(codes):
        raise RuntimeError("a worker failed; what it printed says why")
    return sorted(_read(results), key=lambda case: int(case["case"]["number"]))


def _read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    cases = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for case in cases:
        if "error" in case:
            raise RuntimeError(case["error"])
    return cases


def _told(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a case goes into the record."""
    return {
        **case["case"],
        "largest": case["largest"],
        "num_traces": case["foretold"]["num_traces"],
        "found": case["found"],
    }


def _write(pinned: Mapping[str, Any], default: Mapping[str, Any] | None) -> None:
    num_cases = len(pinned["runs"])
    predict = pinned["contenders"].get("brim predict", {})
    at_once = predict.get("cases_of_one_probe_without_out_of_memory", 0)
    figures = {
        "goal": {"one_probe_without_out_of_memory": GOAL_AT_ONCE, "share_of_largest": GOAL_SHARE, "most_probes": 2},
        "reached": {
            "one_probe_without_out_of_memory": at_once / num_cases,
            "share_of_largest": predict.get("share_of_largest"),
            "most_probes": predict.get("probes", {}).get("most"),
        },
        "cases": num_cases,
        "most_rows": MOST,
        "steps_of_a_probe": STEPS,
        **pinned,
        "default_thresholds": default,
    }
    write_report("batching_search", figures=figures, num_threads=1)
    _show(f"batch size under a real limit, {num_cases} cases", pinned)
    if default is not None:
        _show("the same with the C library's own thresholds", default)


def _show(title: str, figures: Mapping[str, Any]) -> None:
    columns = (
        "",
        "out of memory: all",
        "most",
        "probes: median",
        "most",
        "seconds: median",
        "of the largest: median",
        "least",
        "one probe, none failed",
        "never run",
    )
    rows = [
        (
            name,
            f"{each['out_of_memory']['sum']:g}",
            f"{each['out_of_memory']['most']:g}",
            f"{each['probes']['median']:g}",
            f"{each['probes']['most']:g}",
            f"{each['seconds']['median']:.2f}",
            f"{each['share_of_largest'].get('median', 0):.1%}",
            f"{each['share_of_largest'].get('least', 0):.1%}",
            str(each["cases_of_one_probe_without_out_of_memory"]),
            str(each["cases_answered_with_a_size_never_run"]),
        )
        for name, each in figures["contenders"].items()
    ]
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
