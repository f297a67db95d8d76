"""The public measurements: how they are read, predicted and judged; `python -m benchmarks.memory_public --data DIR`."""

import csv
import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from benchmarks.memory_public.__main__ import main
from benchmarks.memory_public.judge import Judged, verdicts
from benchmarks.memory_public.losses import chunks
from benchmarks.memory_public.predict import predict_row
from benchmarks.memory_public.rows import read_rows
from benchmarks.memory_public.workloads import MeasuredRun, NotTracedError

ROWS = {row.id: row for row in read_rows()}
predicted_of = cache(predict_row)


def test_every_measured_run_is_read_with_how_it_was_run():
    groups = [(row.group, row.ran) for row in ROWS.values()]
    assert len(ROWS) == 184
    assert groups.count(("full and LoRA, one GPU", True)) == 23
    assert groups.count(("4-bit, one GPU", True)) == 34
    assert groups.count(("FSDP on 2 and 4 GPUs", True)) == 59
    assert sum(not row.ran for row in ROWS.values()) == 50
    stock, liger = ROWS["FMS-A034"], ROWS["FMS-L119"]
    assert (stock.loss, stock.transformers, stock.precision) == ("stock", (4, 48), "no AMP")
    assert (liger.loss, liger.transformers, liger.precision, liger.batch_size) == ("liger", (4, 45), "bf16", 8)
    assert (ROWS["FMS-A058"].prepared_for_kbit, stock.prepared_for_kbit) == (True, False)
    assert (stock.nvidia_smi_mib, liger.nvidia_smi_mib) == (29576, None)  # 0 stands for what was not recorded
    with pytest.raises(NotTracedError, match="FMS-A103: fms GPTQ triton-v2"):
        MeasuredRun(ROWS["FMS-A103"])


def test_liger_cuts_tokens_so_that_a_chunks_logits_take_as_much_as_the_inputs():
    # The example in Liger's own comment: 4 × 4,096 tokens, 4,096 wide, 32,000 tokens in the vocabulary.
    assert chunks(16_384, 4_096, 32_000) == [(start, start + 2_048) for start in range(0, 16_384, 2_048)]
    assert chunks(5, 8, 16) == [(0, 4), (4, 5)]


@pytest.mark.parametrize(
    ("row_id", "tolerance_bytes"),
    [
        ("FMS-A036", 512),  # LoRA, stock: in the loss; transformers 5 keeps a second rotary table
        ("FMS-L119", 2**20),  # 4-bit, fused LoRA: in the last layer's backward pass
    ],
)
def test_a_measured_peak_is_predicted(row_id, tolerance_bytes):
    row = ROWS[row_id]
    predicted = predicted_of(row)
    assert abs(predicted.allocated_bytes - row.peak_allocated_bytes) <= tolerance_bytes
    assert abs(predicted.end_allocated_bytes - row.end_allocated_bytes) <= tolerance_bytes
    assert predicted.fits


def test_a_run_that_failed_is_foretold_and_errors_are_relative():
    failed, ran = ROWS["FMS-L113"], ROWS["FMS-L112"]
    assert not failed.ran
    predicted = predicted_of(failed)
    assert predicted.fits is False
    judged = [Judged(row=failed, predicted=predicted), Judged(row=ran, predicted=predicted)]
    by_what = {verdict.what: verdict for verdict in verdicts(judged)}
    assert by_what["runs that failed"].met
    assert by_what["runs that ran"].reached == "1 refused"
    assert not by_what["runs that ran"].met
    assert not by_what["peak allocated, full and LoRA, one GPU"].met

    double = replace(predicted, allocated_bytes=2 * ran.peak_allocated_bytes, end_allocated_bytes=0)
    judged = Judged(row=ran, predicted=double)
    assert (judged.peak_error, judged.end_error) == (1.0, -1.0)
    assert Judged(row=failed, predicted=double).peak_error is None


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "memory_public.json"
TABLES = ("gpu_memory_a100.csv", "gpu_memory_other.csv")
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA, QWEN2 = {"model_type": "llama", **SHAPE}, {"model_type": "qwen2", **SHAPE}
MODELS = {
    "some/llama": LLAMA,
    "some/qwen": QWEN2,
    "some/qwen-GPTQ": {**QWEN2, "quantization_config": {"quant_method": "gptq", "group_size": 32}},
    "Tiny-Llama": LLAMA,
}
RUN = {
    "model": "some/llama", "method": "lora", "quantization": "none", "precision": "bf16 weights; bf16=True",
    "lora_r": 8, "lora_targets": "q_proj k_proj v_proj o_proj", "batch_per_gpu": 2, "sequence_length": 128, "gpus": 1,
    "gpu": "A100-80GB", "kernels": "stock HF", "versions": "torch 2.4.1, transformers 4.48.1", "source_url": "",
    "peak_allocated_bytes": 10**9, "end_allocated_bytes": "", "nvidia_smi_mib": "", "vocabulary_size": "",
}  # fmt: skip
QWEN = {**RUN, "model": "some/qwen", "kernels": "triton fast CE+RMSNorm+RoPE"}
GPTQ = {
    **QWEN, "model": "some/qwen-GPTQ", "method": "qlora", "quantization": "gptq-4bit",
    "precision": "fp16 weights; fp16=True", "kernels": "fms GPTQ triton-v2",
}  # fmt: skip
RUNS = [
    {**RUN, "id": "R1"},
    {**RUN, "id": "R2", "vocabulary_size": 1024},
    {**QWEN, "id": "R3"},
    {**GPTQ, "id": "R4"},
    {**GPTQ, "id": "R5", "gpus": 2},
]
ANSWER = {
    "id": "ANSWER-1", "model": "Tiny-Llama", "method": "qlora", "lora_r": 8, "batch_per_gpu": 1, "seq_len": 128,
    "gpus": "2xRTX3090", "sharding": "FSDP1 FULL_SHARD", "metric": "reserved", "value_gib_or_gb": 1,
}  # fmt: skip


