"""The GPU's grid, on tiny models and this CPU."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace

import pytest
from benchmarks.memory_cases import ARCHITECTURES, Case, architecture_of, grid, small, varying
from benchmarks.memory_comparison import Comparison, Pair, compared
from benchmarks.memory_foretold import live_bytes
from benchmarks.memory_gpu import Options, measure

from benchmarks import memory_gpu, memory_worker
from brim.config import load_config
from brim.memory.trace import EventStream, Place

linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set's peak is read from /proc")
ALL = list(grid())


def in_this_process(requests, results, device, look):
    memory_worker.run_cases(requests, results, memory_worker.torch.device(device), rehearses=True)
    return 0


def test_the_grid_has_every_way_of_running_that_is_claimed():
    assert {case.architecture for case in ALL} == set(ARCHITECTURES)
    assert {case.method for case in ALL} == {"full", "lora", "lora_attention", "qlora", "none"}
    assert {case.precision for case in ALL} == {"fp32", "bf16-true", "bf16-mixed", "fp16-mixed"}
    assert {case.attention for case in ALL} == {"sdpa", "eager"}
    assert {case.optimizer for case in ALL} == {"adamw", "adafactor", "sgd", "adamw_8bit"}
    assert {case.checkpointing for case in ALL} == {case.chunked_loss for case in ALL} == {True, False}
    assert {case.num_micro_batches for case in ALL} == {1, 2}
    assert len({case.name for case in ALL}) == len(ALL)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_each_case_is_a_valid_configuration_within_the_context(case, tmp_path):
    load_config({"base_model": str(tmp_path), **case.settings()})
    config = ARCHITECTURES[case.architecture]
    context = config.get("n_positions") or config["max_position_embeddings"]
    assert max(max(step) for step in case.lengths()) + case.new_tokens <= context
    assert all(len(step) == case.rows * case.num_micro_batches for step in case.lengths())


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_small_grid_keeps_the_kind_of_each_case(case):
    shrunk = small(case)
    assert max(max(step) for step in shrunk.lengths()) <= 32
    same = ("architecture", "method", "precision", "checkpointing", "num_micro_batches", "num_steps", "records", "does")
    assert all(getattr(shrunk, name) == getattr(case, name) for name in same)
    assert len(shrunk.lengths()) == len(case.lengths())


def test_steps_vary_in_length():
    assert varying(rows=2, longest=100)[:3] == ((31, 31), (12, 12), (55, 55))


@linux
def test_cases_are_measured_on_a_cpu_and_what_cannot_run_is_told(tmp_path, monkeypatch):
    lora = Case(architecture="qwen2-0.5b", method="lora", precision="fp32", rows=2, tokens=64)
    cases = [
        lora,
        replace(lora, step_lengths=((64, 9), (32, 32)), num_steps=2),
        replace(lora, rows=3, method="none", does="infer", new_tokens=2),
        replace(lora, method="qlora", rows=1),
    ]
    monkeypatch.setattr(memory_gpu, "grid", lambda: iter(cases))
    monkeypatch.setattr(memory_gpu, "has_bitsandbytes", lambda: False)
    monkeypatch.setattr(memory_gpu, "run_worker", in_this_process)
    figures = measure(Options(device="cpu", small=True, only="", budget_s=600, out=tmp_path))
    train, varied, infer, qlora = figures["cases"]
    assert [peak["phase"] for peak in train["peaks"]] == ["load", "train", "train", "train"]
    assert [peak["step"] for peak in varied["peaks"]] == [None, 1, 2]
    assert [peak["phase"] for peak in infer["peaks"]] == ["load", "evaluate", "generate"]
    assert qlora["skipped"] == "bitsandbytes is not installed"
    comparison = compared(json.loads(json.dumps(figures)))
    assert {pair.figure for pair in comparison.pairs if pair.case == train["name"]} == {
        f"train {step} total" for step in (1, 2, 3)
    }
    assert all(abs(pair.error) < 0.1 for pair in comparison.pairs), comparison.pairs
    assert (qlora["name"], "bitsandbytes is not installed") in comparison.missing


def test_no_case_is_started_when_time_is_up(tmp_path):
    case = small(next(iter(ALL)))
    requests, results = tmp_path / "requests.json", tmp_path / "results.jsonl"
    item = {"request": json.loads(memory_gpu._request(case, tmp_path, {}, "cpu").dumps()), "trace": None}
    requests.write_text(json.dumps({"cases": [item], "until": 0}))
    memory_worker.run_cases(requests, results, memory_worker.torch.device("cpu"), rehearses=False)
    assert json.loads(results.read_text()) == {"number": 0, "skipped": "time is up"}


def test_a_case_that_fails_is_told_and_does_not_end_the_others(tmp_path, monkeypatch):
    def fails(request, device, meter):
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(memory_worker, "run_on", fails)
    requests, results = tmp_path / "requests.json", tmp_path / "results.jsonl"
    request = json.loads(memory_gpu._request(small(ALL[0]), tmp_path, {}, "cpu").dumps())
    item = {"request": request, "trace": None}
    requests.write_text(json.dumps({"cases": [item, item], "until": 1e12}))
    memory_worker.run_cases(requests, results, memory_worker.torch.device("cpu"), rehearses=False)
    told = [json.loads(line) for line in results.read_text().splitlines()]
    assert told == [{"number": n, "error": "RuntimeError: CUDA error: no kernel image"} for n in (0, 1)]


def test_a_trace_holds_each_place_once(tmp_path):
    stream = EventStream()
    there = Place("forward", 0, "model.layers.0", "aten.mm")
    first = stream.birth(512, "temporary", there)
    stream.birth(100, "temporary", Place("backward"))
    stream.death(first, there)
    assert memory_worker.compact(stream) == {
        "sizes": [512, 100],
        "storages": [0, 1, -1],
        "place_numbers": [0, 1, 0],
        "places": [["forward", 0, "model.layers.0", "aten.mm"], ["backward", None, "", ""]],
    }
    file = tmp_path / "trace.json.gz"
    memory_worker.write_compact(stream, file)
    assert json.loads(gzip.decompress(file.read_bytes()))["storages"] == [0, 1, -1]


def test_live_bytes_of_a_stream():
    stream = EventStream()
    first = stream.birth(512, "weights", Place("load"))
    stream.birth(100, "temporary", Place("forward"))
    stream.death(first, Place("forward"))
    assert live_bytes(stream).tolist() == [512, 612, 100]


def test_the_summary_is_of_absolute_errors():
    pairs = tuple(
        Pair(case="a", figure="train 1 allocated", measured=100, predicted=predicted) for predicted in (99, 103, 100)
    )
    found = Comparison(pairs=pairs, missing=()).summary()["allocated"]
    assert (found["pairs"], round(found["median_error"], 6), round(found["largest_error"], 6)) == (3, 0.01, 0.03)


def test_small_models_keep_what_makes_an_architecture(tmp_path):
    for name in ARCHITECTURES:
        case = next(case for case in ALL if case.architecture == name)
        shrunk, whole = architecture_of(case, small=True), architecture_of(case, small=False)
        assert set(shrunk) == set(whole)
        assert shrunk.get("tie_word_embeddings") == whole.get("tie_word_embeddings")
        assert shrunk.get("num_local_experts") == whole.get("num_local_experts")
