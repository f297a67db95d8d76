"""What metrics.jsonl says of a run, against sums by hand."""

import json
import math

import pytest
from hypothesis import given, strategies as st

from brim.train import Curve, RunFigures, binned, run_figures
from brim.train.figures import MOST_POINTS


def step(number, loss, *, tokens, supervised, seconds=0.5, peak=100):
    return {
        "step": number,
        "split": "train",
        "loss": loss,
        "learning_rate": 0.1,
        "num_samples": 4 * number,
        "num_tokens": tokens,
        "num_supervised_tokens": supervised,
        "seconds": seconds,
        "peak_bytes": peak,
    }


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def metrics(tmp_path):
    evaluation = {"split": "validation", "num_supervised_tokens": 7, "seconds": 9.0}
    return write(
        tmp_path / "metrics.jsonl",
        [
            step(1, 4.0, tokens=10, supervised=4, peak=300),
            {"step": 1, "event": "schedule", "before": 2, "effective_batch_size": 4, "reason": "ramp"},
            step(2, 3.0, tokens=30, supervised=10),
            {"step": 2, **evaluation, "loss": 3.5},
            {"step": 2, "split": "train", "event": "evaluation", "loss": 9.0},
            {"step": 2, "event": "checkpoint"},
            {
                "step": 3,
                "event": "skipped",
                "cause": "loss",
                "rows": [],
                "num_samples": 12,
                "num_tokens": 70,
                "num_supervised_tokens": 26,
            },
            step(4, None, tokens=90, supervised=30),
            {"step": 4, "event": "point", "loss": 2.5, "num_samples": 8, "num_tokens": 60, "num_steps": 2},
            step(5, 2.0, tokens=95, supervised=32),
            step(6, 1.0, tokens=100, supervised=38, seconds=0.25),
            {"step": 6, **evaluation, "loss": 2.25},
            {"step": 6, "split": "test", "loss": 2.75, "num_supervised_tokens": 5},
        ],
    )


def test_totals_and_final_losses(metrics):
    found = run_figures(metrics)
    assert found.losses == {"train": (2.0 * 2 + 1.0 * 6) / 8, "validation": 2.25, "test": 2.75}
    assert found.evaluated_tokens == {"validation": 7, "test": 5}
    assert (found.num_steps, found.num_samples, found.num_tokens, found.num_supervised_tokens) == (6, 24, 100, 38)
    assert (found.num_skipped, found.seconds, found.peak_bytes) == (1, 2.25, 300)


def test_curves(metrics):
    found = run_figures(metrics)
    assert found.train_curve == Curve(tokens=(10, 30, 95, 100), loss=(4.0, 3.0, 2.0, 1.0), weights=(4, 6, 2, 6))
    assert found.validation_curve == Curve(tokens=(30, 100), loss=(3.5, 2.25), weights=(7, 7))


def test_a_last_step_that_was_left_out_consumed_its_rows(tmp_path):
    counts = {"num_samples": 8, "num_tokens": 30, "num_supervised_tokens": 10}
    records = [
        step(1, 4.0, tokens=10, supervised=4),
        {"step": 2, "event": "skipped", "cause": "loss", "rows": [1], **counts},
        {"step": 2, "split": "validation", "loss": 3.5, "num_supervised_tokens": 7},
    ]
    found = run_figures(write(tmp_path / "metrics.jsonl", records))
    assert (found.num_steps, found.num_samples, found.num_tokens, found.num_supervised_tokens) == (2, 8, 30, 10)
    assert found.train_curve == Curve(tokens=(10,), loss=(4.0,), weights=(4,))
    assert found.validation_curve.tokens == (30,)


def test_the_losses_of_a_run_that_fell_apart_are_no_numbers(tmp_path):
    lost = {"step": 1, "split": "validation", "loss": None, "num_supervised_tokens": 7}
    found = run_figures(write(tmp_path / "m", [step(1, None, tokens=1, supervised=1), lost]))
    assert math.isnan(found.losses["train"])
    assert math.isnan(found.losses["validation"])
    assert found.train_curve.tokens == found.validation_curve.tokens == ()
    assert RunFigures.of_json(json.loads(json.dumps(found.as_json()))).as_json() == found.as_json()


def test_json_and_back(metrics):
    found = run_figures(metrics)
    assert RunFigures.of_json(json.loads(json.dumps(found.as_json()))) == found


def test_a_log_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no step"):
        run_figures(write(tmp_path / "m", [{"step": 1, "event": "checkpoint"}]))


def test_long_curves_are_thinned(tmp_path):
    evaluations = [
        {"step": n, "split": "validation", "loss": float(n), "num_supervised_tokens": 1} for n in range(1, 1001)
    ]
    steps = [step(n, float(n), tokens=10 * n, supervised=n) for n in range(1, 1001)]
    found = run_figures(write(tmp_path / "m", [*steps, *evaluations]))
    assert len(found.train_curve.tokens) == MOST_POINTS
    assert found.train_curve.loss[0] == 3.0  # steps 1 to 5
    assert found.validation_curve.tokens == tuple(range(50, 10001, 50))


points = st.lists(st.tuples(st.integers(1, 1000), st.floats(-10, 10), st.integers(1, 100)), min_size=1, max_size=60)


@given(points, st.integers(1, 40))
def test_bins_keep_the_mean_and_the_end(drawn, num_bins):
    tokens = [sum(each[0] for each in drawn[: number + 1]) for number in range(len(drawn))]
    curve = Curve(tokens=tuple(tokens), loss=tuple(each[1] for each in drawn), weights=tuple(each[2] for each in drawn))
    found = binned(curve, num_bins=num_bins)
    assert len(found.tokens) <= num_bins
    assert found.tokens[-1] == curve.tokens[-1]
    assert list(found.tokens) == sorted(set(found.tokens))
    assert sum(found.weights) == sum(curve.weights)
    total = [sum(loss * weight for loss, weight in zip(c.loss, c.weights, strict=True)) for c in (curve, found)]
    assert total[0] == pytest.approx(total[1], abs=1e-6)
