"""The benchmarks of memory: the grid on a GPU and a CPU, figures that people know, and the peaks of a ramp."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby

import pytest
from benchmarks.memory_cases import ARCHITECTURES, Case, architecture_of, grid, small, varying
from benchmarks.memory_comparison import Comparison, Pair, compared
from benchmarks.memory_cpu import GOAL, Figure, summary
from benchmarks.memory_gpu import Options, measure
from benchmarks.memory_known import GIB, KNOWN, agrees, explained, nested
from benchmarks.ramp_memory import PhasePeak, by_phase, settings, spread
from tests.report.hand_made import hand_made_prediction

from benchmarks import memory_gpu, memory_worker
from brim.config import load_config
from brim.memory.devices import find_device

linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set's peak is read from /proc")
ALL = list(grid())


def test_each_case_is_a_valid_configuration_within_the_context_and_small_ones_keep_its_kind(tmp_path):
    same = ("architecture", "method", "precision", "checkpointing", "num_micro_batches", "num_steps", "records", "does")
    assert len({case.name for case in ALL}) == len(ALL)
    for case in ALL:
        load_config({"base_model": str(tmp_path), **case.settings()})
        config = ARCHITECTURES[case.architecture]
        context = config.get("n_positions") or config["max_position_embeddings"]
        assert max(max(step) for step in case.lengths()) + case.new_tokens <= context, case.name
        assert all(len(step) == case.rows * case.num_micro_batches for step in case.lengths()), case.name
        shrunk = small(case)
        assert max(max(step) for step in shrunk.lengths()) <= 32, case.name
        assert all(getattr(shrunk, name) == getattr(case, name) for name in same), case.name
        assert len(shrunk.lengths()) == len(case.lengths()), case.name
    for case in {case.architecture: case for case in ALL}.values():
        shrunk, whole = architecture_of(case, small=True), architecture_of(case, small=False)
        assert set(shrunk) == set(whole)
        for key in ("tie_word_embeddings", "num_local_experts"):
            assert shrunk.get(key) == whole.get(key)
    assert varying(rows=2, longest=100)[:3] == ((31, 31), (12, 12), (55, 55))


def in_this_process(requests, results, device, look):
    memory_worker.run_cases(requests, results, memory_worker.torch.device(device), rehearses=True)
    return 0


@linux
@pytest.mark.run
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


@linux
@pytest.mark.run
def test_each_operator_of_a_step_is_recorded_with_its_phase_and_module(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_worker, "allocator_record", lambda device: nullcontext([]))
    case = small(
        Case(architecture="qwen2-0.5b", method="lora", precision="fp32", rows=2, tokens=64, num_micro_batches=2)
    )
    config, cpu = memory_gpu.architecture_of(case, small=True), memory_worker.torch.device("cpu")
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = memory_gpu._request(case, tmp_path, config, "cpu")
    bench = memory_worker.load_bench(request, cpu, memory_worker.meter_of(cpu))
    recorder = memory_worker.Recorder(cpu)
    recorder._write = None
    with recorder.watching(bench.llm.model):
        bench.run()
    phases = [phase for phase, _ in groupby(place.phase for place in recorder._operators)]
    assert phases[:10] == ["forward", "backward", "forward", "backward", "optimizer"] * 2
    for phase in ("forward", "backward"):
        found = [place for place in recorder._operators if place.phase == phase]
        assert any(place.layer == 1 and place.module.endswith("layers.1.mlp.up_proj") for place in found), phase


def figure(shape, live_bytes, measured_bytes):
    return Figure(shape=shape, baseline_bytes=1000, live_bytes=(live_bytes,), measured_bytes=(measured_bytes,))


def test_the_summaries_are_of_absolute_errors_and_the_probe_gives_the_constant_for_the_others():
    pairs = tuple(
        Pair(case="a", figure="train 1 allocated", measured=100, predicted=predicted) for predicted in (99, 103, 100)
    )
    found = Comparison(pairs=pairs, missing=()).summary()["allocated"]
    assert (found["pairs"], round(found["median_error"], 6), round(found["largest_error"], 6)) == (3, 0.01, 0.03)
    found = summary([figure("probe", 1000, 2100), figure("a", 3000, 4100), figure("b", 5000, 6150)], kept=[])
    assert (found["constant_bytes"], found["goal"]) == (100, GOAL)
    assert found["error"]["largest"] == pytest.approx(100 / 2100)
    assert found["error_calibrated"]["largest"] == pytest.approx(50 / 6150)


def test_the_command_of_a_known_figure_is_its_settings_and_another_figure_is_explained_on_their_screen():
    assert len({known.name for known in KNOWN}) == len(KNOWN) == 10
    assert len({known.source for known in KNOWN}) >= 4
    for known in KNOWN:
        mapping = nested({"base_model": "base", "trainer.type": "finetune", **known.keys})
        base = {"base_model": "base", "trainer": {"type": "finetune"}}
        if "adapter.type" in known.keys:
            base["adapter"] = "lora"
        assert load_config(base, overrides=known.overrides).config == load_config(mapping).config, known.name
        assert find_device(known.device).name == known.device
        assert f"--device {known.device}" in known.command
        keys = {
            "quantization_bits": known.keys.get("quantization.bits"),
            "gradient_checkpointing": known.keys.get("trainer.enable_gradient_checkpointing"),
        }
        shown = hand_made_prediction(batch_size=known.rows, sequence_length=known.tokens, **keys)
        assert explained(known, shown) == bool(known.why), known.name
        assert not explained(known, hand_made_prediction(batch_size=1, gradient_checkpointing=True))


def test_a_tenth_is_agreement_and_a_card_is_one_that_has_room():
    measured = next(known for known in KNOWN if known.kind == "allocated")
    near, far = round(1.09 * measured.num_bytes), round(1.11 * measured.num_bytes)
    assert agrees(measured, hand_made_prediction(allocated_bytes=near))
    assert not agrees(measured, hand_made_prediction(allocated_bytes=far))
    card = next(known for known in KNOWN if known.kind == "card")
    assert agrees(card, hand_made_prediction(total_bytes=47 * GIB, fits=True))
    assert not agrees(card, hand_made_prediction(total_bytes=47 * GIB, fits=False))


def test_the_first_step_of_a_ramps_phase_is_left_out_and_the_spread_is_over_the_smallest(tmp_path):
    trainer = load_config(settings(tmp_path, stage_samples=512)).config.trainer
    assert (trainer.batch_rampup.length, trainer.batch_rampup.initial) == ("3072sp", 8)
    assert (trainer.effective_batch_size, trainer.train_samples) == (512, 4096)
    steps = [(8, 2, 900), (8, 3, 500), (8, 2, 520), (16, 4, 700), (512, 60, 100), (512, 61, 510)]
    assert by_phase(steps, beside_bytes=400) == [
        PhasePeak(effective_batch_size=8, num_steps=2, most_micro_batches=3, peak_bytes=520, tensor_bytes=120),
        PhasePeak(effective_batch_size=512, num_steps=1, most_micro_batches=61, peak_bytes=510, tensor_bytes=110),
    ]
    assert spread([100, 104, 103]) == pytest.approx(0.04)
