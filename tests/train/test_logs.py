"""metrics.jsonl over interrupted runs, what it says of a run, what TensorBoard shows, and peaks against predictions."""

import json
import math
import struct
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from brim.batching import MicroBatch
from brim.errors import WriteError
from brim.train import Curve, Peak, RunFigures
from brim.train.figures import MOST_POINTS
from brim.train.logs import MetricsLog, Peaks, TensorBoardLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def started(path, mark=None, first_step=0):
    log = MetricsLog(path, mark)
    log.start(first_step=first_step, total_steps=4, total_samples=4)
    return log


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_resumed_run_writes_each_step_once(path):
    log = started(path)
    for step in (1, 2, 3):
        log.write({"step": step, "split": "train", "loss": 1.0})
    log.write({"step": 3, "split": "test", "loss": 2.0, "perplexity": float("inf")})
    # A record can be read before the log is closed, and what is no number is null.
    assert lines(path)[-1] == {"step": 3, "split": "test", "loss": 2.0, "perplexity": None}
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "spl')
    log.start(first_step=2, total_steps=4, total_samples=4)
    log.write({"step": 3, "split": "train", "loss": float("nan")})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 1.0), (3, None)]


def begun(path):
    """A log of two steps and how far it had come at its checkpoint, with a line after that."""
    log = started(path)
    for step in (1, 2):
        log.write({"step": step, "split": "train", "loss": 1.5})
    mark = log.sync()
    log.write({"step": 2, "event": "checkpoint"})
    log.close()
    return mark


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (b"1.5", b"7.5", [1, 2, 2]),
        (b'"step": 1', b'"step": \xff', [2, 2]),
        (b'{"step": 1, "split": "train", "loss": 1.5}\n', b"", [2, 2]),
        (b"\n", b"", [2]),
    ],
)
def test_a_log_that_was_changed_is_known_by_its_digest_and_lines_that_cannot_be_read_go(path, old, new, kept):
    mark = begun(path)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    log = started(path, mark, first_step=2)
    log.close()
    assert log.was_damaged
    assert [line["step"] for line in lines(path)] == kept


def test_a_log_that_is_what_it_was_one_that_is_gone_and_one_that_cannot_be_written(path, tmp_path):
    mark = begun(path)
    for _ in range(2):
        log = started(path, mark, first_step=2)
        assert not log.was_damaged
        assert log.sync()["num_bytes"] == path.stat().st_size
        log.close()
    log = started(tmp_path / "other.jsonl", mark, first_step=2)
    log.close()
    assert log.was_damaged
    with pytest.raises(
        WriteError, match=r"metrics.jsonl could not be written: No such file or directory\n  fix: make ro"
    ):
        started(tmp_path / "nowhere" / "metrics.jsonl")


