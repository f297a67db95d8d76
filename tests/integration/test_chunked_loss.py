"""`trainer.chunked_loss` in whole runs: the same losses as with whole logits, chosen with a reason, kept when continued."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from tests.integration.test_training_run import FULL, NO_DROPOUT, config, log, losses, stop_after
from transformers import LlamaForCausalLM

import brim
from brim.models import chunked_loss


@pytest.fixture
def small_chunks(monkeypatch):
    """Five positions at a time of the tiny base's 300 tokens."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 300 * 5)
    monkeypatch.setattr(chunked_loss, "FEWEST_ROWS", 1)
    monkeypatch.setattr(chunked_loss, "TRAINED_HEAD_FACTOR", 1)


def saved(run):
    settings = YAML(typ="safe").load((run / "config.yaml").read_text())["trainer"]["chunked_loss"]
    choices = json.loads((run / "plan.json").read_text())["choices"]
    return settings, [choice for choice in choices if choice["key"] == "trainer.chunked_loss"]


@pytest.mark.parametrize(
    ("method", "precision", "tolerance"),
    [
        (NO_DROPOUT, "fp32", 1e-5),
        (FULL, "fp32", 1e-4),
        (NO_DROPOUT, "bf16-true", 1e-2),
        (FULL, "bf16-mixed", 1e-2),
        (FULL, "fp16-mixed", 1e-2),
    ],
)
def test_losses_are_those_of_whole_logits(tiny_base, sums_file, tmp_path, small_chunks, method, precision, tolerance):
    metrics = {}
    for chunked in (True, False):
        settings = config(tiny_base, precision=precision, trainer={"chunked_loss": chunked}, **method)
        metrics[chunked] = brim.Model(settings).train(sums_file, output_directory=tmp_path / str(chunked)).metrics
        assert saved(tmp_path / str(chunked)) == (chunked, [])
    np.testing.assert_allclose(losses(tmp_path / "True"), losses(tmp_path / "False"), rtol=tolerance)
    for split, expected in metrics[False].items():
        assert metrics[True][split]["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert not [record for record in log(tmp_path / "True") if record.get("event") == "overflow"]


def test_the_choice_is_said_and_saved_with_a_number_and_a_reason(tiny_base, sums_file, tmp_path):
    said = []
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run", say=said.append)
    reason = "logits of 111,848 tokens at a time take 128.0 MiB"
    assert f"trainer.chunked_loss: True ({reason})" in said
    assert saved(tmp_path / "run") == (True, [{"key": "trainer.chunked_loss", "value": True, "reason": reason}])


def with_other_logits(monkeypatch):
    """transformers' Llama with a function behind its head that nobody knows."""
    own = LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits - output.logits.mean(dim=-1, keepdim=True)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)


def test_an_architecture_that_does_not_allow_it_is_run_whole(tiny_base, sums_file, tmp_path, monkeypatch):
    with_other_logits(monkeypatch)
    reason = (
        "LlamaForCausalLM is no body with an output layer behind it: "
        "what the output layer gives is changed in a way that is not known"
    )
    said = []
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run", say=said.append)
    assert f"trainer.chunked_loss: False ({reason})" in said
    assert saved(tmp_path / "run")[0] is False
    with pytest.raises(brim.ConfigError) as caught:
        settings = config(tiny_base, trainer={"chunked_loss": True})
        brim.Model(settings).train(sums_file, output_directory=tmp_path / "other")
    assert str(caught.value) == (
        f"trainer.chunked_loss: trainer.chunked_loss is true, which this model does not allow: {reason}\n"
        "  fix: set trainer.chunked_loss: auto"
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("asked", ["auto", True])
def test_a_continued_run_keeps_its_way_unless_another_is_asked_for(
    tiny_base, sums_file, tmp_path, monkeypatch, small_chunks, asked
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    before, now = ({"trainer": {"chunked_loss": value}, **NO_DROPOUT} for value in (False, asked))
    brim.Model(config(tiny_base, **before)).train(sums_file, output_directory=whole)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        observer = stop_after(3, patch)
        brim.Model(config(tiny_base, **before)).train(sums_file, output_directory=parts, observer=observer)
    said = []
    brim.Model(config(tiny_base, **now)).train(sums_file, output_directory=parts, resume=True, say=said.append)
    was_changed = "trainer.chunked_loss is now true; it was false" in said
    assert was_changed == (asked is True)
    assert (losses(parts) == losses(whole)) == (asked == "auto")
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)


def test_evaluation_of_a_base_model_says_what_it_chose(tiny_base, sums_file, small_chunks):
    figures = []
    for chunked in (False, "auto"):
        said = []
        settings = config(tiny_base, adapter=None)
        settings["trainer"] = {"type": "none", "chunked_loss": chunked}
        figures.append(brim.Model(settings).train(sums_file, say=said.append).metrics["test"])
        assert any(line.startswith("trainer.chunked_loss: True") for line in said) == (chunked == "auto")
    assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=1e-5)
    assert figures[1]["token_accuracy"] == figures[0]["token_accuracy"]


def test_the_loop_never_holds_whole_logits(tiny_base, sums_file, tmp_path, small_chunks, monkeypatch):
    rows = []
    linear = torch.nn.functional.linear

    def noted(given, weight, bias=None):
        if weight.shape[0] == 300:
            rows.append(given.numel() // given.shape[-1])
        return linear(given, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", noted)
    brim.Model(config(tiny_base)).train(sums_file, output_directory=tmp_path / "run")
    assert 1 < max(rows) <= 5


def test_chunks_know_the_loss_scale_beforehand(tiny_base, sums_file, tmp_path, monkeypatch):
    scales = []

    def noted(*args, gradient_scale, **kwargs):
        scales.append(float(gradient_scale))
        return chunked_loss.chunked_loss_sum(*args, gradient_scale=gradient_scale, **kwargs)

    monkeypatch.setattr("brim.models.loss.chunked_loss_sum", noted)
    run = tmp_path / "run"
    brim.Model(config(tiny_base, precision="fp16-mixed")).train(sums_file, output_directory=run)
    steps = [record for record in log(run) if record.get("split") == "train"]
    supervised = np.diff([0, *(record["num_supervised_tokens"] for record in steps)])
    micro_batches = [record["num_micro_batches"] for record in steps]
    assert scales == pytest.approx(np.repeat(65536 / supervised, micro_batches), rel=1e-6)
