"""docs/finding-a-batch-size.md: its examples run, and its table is that of the searches."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from tests.batching.test_finder import Device

from brim.batching import Search, find_batch_size
from brim.batching.finder import MOST_CORRECTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "finding-a-batch-size.md").read_text(encoding="utf-8")


def sessions():
    return re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_loop_of_the_guide_runs():
    names = {}
    exec(compile(sessions()[0], "finding-a-batch-size.md", "exec"), names)  # noqa: S102
    found = names["found"]
    assert found.size == 64
    # On a busy machine what is free changes from probe to probe, so that there may be more than the three.
    assert [probe.outcome for probe in found.probes][:2] == ["fits"] * 2
    assert {probe.outcome for probe in found.probes} == {"fits"}
    assert len(names["optimizer"].state) == 0


def test_the_probe_of_the_guide_is_a_fits():
    names = {}
    exec(compile(sessions()[1], "finding-a-batch-size.md", "exec"), names)  # noqa: S102
    found = find_batch_size(names["fits"], how="doubling", most=1000)
    assert found.size == 64


def test_the_ways_of_the_table_take_as_many_probes_as_it_says():
    ways = PAGE.split("## The ways")[1].split("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d, ]+) \| (\d+) \| (\d+) \|$", ways, flags=re.MULTILINE)
    assert sorted(way for way, *_ in rows) == sorted(get_args(Search))
    for way, sizes, num_out_of_memory, answer in rows:
        device = Device(capacity=1000 + 10 * 100)
        found = find_batch_size(device, how=way, most=1024, bytes_of=device.peak, limit_bytes=device.capacity)
        assert ", ".join(map(str, device.sizes)) == sizes
        assert (found.num_out_of_memory, found.size) == (int(num_out_of_memory), int(answer))


def test_the_measured_figures_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "batching_search.json").read_text(encoding="utf-8"))
    table = PAGE.split("## Measured")[1].split("\n\n")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    found = results["contenders"].values()
    assert [row[1:] for row in rows] == [
        [
            f"{each['out_of_memory']['sum']:,}",
            f"{each['probes']['median']:.0f} ({each['probes']['most']})",
            f"{each['share_of_largest']['median']:.1%} ({each['share_of_largest']['least']:.1%})",
        ]
        for each in found
    ]
    predict = results["contenders"]["brim predict"]
    assert f"one probe in {predict['cases_of_one_probe_without_out_of_memory']} cases" in PAGE
    assert f"largest size in {predict['cases_at_98_percent']} of them" in PAGE


def test_the_figure_of_corrections():
    assert f"at most {['four', 'five', 'six'][MOST_CORRECTIONS - 4]} times" in PAGE


@pytest.mark.parametrize("name", ["find_batch_size", "Prober", "Probe", "NothingFitsError"])
def test_the_names_of_the_guide_are_public(name):
    import brim

    assert name in brim.__all__
    assert name in PAGE
