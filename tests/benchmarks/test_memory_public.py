"""The public measurements: how they are read and judged, and some of them predicted."""

from dataclasses import replace
from functools import cache

import pytest
from benchmarks.memory_public.judge import Judged, verdicts
from benchmarks.memory_public.losses import chunks
from benchmarks.memory_public.predict import predict_row
from benchmarks.memory_public.rows import read_rows
from benchmarks.memory_public.workloads import MeasuredRun, NotTracedError

ROWS = {row.id: row for row in read_rows()}
predicted_of = cache(predict_row)


def test_every_measured_run_is_read():
    groups = [(row.group, row.ran) for row in ROWS.values()]
    assert len(ROWS) == 184
    assert groups.count(("full and LoRA, one GPU", True)) == 23
    assert groups.count(("4-bit, one GPU", True)) == 34
    assert groups.count(("FSDP on 2 and 4 GPUs", True)) == 59
    assert sum(not row.ran for row in ROWS.values()) == 50


def test_a_row_says_how_it_was_run():
    stock, liger, prepared = ROWS["FMS-A034"], ROWS["FMS-L119"], ROWS["FMS-A058"]
    assert (stock.loss, stock.transformers, stock.precision) == ("stock", (4, 48), "no AMP")
    assert (liger.loss, liger.transformers, liger.precision, liger.batch_size) == ("liger", (4, 45), "bf16", 8)
    assert prepared.prepared_for_kbit
    assert not stock.prepared_for_kbit
    assert stock.nvidia_smi_mib == 29576
    assert liger.nvidia_smi_mib is None  # stands as 0: not recorded


def test_kernels_that_are_not_traced_are_named():
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


def test_a_run_that_failed_is_foretold():
    row = ROWS["FMS-L113"]
    assert not row.ran
    predicted = predicted_of(row)
    assert predicted.fits is False

    judged = [Judged(row=row, predicted=predicted), Judged(row=ROWS["FMS-L112"], predicted=predicted)]
    by_what = {verdict.what: verdict for verdict in verdicts(judged)}
    assert by_what["runs that failed"].met
    assert by_what["runs that ran"].reached == "1 refused"
    assert not by_what["runs that ran"].met
    assert not by_what["peak allocated, full and LoRA, one GPU"].met


def test_errors_are_relative_and_none_where_nothing_was_measured():
    row = ROWS["FMS-L112"]
    predicted = replace(
        predicted_of(ROWS["FMS-L113"]), allocated_bytes=2 * row.peak_allocated_bytes, end_allocated_bytes=0
    )
    judged = Judged(row=row, predicted=predicted)
    assert (judged.peak_error, judged.end_error) == (1.0, -1.0)
    assert Judged(row=ROWS["FMS-L113"], predicted=predicted).peak_error is None
