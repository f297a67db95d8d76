"""metrics.jsonl over interrupted and resumed runs."""

import json

import pytest

from brim.errors import WriteError
from brim.train import MetricsLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_writes_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.start(first_step=0, total_steps=4, total_samples=4)
    for step in (1, 2, 3):
        log.write({"step": step, "split": "train", "loss": 1.0})
    log.write({"step": 3, "split": "test", "loss": 2.0})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "spl')
    log.start(first_step=2, total_steps=4, total_samples=4)
    log.write({"step": 3, "split": "train", "loss": 5.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 1.0), (3, 5.0)]


def test_a_record_can_be_read_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start(first_step=0, total_steps=1, total_samples=1)
    log.write({"step": 1, "event": "checkpoint"})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "event": "checkpoint"}]
    log.close()


def test_what_is_no_number_is_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start(first_step=0, total_steps=1, total_samples=1)
    log.write({"step": 1, "split": "validation", "loss": float("nan"), "perplexity": float("inf")})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "split": "validation", "loss": None, "perplexity": None}]


def begun(path):
    """A log of two steps and how far it had come at its checkpoint, with a line after that."""
    log = MetricsLog(path)
    log.start(first_step=0, total_steps=4, total_samples=4)
    for step in (1, 2):
        log.write({"step": step, "split": "train", "loss": 1.5})
    mark = log.sync()
    log.write({"step": 2, "event": "checkpoint"})
    log.close()
    return mark


def test_a_log_that_is_what_it_was_is_not_called_damaged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    mark = begun(path)
    for _ in range(2):
        log = MetricsLog(path, mark)
        log.start(first_step=2, total_steps=4, total_samples=4)
        assert not log.was_damaged
        assert log.sync()["num_bytes"] == path.stat().st_size
        log.close()


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (b"1.5", b"7.5", [1, 2, 2]),
        (b'"step": 1', b'"step": \xff', [2, 2]),
        (b'{"step": 1, "split": "train", "loss": 1.5}\n', b"", [2, 2]),
        (b"\n", b"", [2]),
    ],
)
def test_a_log_that_was_changed_is_known_by_its_digest_and_lines_that_cannot_be_read_go(tmp_path, old, new, kept):
    path = tmp_path / "metrics.jsonl"
    mark = begun(path)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    log = MetricsLog(path, mark)
    log.start(first_step=2, total_steps=4, total_samples=4)
    log.close()
    assert log.was_damaged
    assert [line["step"] for line in lines(path)] == kept


def test_a_log_that_is_gone_is_known(tmp_path):
    mark = begun(tmp_path / "metrics.jsonl")
    log = MetricsLog(tmp_path / "other.jsonl", mark)
    log.start(first_step=2, total_steps=4, total_samples=4)
    log.close()
    assert log.was_damaged


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(
        WriteError, match=r"metrics.jsonl could not be written: No such file or directory\n  fix: make ro"
    ):
        MetricsLog(tmp_path / "nowhere" / "metrics.jsonl").start(first_step=0, total_steps=1, total_samples=1)
