"""A run that is stopped anywhere and continued is the run that was never stopped, early stopping included."""

import json
import threading
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file
from torch import equal

import brim

NUM_STEPS = 10  # of the run below: the best at step 4, then three evaluations that are no better


class StopAfter:
    """An observer that asks for a stop after a step, as Ctrl-C would."""

    def __init__(self, step):
        self.step, self.event = step, threading.Event()

    def start(self, *, first_step, total_steps, total_samples): ...

    def write(self, record):
        if record["step"] == self.step:
            self.event.set()

    def close(self): ...

    @contextmanager
    def request(self):
        yield self.event


@pytest.fixture(scope="module")
def settings(tiny_base):
    return {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.1},
        "preprocessing": {"split": "fixed"},
        "trainer": {
            "type": "finetune",
            "epochs": 30,
            "batch_size": 4,
            "learning_rate": 0.3,
            "steps_per_checkpoint": 2,
            "early_stop": 3,
        },
    }


@pytest.fixture(scope="module")
def rows():
    """As the fixture `sums`, for the whole module."""
    numbers = range(40)
    return {
        "question": [f"add {n % 7} and {n % 11} =" for n in numbers],
        "answer": [f" {n % 7 + n % 11}" * (1 + n % 3) for n in numbers],
        "split": [0 if n % 10 < 7 else 1 if n % 10 == 7 else 2 for n in numbers],
    }


@pytest.fixture(scope="module")
def whole(settings, rows, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    result = brim.Model(settings).train(rows, output_directory=run)
    assert (result.num_steps, result.best_step) == (NUM_STEPS, NUM_STEPS - 3 * 2)
    return result


def told(run):
    """The log's figures, without times and without where checkpoints were written."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name not in ("seconds", "peak_bytes")}
        for record in records
        if record.get("event") != "checkpoint"
    ]


@pytest.mark.parametrize("step", range(1, NUM_STEPS))
def test_a_stop_after_any_step_changes_nothing(settings, rows, whole, tmp_path, monkeypatch, step):
    run, stop = tmp_path / "run", StopAfter(step)
    with monkeypatch.context() as patch:
        patch.setattr("brim.workflows.training.training.stop_request", stop.request)
        with pytest.raises(KeyboardInterrupt, match=f"stopped after step {step}\n"):
            brim.Model(settings).train(rows, output_directory=run, observer=stop)
    result = brim.Model(settings).train(rows, output_directory=run, resume=True)
    assert (result.num_steps, result.best_step) == (whole.num_steps, whole.best_step)
    assert result.metrics == whole.metrics
    assert told(run) == told(whole.output_directory)
    weights, expected = (
        load_file(folder / "model" / "adapter_model.safetensors") for folder in (run, whole.output_directory)
    )
    assert weights.keys() == expected.keys()
    assert all(equal(weights[name], expected[name]) for name in expected)
