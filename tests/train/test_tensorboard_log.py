"""TensorBoard's files say what metrics.jsonl says."""

import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

import brim


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


@pytest.fixture
def settings(tiny_base):
    return {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": "lora",
        "preprocessing": {"split": "fixed"},
        "trainer": {"type": "finetune", "train_steps": 8, "batch_size": 4, "steps_per_checkpoint": 3, "early_stop": -1},
    }


class Failing:
    """An observer that fails after a step, as a full disk would."""

    def start(self, *, first_step, total_steps, total_samples): ...

    def write(self, record):
        if record["step"] == 5:
            raise OSError("no room")

    def close(self): ...


def test_tensorboard_shows_what_metrics_jsonl_holds(settings, sums_file, tmp_path):
    brim.Model(settings).train(sums_file, output_directory=tmp_path / "run")
    shown = scalars(tmp_path / "run" / "tensorboard")
    assert [step for tag, step in shown if tag == "train/loss"] == list(range(1, 9))
    assert [step for tag, step in shown if tag == "validation/loss"] == [3, 6, 8]
    assert [step for tag, step in shown if tag == "test/loss"] == [8]
    assert shown == pytest.approx(logged(tmp_path / "run"), rel=1e-6)


def test_a_run_that_failed_and_was_continued_shows_each_step_once(settings, sums_file, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(OSError, match="no room"):
        brim.Model(settings).train(sums_file, output_directory=run, observer=Failing())
    assert ("train/loss", 5) in scalars(run / "tensorboard")  # after the checkpoint of step 3
    brim.Model(settings).train(sums_file, output_directory=run, resume=True)
    shown = scalars(run / "tensorboard")
    assert [step for tag, step in shown if tag == "train/loss"] == list(range(1, 9))
    assert shown == pytest.approx(logged(run), rel=1e-6)