def write(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    for name, config in MODELS.items():
        model = folder / "models" / name.replace("/", "--")
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(config))
    write(folder / TABLES[0], RUNS)
    write(folder / TABLES[1], [ANSWER, {**ANSWER, "id": "OTHER-1", "model": "", "lora_r": "", "gpus": "1xH100"}])
    return folder


def predicted(table):
    """The bytes that are predicted for each row of the table."""
    figures = re.findall(r"^(R\d|ANSWER-1) .*? ([\d,]{5,}) +[\d,]{5,} +[+-]", table, re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in figures}


def test_other_rows_and_architectures_end_in_a_verdict(data, capsys):
    before = RESULTS.read_bytes()
    assert main(["--data", str(data)]) == 1
    table = capsys.readouterr().out
    found = predicted(table)
    assert found.keys() == {"R1", "R2", "R3", "R4", "ANSWER-1"}
    assert found["R2"] > found["R1"]  # which differ in their vocabulary alone
    assert "left out: R5 (GPTQ with FSDP" in table
    assert "MISSED" in table

    write(data / TABLES[0], [{**run, "peak_allocated_bytes": found.get(run["id"], "")} for run in RUNS])
    write(data / TABLES[1], [{**ANSWER, "value_gib_or_gb": found["ANSWER-1"] / 2**30}])
    assert main(["--data", str(data)]) == 0
    table = capsys.readouterr().out
    assert predicted(table) == found
    for what, rows in (("full and LoRA, one GPU", 3), ("4-bit, one GPU", 1)):
        assert re.search(rf"peak allocated, {what} +{rows} +median 0.0000%, largest 0.000% .* met", table)
    assert re.search(r"peak reserved, Answer.AI +1 +median 0.00%, largest 0.00% .* met", table)
    assert "MISSED" not in table
    assert RESULTS.read_bytes() == before


def without_column(data):
    write(data / TABLES[1], [{key: value for key, value in ANSWER.items() if key != "metric"}])


def changed(column, value):
    return lambda data: write(data / TABLES[0], [RUNS[0], {**RUNS[1], column: value}])


BROKEN = {
    "no folder": (shutil.rmtree, r"no such folder: .*data\n  expected: a folder"),
    "no table": (lambda data: (data / TABLES[1]).unlink(), rf"data has no {TABLES[1]}\n"),
    "no column": (without_column, rf"{TABLES[1]}: without the column metric\n"),
    "no model": (lambda data: shutil.rmtree(data / "models" / "some--qwen"), r"no architecture of some/qwen\n"),
    "unknown model": (
        lambda data: (data / "models" / "some--llama" / "config.json").write_text('{"model_type": "nothing"}'),
        r"some--llama/config.json: no config.json of a model that transformers knows: .*nothing",
    ),
    "no number": (changed("gpus", "two"), rf"{TABLES[0]}:3 \(R2\): gpus is 'two'\n"),
    "no method": (changed("method", "dora"), r"\(R2\): method is 'dora'\n  expected: one of full, lora, qlora"),
}


@pytest.mark.parametrize(("breaking", "message"), BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_read_is_one_message(data, capsys, breaking, message):
    breaking(data)
    assert main(["--data", str(data)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(rf"python -m benchmarks\.memory_public: .*?{message}", err.rstrip("\n"))
