"""Events of a run in one line."""

import pytest

from brim.report.progress import event_line

OUT = {"step": 1200, "event": "oom", "where": "backward", "rows": [7, 9], "padded_length": 2048, "message": "…"}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {**OUT, "micro_batch": 3, "num_micro_batches": 4, "predicted_bytes": 3 * 2**30},
            "step 1,200  memory ran out: backward, 2 rows of up to 2,048 tokens (predicted: 3.0 GiB)",
        ),
        (
            {**OUT, "rows": [7], "micro_batch": 3, "num_micro_batches": 4, "predicted_bytes": None},
            "step 1,200  memory ran out: backward, 1 row of up to 2,048 tokens",
        ),
        (
            {**OUT, "where": "evaluation", "rows_at_once": 1},
            "step 1,200  memory ran out: evaluation, 2 rows of up to 2,048 tokens; from now on 1 together",
        ),
        (
            {**OUT, "where": "evaluation", "cap_bytes": 3 * 2**30},
            "step 1,200  memory ran out: evaluation, 2 rows of up to 2,048 tokens; from now on in batches of up to 3.0 GiB",
        ),
        (
            {"step": 6, "event": "oom", "where": "checkpoint", "message": "…"},
            "step 6  memory ran out: checkpoint; tried once more",
        ),
        ({"step": 6, "event": "replay", "num_micro_batches": 5}, "step 6  begun anew, in 5 micro-batches"),
        ({"step": 6, "event": "replay", "num_micro_batches": 1}, "step 6  begun anew, in 1 micro-batch"),
        (
            {"step": 6, "event": "cap", "before": 3 * 2**30, "after": 2**30, "unit": "bytes"},
            "step 6  limit of a micro-batch: 3.0 GiB -> 1.0 GiB",
        ),
        (
            {"step": 6, "event": "cap", "before": 4, "after": 2, "unit": "rows"},
            "step 6  limit of a micro-batch: 4 rows -> 2 rows",
        ),
        ({"step": 6, "event": "skipped", "cause": "loss", "rows": [1]}, "step 6  skipped"),
        ({"step": 6, "event": "checkpoint"}, None),
    ],
)
def test_each_event_is_a_line(record, line):
    assert event_line(record) == line
