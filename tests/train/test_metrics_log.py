"""metrics.jsonl over interrupted and resumed runs."""

import json

from brim.train.metrics_log import MetricsLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_writes_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.start(first_step=0, total_steps=4)
    for step in (1, 2, 3):
        log.write({"step": step, "split": "train", "loss": 1.0})
    log.write({"step": 3, "split": "test", "loss": 2.0})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "spl')
    log.start(first_step=2, total_steps=4)
    log.write({"step": 3, "split": "train", "loss": 5.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 1.0), (3, 5.0)]


def test_a_record_can_be_read_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start(first_step=0, total_steps=1)
    log.write({"step": 1, "event": "checkpoint"})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "event": "checkpoint"}]
    log.close()


def test_what_is_no_number_is_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.start(first_step=0, total_steps=1)
    log.write({"step": 1, "split": "validation", "loss": float("nan"), "perplexity": float("inf")})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "split": "validation", "loss": None, "perplexity": None}]