def test_a_log_whose_last_lines_cannot_be_written_is_closed_all_the_same(path, clock):
    log = started(path)
    for number in (1, 2):  # the second waits
        log.write(step(number, 1.0, tokens=10, supervised=4))
    file = log._file
    log._file = Mock(wraps=file, write=Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(WriteError, match="No space left on device"):
        log.close()
    assert file.closed
    log.close()


# What it says of a run, against sums by hand


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
    consumed = {"num_samples": 12, "num_tokens": 70, "num_supervised_tokens": 26}
    return write(
        tmp_path / "metrics.jsonl",
        [
            step(1, 4.0, tokens=10, supervised=4, peak=300),
            {"step": 1, "event": "schedule", "before": 2, "effective_batch_size": 4, "reason": "ramp"},
            step(2, 3.0, tokens=30, supervised=10),
            {"step": 2, **evaluation, "loss": 3.5},
            {"step": 2, "split": "train", "event": "evaluation", "loss": 9.0},
            {"step": 2, "event": "checkpoint"},
            {"step": 3, "event": "skipped", "cause": "loss", "rows": [], **consumed},
            step(4, None, tokens=90, supervised=30),
            {"step": 4, "event": "point", "loss": 2.5, "num_samples": 8, "num_tokens": 60, "num_steps": 2},
            step(5, 2.0, tokens=95, supervised=32),
            step(6, 1.0, tokens=100, supervised=38, seconds=0.25),
            {"step": 6, **evaluation, "loss": 2.25},
            {"step": 6, "split": "test", "loss": 2.75, "num_supervised_tokens": 5},
        ],
    )


def test_totals_final_losses_and_curves(metrics):
    found = RunFigures.of(metrics)
    assert found.losses == {"train": (2.0 * 2 + 1.0 * 6) / 8, "validation": 2.25, "test": 2.75}
    assert found.evaluated_tokens == {"validation": 7, "test": 5}
    assert (found.num_steps, found.num_samples, found.num_tokens, found.num_supervised_tokens) == (6, 24, 100, 38)
    assert (found.num_skipped, found.seconds, found.peak_bytes) == (1, 2.25, 300)
    assert found.train_curve == Curve(tokens=(10, 30, 95, 100), loss=(4.0, 3.0, 2.0, 1.0), weights=(4, 6, 2, 6))
    assert found.validation_curve == Curve(tokens=(30, 100), loss=(3.5, 2.25), weights=(7, 7))
    assert RunFigures.of_json(json.loads(json.dumps(found.as_json()))) == found


def test_runs_that_fell_apart_ended_with_a_skipped_step_have_no_steps_and_of_many(path):
    counts = {"num_samples": 8, "num_tokens": 30, "num_supervised_tokens": 10}
    skipped = {"step": 2, "event": "skipped", "cause": "loss", "rows": [1], **counts}  # it consumed its rows
    evaluated = {"step": 2, "split": "validation", "loss": 3.5, "num_supervised_tokens": 7}
    found = RunFigures.of(write(path, [step(1, 4.0, tokens=10, supervised=4), skipped, evaluated]))
    assert (found.num_steps, found.num_samples, found.num_tokens, found.num_supervised_tokens) == (2, 8, 30, 10)
    assert (found.train_curve.tokens, found.validation_curve.tokens) == ((10,), (30,))
    lost = {"step": 1, "split": "validation", "loss": None, "num_supervised_tokens": 7}
    found = RunFigures.of(write(path, [step(1, None, tokens=1, supervised=1), lost]))
    assert math.isnan(found.losses["train"])
    assert math.isnan(found.losses["validation"])
    assert found.train_curve.tokens == found.validation_curve.tokens == ()
    assert RunFigures.of_json(json.loads(json.dumps(found.as_json()))).as_json() == found.as_json()
    with pytest.raises(ValueError, match="no step"):
        RunFigures.of(write(path, [{"step": 1, "event": "checkpoint"}]))
    steps = [step(n, float(n), tokens=10 * n, supervised=n) for n in range(1, 1001)]
    evaluations = [{**lost, "step": n, "loss": float(n)} for n in range(1, 1001)]
    found = RunFigures.of(write(path, [*steps, *evaluations]))
    assert len(found.train_curve.tokens) == MOST_POINTS  # it is thinned
    assert found.train_curve.loss[0] == 3.0  # steps 1 to 5
    assert found.validation_curve.tokens == tuple(range(50, 10001, 50))


points = st.lists(st.tuples(st.integers(1, 1000), st.floats(-10, 10), st.integers(1, 100)), min_size=1, max_size=60)


@given(points, st.integers(1, 40))
def test_bins_keep_the_mean_and_the_end(drawn, num_bins):
    tokens = [sum(each[0] for each in drawn[: number + 1]) for number in range(len(drawn))]
    curve = Curve(tokens=tuple(tokens), loss=tuple(each[1] for each in drawn), weights=tuple(each[2] for each in drawn))
    found = curve.binned(num_bins)
    assert len(found.tokens) <= num_bins
    assert found.tokens[-1] == curve.tokens[-1]
    assert list(found.tokens) == sorted(set(found.tokens))
    assert sum(found.weights) == sum(curve.weights)
    total = [sum(loss * weight for loss, weight in zip(c.loss, c.weights, strict=True)) for c in (curve, found)]
    assert total[0] == pytest.approx(total[1], abs=1e-6)


# TensorBoard's files say what metrics.jsonl says


def scalars(folder):
    """{(tag, step): value} as TensorBoard shows it: in the order of the files; a restarted session hides what its steps replace."""
    shown = {}
    for file in sorted(folder.iterdir()):
        data, position = file.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            event = Event.FromString(data[position + 12 : position + 12 + length])
            position += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            assert len(event.summary.value) != 1, "one event a record, not one a scalar: each has its price"
            for value in event.summary.value:
                assert (value.tag, event.step) not in shown
                shown[value.tag, event.step] = value.simple_value
    return shown


def logged(run):
    """The same from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (f"{record['split']}/{name}", record["step"]): value
        for record in records
        if "event" not in record
        for name, value in record.items()
        if name not in ("step", "split")
    }


@pytest.mark.run
def test_tensorboard_shows_what_metrics_jsonl_holds(gallery):
    run = gallery("lora").run
    shown = scalars(run / "tensorboard")
    assert [step for tag, step in shown if tag == "train/loss"] == list(range(1, 9))
    assert [step for tag, step in shown if tag == "validation/loss"] == [4, 8]
    assert [step for tag, step in shown if tag == "test/loss"] == [8]
    assert shown == pytest.approx(logged(run), rel=1e-6)


def test_a_session_that_goes_on_hides_what_an_interrupted_one_wrote_after_its_checkpoint(tmp_path):
    for first, last, loss in ((0, 5, 1.0), (3, 8, 2.0)):
        log = TensorBoardLog(tmp_path)
        log.start(first_step=first, total_steps=8, total_samples=32)
        for number in range(first + 1, last + 1):
            log.write(step(number, loss, tokens=10, supervised=4))
        log.close()
        assert ("train/loss", last) in scalars(tmp_path)
    losses = {number: value for (tag, number), value in scalars(tmp_path).items() if tag == "train/loss"}
    assert losses == {number: 1.0 if number <= 3 else 2.0 for number in range(1, 9)}


def test_events_are_written_together_and_no_record_of_a_run_that_ends_is_left_behind(tmp_path, monkeypatch):
    """Written one by one, events took more of a small model's step than all other logs."""
    written, write = [], EventsWriter.write_event
    monkeypatch.setattr(EventsWriter, "write_event", lambda self, event: written.append(event) or write(self, event))
    log = TensorBoardLog(tmp_path)
    log.start(first_step=0, total_steps=600, total_samples=2400)
    log.write(step(1, 1.0, tokens=10, supervised=4))
    assert "train/loss" in {tag for tag, _ in scalars(tmp_path)}, "the first record is shown at once"
    del written[:]
    for number in range(2, 601):
        log.write(step(number, 1.0, tokens=10, supervised=4))
        assert len(written) in (0, 256, 512)
    assert len(written) == 512, "some thousands of steps in 30 s are not held until then"
    times = [event.wall_time for event in written]
    assert times == sorted(times)
    assert times[0] < times[-1], "each has its own time"
    log.sync()
    assert len(written) == 599
    log.write(step(601, 1.0, tokens=10, supervised=4))
    log.close()
    assert [number for tag, number in scalars(tmp_path) if tag == "train/loss"] == list(range(1, 602))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr("brim.train.logs.time.monotonic", lambda: now[0])
    return now


def test_lines_of_quick_steps_are_written_together_and_all_else_does_not_wait(path, clock):
    """Written one by one, they took more of a small model's step than all else of the loop."""
    log = MetricsLog(path)
    log.start(first_step=0, total_steps=600, total_samples=2400)
    for number in range(1, 601):
        log.write(step(number, 1.0, tokens=10, supervised=4))
    assert [line["step"] for line in lines(path)] == [1], "the first step is shown at once, others wait for 0.2 s"
    clock[0] += 0.3
    log.write(step(601, 1.0, tokens=10, supervised=4))
    assert [line["step"] for line in lines(path)] == list(range(1, 602))
    log.write(step(602, 1.0, tokens=10, supervised=4))
    log.write({"step": 602, "event": "checkpoint"})
    assert [line["step"] for line in lines(path)[601:]] == [602, 602], "an event does not wait, nor do those before it"
    log.write(step(603, 1.0, tokens=10, supervised=4))
    assert log.sync()["num_bytes"] == path.stat().st_size
    log.write(step(604, 1.0, tokens=10, supervised=4))
    log.close()
    assert [line["step"] for line in lines(path)[603:]] == [603, 604]


def test_a_record_that_waits_is_written_as_it_was_given(path, clock):
    log = MetricsLog(path)
    log.start(first_step=0, total_steps=2, total_samples=8)
    for number in (1, 2):
        record = step(number, 1.0, tokens=10, supervised=4)
        log.write(record)
        record["loss"] = 9.0
    log.close()
    assert [line["loss"] for line in lines(path)] == [1.0, 1.0]


# What steps took against what was predicted


def micro_batch(rows, length, peak_bytes):
    return MicroBatch(rows=np.arange(rows), padded_length=length, peak_bytes=peak_bytes)


def test_the_largest_measured_peak_of_a_shape_is_kept_and_what_was_the_most_so_far_outlives_the_counter(monkeypatch):
    counted = [0]  # of a CUDA device's allocated bytes
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: counted[0])
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: counted.__setitem__(0, 100))
    peaks, most = Peaks(torch.device("cuda")), []
    for measured, shapes in [(700, [(2, 9, 600), (3, 4, 500)]), (650, [(2, 9, 600)]), (300, [(4, 1, 310)])]:
        peaks.begin()
        counted[0] = measured
        most.append(peaks.most_bytes())
        peaks.end(micro_batch(*shape) for shape in shapes)
    assert peaks.by_shape() == (
        Peak(rows=2, padded_length=9, predicted_bytes=600, measured_bytes=700),
        Peak(rows=4, padded_length=1, predicted_bytes=310, measured_bytes=300),
    )
    peaks.begin()
    counted[0] = 900
    assert [*most, peaks.most_bytes()] == [700, 700, 700, 900]
    peaks.begin()
    assert peaks.most_bytes() == 900
    without_predictions = Peaks(torch.device("cpu"))
    without_predictions.begin()
    without_predictions.end([micro_batch(2, 9, None)])
    assert without_predictions.by_shape() == ()
    assert without_predictions.most_bytes() > 0
