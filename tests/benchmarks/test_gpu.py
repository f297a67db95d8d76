"""The checks for a GPU, at toy sizes on the CPU: every case runs, finds what is wrong, and the report is there."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.attention import attention_errors, exact_attention
from benchmarks.gpu.cases import Case, Options, Skip, run_cases
from benchmarks.gpu.correct import counted, suite_figures, waits_at_most
from benchmarks.gpu.memory import cases as memory_cases
from benchmarks.gpu.speed import flops_per_token, rows_under_cap
from benchmarks.gpu.subject import SIZES
from tests.benchmarks.test_memory import in_this_process
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import memory_gpu
from brim.models.packing import attention as packed

ABSENT = ("liger_kernel", "trl", "vllm")
TOY = ["--small", "--device", "cpu", "--out"]
pytestmark = pytest.mark.run


def options(folder, **changes):
    given = {"part": "correct", "device": "cpu", "small": True, "only": "", "budget_s": 60, "out": folder}
    return Options.of(**given, **changes, arguments=["correct", "--small"])


def outcomes(folder, part):
    report = json.loads((folder / f"gpu_{part}.json").read_text())
    return report, {case["name"]: case["outcome"] for case in report["cases"]}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("part", ["correct", "speed"])
def test_every_case_passes_on_a_cpu_but_for_those_that_lack_something(tmp_path, monkeypatch, part):
    installed = find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ABSENT else installed(name))
    assert main([part, *TOY, str(tmp_path)]) == 0
    report, found = outcomes(tmp_path, part)
    assert report["command"] == f"python -m benchmarks.gpu {part} --small --device cpu --out {tmp_path.name}"
    absent = ["suite", "Liger", "TRL", "vLLM"]
    absent += [] if installed("brim.models.adapter_function") else ["adapter function"]
    for name, outcome in found.items():
        assert outcome == ("skipped" if any(word in name for word in absent) else "passed"), name
    assert set(found.values()) == {"passed", "skipped"}


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set's peak is read from /proc")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_memory_is_measured_and_compared_case_by_case_packed_ones_among_them(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_gpu, "run_worker", in_this_process)
    assert main(["memory", *TOY, str(tmp_path)]) == 0
    _, found = outcomes(tmp_path, "memory")
    assert set(found.values()) == {"passed"}
    assert sum("packed" in name for name in found) == 2
    with_loss = {"cases": [{"name": "a", "error": "ended"}, {"name": "b", "skipped": "time is up"}], "device": {}}
    monkeypatch.setattr(memory_gpu, "measure", lambda given, cases: with_loss)
    assert not run_cases(memory_cases(options(tmp_path)), options(tmp_path))
    assert list(outcomes(tmp_path, "correct")[1].values()) == ["failed", "failed", "skipped", "skipped"]


def test_what_fails_or_lacks_time_is_told_and_decides_the_verdict(tmp_path):
    def broken():
        raise ValueError("no such thing")

    def absent():
        raise Skip("not there")

    good = Case(name="good", run=lambda: {"apart": 0.0}, passes=lambda found: found["apart"] < 1, expects="near")
    given = options(tmp_path)
    skipped = [replace(good, name="slow", needs_s=1000), replace(good, name="absent", run=absent)]
    assert run_cases([good, *skipped], given)
    assert not run_cases(skipped, given), "nothing ran"
    failed = [replace(good, name="broken", run=broken), replace(good, name="far", run=lambda: {"apart": 2.0})]
    seen = []

    def watched():
        for case in (good, *skipped, *failed):
            yield case
            seen.append(len(outcomes(tmp_path, "correct")[1]))  # the report is there after each

    assert not run_cases(watched(), given)
    assert seen == [1, 2, 3, 4, 5]
    report, found = outcomes(tmp_path, "correct")
    assert list(found.values()) == ["passed", "skipped", "skipped", "failed", "failed"]
    assert report["verdict"] == "FAILED (2 failed, 1 passed, 2 skipped)"
    assert report["cases"][3]["reason"] == "ValueError: no such thing"
    assert given.until > time.monotonic()


def as_one_row(module, query, key, value, *others, **named):
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("wrong", ["window", "rows"])
def test_attention_that_forgets_a_window_or_mixes_rows_is_far_beyond_rounding(tmp_path, monkeypatch, wrong):
    if wrong == "window":
        monkeypatch.setattr(packed, "_window", lambda length, width, device: torch.ones(length, length).bool().tril())
    else:
        monkeypatch.setattr(packed, "_row_by_row", as_one_row)
    found = attention_errors(options(tmp_path), dtype=torch.bfloat16, head_size=64, key_heads=8, window=8)
    assert max(found[name] for name in ("output", "query", "key", "value")) > 0.1


def test_the_formula_is_pytorchs_attention():
    query, key, value = (torch.randn(1, heads, 9, 16, dtype=torch.float64) for heads in (4, 2, 2))
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(exact_attention(query, key, value, window=None), expected)
    torch.testing.assert_close(exact_attention(query, key, value, window=1), value.repeat_interleave(2, dim=1))


def test_figures_of_the_profiler_and_of_pytest_are_counted():
    seen = {"cudaStreamSynchronize": 3, "Memcpy DtoH (Device -> Pageable)": 6, "cudaLaunchKernel": 30, "aten::mm": 9}
    found = {"streams_waited_for": 1, "copies_to_host": 2, "values_read": 0, "launches": 10, "operators": 3}
    assert counted(seen) == found
    assert [waits_at_most(most, True, found) for most in (1, 2)] == [False, True]
    assert not waits_at_most(2, True, {**found, "launches": 0})
    output = "..F\nFAILED tests/gpu/test_cuda.py::test_a[fp32] - Assertion\n1 failed, 2 passed, 3 skipped in 4.00s"
    assert suite_figures(output) == {"passed": 2, "skipped": 3, "not_passed": ["test_cuda.py::test_a[fp32]"]}
    assert suite_figures("\n61 passed in 4.00s\n") == {"passed": 61, "skipped": 0, "not_passed": []}
    assert suite_figures("INTERNALERROR> no option")["not_passed"] == ["INTERNALERROR> no option"]


def test_peers_have_the_most_rows_that_stay_under_the_cap():
    sizes = replace(SIZES["llama-3.1-8b"], cap_tokens=100, effective_rows=8)
    lengths = [10, 40, 10, 40, 30, 20, 10, 10]
    assert rows_under_cap(lengths, "fixed", sizes) == 2
    assert rows_under_cap(lengths, "padding_free", sizes) == 4
    assert rows_under_cap([60, 60, *[1] * 6], "fixed", sizes) == 1


def test_the_arithmetic_of_a_token_is_that_of_the_weights_that_multiply_and_of_attention():
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False)
    products = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    norms = 5 * 32
    assert flops_per_token(model, 10) == 4 * (products + norms) + 6 * 10 * 32 * 2
