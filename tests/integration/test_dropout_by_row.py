"""Runs with the adapter's dropout drawn by row: the same losses however the batches are cut."""

import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.memory.tiny_architectures import write_folder

import brim
from brim.models import next_token_loss


def config(base, **trainer):
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.05},
        "preprocessing": {"split": "fixed"},
        "trainer": {
            "type": "finetune",
            "train_steps": 6,
            "batch_size": 1,
            "effective_batch_size": 8,
            "learning_rate": 0.02,
            "early_stop": -1,
            "dropout_by_row": True,
            **trainer,
        },
    }


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record.get("split") == "train" and "event" not in record]


def test_losses_do_not_depend_on_the_micro_batch(tiny_base, sums_file, tmp_path):
    sequences = {}
    for rows in (1, 4, 8):
        run = tmp_path / str(rows)
        brim.Model(config(tiny_base, batch_size=rows)).train(sums_file, output_directory=run)
        sequences[rows] = losses(run)
    for rows in (4, 8):
        np.testing.assert_allclose(sequences[rows], sequences[1], rtol=1e-5)
    run = tmp_path / "not by row"
    brim.Model(config(tiny_base, batch_size=4, dropout_by_row=False)).train(sums_file, output_directory=run)
    assert np.abs(np.array(losses(run)) - sequences[1]).max() > 1e-4


def test_nor_on_where_memory_runs_out(tiny_base, sums_file, tmp_path, monkeypatch):
    clean, scarce = tmp_path / "clean", tmp_path / "scarce"
    brim.Model(config(tiny_base, batch_size=4)).train(sums_file, output_directory=clean)
    passes = iter(range(1, 1000))

    def scarce_loss(*arguments, **settings):
        if next(passes) in (2, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return next_token_loss(*arguments, **settings)

    monkeypatch.setattr("brim.train.gradient.next_token_loss", scarce_loss)
    brim.Model(config(tiny_base, batch_size=4)).train(sums_file, output_directory=scarce)
    events = [json.loads(line).get("event") for line in (scarce / "metrics.jsonl").read_text().splitlines()]
    assert events.count("oom") == 2
    np.testing.assert_allclose(losses(scarce), losses(clean), rtol=1e-5)


def test_checkpointing_changes_nothing(tiny_base, sums_file, tmp_path):
    for name, enabled in (("on", True), ("off", False)):
        settings = config(tiny_base, batch_size=4, enable_gradient_checkpointing=enabled)
        brim.Model(settings).train(sums_file, output_directory=tmp_path / name)
    np.testing.assert_allclose(losses(tmp_path / "on"), losses(tmp_path / "off"), rtol=1e-6)


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


def test_a_resumed_run_is_the_same_to_the_bit(tiny_base, sums_file, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    brim.Model(config(tiny_base, batch_size=4)).train(sums_file, output_directory=whole)
    parts = tmp_path / "parts"
    observer = StopAfter(3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("brim.workflows.training.training.stop_request", observer.request)
        brim.Model(config(tiny_base, batch_size=4)).train(sums_file, output_directory=parts, observer=observer)
    torch.manual_seed(999)
    brim.Model(config(tiny_base, batch_size=4)).train(sums_file, output_directory=parts, resume=True)
    assert losses(parts) == losses(whole)
    weights = [load_file(run / "model" / "adapter_model.safetensors") for run in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_memory_is_foretold(tmp_path):
    base = write_folder(tmp_path, "llama", num_hidden_layers=2)

    def allocated(device, **trainer):
        settings = config(base, batch_size=8, enable_gradient_checkpointing=False, **trainer)
        return brim.predict_memory(settings, sequence_length=60, device=device).allocated_bytes

    # On a GPU PyTorch keeps a mask of one byte an element, too; on a CPU it keeps fp32 noise.
    assert allocated("a100-80gb") == allocated("a100-80gb", dropout_by_row=False)
    assert allocated("cpu") < allocated("cpu", dropout_by_row=False)
