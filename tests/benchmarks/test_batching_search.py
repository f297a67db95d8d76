"""The benchmark of the searches: its cases, its figures, and the blocks that its oracle counts in."""

import json
import os
import platform
import subprocess
import sys

import pytest
import torch
from benchmarks.batching_search import Calibration, summary
from benchmarks.search_contenders import Watched, contenders
from benchmarks.search_oracle import block_bytes, foretell
from benchmarks.search_subject import random_case, subject

from brim.workflows.measure.run import RETURNED_AT_ONCE


def test_a_case_is_drawn_from_its_seed_and_number_alone():
    assert random_case(3, "counted") == random_case(3, "counted")
    drawn = [random_case(number, seed) for seed in ("counted", "calibration") for number in range(20)]
    assert len({(case.hidden, case.tokens, case.room_bytes) for case in drawn}) == 40
    assert {case.model_type for case in drawn} == {"llama", "qwen3", "gpt2"}


def test_the_figures_of_a_contender():
    tried = [
        {"largest": 100, "size": 99, "tried": [99], "out_of_memory": [], "seconds": 1.0},
        {"largest": 100, "size": 90, "tried": [101, 50, 90], "out_of_memory": [101], "seconds": 3.0},
        {"largest": 10, "size": 11, "tried": [8, 16], "out_of_memory": [16], "seconds": 2.0},
    ]
    cases = [{"largest": each.pop("largest"), "found": {"one": each}} for each in tried]
    found = summary(cases)["one"]
    assert found["out_of_memory"] == {"median": 1, "least": 0, "most": 1, "sum": 2}
    assert found["probes"] == {"median": 2, "least": 1, "most": 3, "sum": 6}
    assert found["share_of_largest"] == {"median": 0.99, "least": 0.9, "most": 1.0, "sum": 2.89}
    assert {key: value for key, value in found.items() if isinstance(value, int)} == {
        "cases_without_out_of_memory": 1,
        "cases_of_one_probe_without_out_of_memory": 1,
        "cases_at_98_percent": 2,
        "cases_within_one_row": 2,
        "cases_answered_with_a_size_never_run": 1,
        "cases_answered_above_largest": 1,
        "cases_without_answer": 0,
    }


def test_a_calibration_is_the_middle_and_the_range():
    calibration = Calibration(beyond_bytes=(5, -3, 4))
    assert (calibration.constant_bytes, calibration.margin_bytes) == (4, 8)


def test_what_was_tried_is_watched(tmp_path):
    torch.manual_seed(0)
    built = subject(random_case(0, "counted"), tmp_path)
    watched = Watched(built)
    watched.step(1)
    watched.step(1)
    watched.step(2)
    assert (watched.sizes, watched.failed) == ([1, 2], [])

    def out_of_memory(loss):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            watched.step(2, out_of_memory)
    assert (watched.sizes, watched.failed) == ([1, 2, 2], [2, 2])


def test_the_prediction_is_of_what_the_step_adds(tmp_path):
    built = subject(random_case(3, "counted"), tmp_path)
    foretold = foretell(built, room_bytes=2**25, most_rows=64)
    assert type(foretold).from_dict(json.loads(json.dumps(foretold.as_dict()))) == foretold
    weights = sum(weight.nbytes for weight in {id(w): w for w in built.model.parameters()}.values())
    assert weights <= foretold.weights_bytes < 1.2 * weights
    # Gradients and two moments, whatever the rows.
    assert foretold(1) > 3 * weights
    assert foretold(64) - foretold(32) == pytest.approx(32 * (foretold(32) - foretold(16)) / 16, rel=0.05)


@pytest.mark.parametrize("name", ["brim predict", "accelerate"])
def test_contenders_are_there(name):
    assert name in contenders()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the blocks are glibc's")
def test_a_block_is_what_the_c_library_takes():
    sizes = [65_000, 65_536, 100_000, 131_072 - 120, 131_072, 1_000_000, 4_194_304]
    code = f"""
import ctypes, re
libc = ctypes.CDLL(None)
def mapped():
    return int(re.search(r"VmSize:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
def take(size):
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), 64, size) == 0
    return block
mapped(), take(70_000)
for size in {sizes}:
    before = mapped()
    blocks = [take(size) for _ in range(10)]
    print((mapped() - before) / 10)
"""
    environment = {**os.environ, **RETURNED_AT_ONCE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    taken = [float(line) for line in done.stdout.split()]
    assert taken == pytest.approx([block_bytes(size) for size in sizes], abs=4096)
    assert sum(taken) == pytest.approx(sum(map(block_bytes, sizes)), rel=0.002)
