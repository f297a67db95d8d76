"""What must not change what is learned: the loss in chunks, dropout drawn by row. Whole runs, said and saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from tests.gallery import stopped_after, usual
from tests.integration.conftest import FULL, MODEL, events, losses, steps, validation
from tests.memory.tiny_architectures import write_folder
from tests.messages import refused
from transformers import LlamaForCausalLM

import brim
from brim.errors import CheckpointError
from brim.models.loss import NextToken, chunked as chunked_loss

pytestmark = pytest.mark.run
LORA = {"adapter": {"type": "lora", "dropout": 0.0}}


# trainer.packing


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (LORA, 1e-5),
        (FULL, 1e-5),
        ({**LORA, "precision": "bf16-mixed"}, 1e-2),
        ({**FULL, "trainer": {"chunked_loss": False, "enable_gradient_checkpointing": True}}, 1e-5),
        ({**LORA, "trainer": {"batch_size": "auto", "noise_scale_every": 2}}, 1e-5),
        ({"adapter": {"type": "lora", "dropout": 0.3}, "trainer": {"dropout_by_row": True}}, 1e-5),
    ],
)
def test_losses_are_those_of_padded_rows(train, tmp_path, settings, tolerance):
    given = settings.get("trainer", {})
    for packing in (True, False):
        train(str(packing), **{**settings, "trainer": {**given, "packing": packing}})
    packed, padded = tmp_path / "True", tmp_path / "False"
    np.testing.assert_allclose(losses(packed), losses(padded), rtol=tolerance)
    np.testing.assert_allclose(*(list(validation(run).values()) for run in (packed, padded)), rtol=10 * tolerance)


def test_a_packed_run_is_planned_and_goes_on_as_it_was_begun(train, tmp_path):
    asked = {"packing": True, "batch_size": "auto"}
    whole = losses(train("whole", trainer=asked).output_directory)
    with stopped_after(3) as observer, pytest.raises(KeyboardInterrupt):
        train("stopped", observer=observer, trainer=asked)
    assert losses(train("stopped", resume=True, trainer=asked).output_directory) == whole
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())["plan"]
    assert plan["costs"]["multiple"] == 64


# trainer.chunked_loss


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
    [(LORA, "fp32", 1e-5), (FULL, "fp32", 1e-4), (LORA, "bf16-true", 1e-2), (FULL, "fp16-mixed", 1e-2)],
)
def test_losses_are_those_of_whole_logits(train, small_chunks, tmp_path, method, precision, tolerance):
    runs = {}
    for chunked in (True, False):
        train(str(chunked), precision=precision, trainer={"chunked_loss": chunked}, **method)
        runs[chunked] = tmp_path / str(chunked)
        assert saved(runs[chunked]) == (chunked, [])
    np.testing.assert_allclose(losses(runs[True]), losses(runs[False]), rtol=tolerance)
    np.testing.assert_allclose(*(list(validation(run).values()) for run in runs.values()), rtol=tolerance)
    assert events(runs[True], "overflow") == []


def test_an_architecture_that_does_not_allow_it_is_run_whole(train, tmp_path, monkeypatch):
    """transformers' Llama with a function behind its head that nobody knows."""
    own = LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits - output.logits.mean(dim=-1, keepdim=True)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    said = []
    train("run", say=said.append, trainer={"train_steps": 1})
    assert [line for line in said if line.startswith("trainer.chunked_loss: False (LlamaForCausalLM ")]
    assert saved(tmp_path / "run")[0] is False
    refusal = "trainer.chunked_loss: … is true … LlamaForCausalLM … fix: set trainer.chunked_loss: auto"
    with refused(refusal, by=brim.ConfigError):
        train("other", trainer={"chunked_loss": True})
    assert not (tmp_path / "other").exists()


def test_a_continued_run_keeps_its_way_unless_another_is_asked_for(train, small_chunks):
    whole = losses(train("whole", trainer={"chunked_loss": False}).output_directory)
    for asked in ("auto", True):
        with stopped_after(3) as observer, pytest.raises(KeyboardInterrupt):
            train(str(asked), observer=observer, trainer={"chunked_loss": False})
        said = []
        result = train(str(asked), resume=True, say=said.append, trainer={"chunked_loss": asked})
        parts = losses(result.output_directory)
        assert ("trainer.chunked_loss is now true; it was false" in said) == (asked is True)
        assert (parts == whole) == (asked == "auto")
        np.testing.assert_allclose(parts, whole, rtol=1e-5)


def test_the_choice_is_said_and_saved_with_a_number_and_a_reason(gallery):
    run = gallery("lora").run
    reason = "logits of 111,848 tokens at a time take 128.0 MiB"
    assert f"trainer.chunked_loss: True ({reason})" in (run / "notes.txt").read_text().splitlines()
    assert saved(run) == (True, [{"key": "trainer.chunked_loss", "value": True, "reason": reason}])


def test_chunks_know_the_loss_scale_beforehand(train, tmp_path, monkeypatch):
    scales = []

    def noted(*args, gradient_scale, **kwargs):
        scales.append(float(gradient_scale))
        return chunked_loss.chunked_loss_sum(*args, gradient_scale=gradient_scale, **kwargs)

    monkeypatch.setattr("brim.models.loss.next_token.chunked_loss_sum", noted)
    train("run", precision="fp16-mixed", trainer={"epochs": 1})
    records = steps(tmp_path / "run")
    supervised = np.diff([0, *(record["num_supervised_tokens"] for record in records)])
    micro_batches = [record["num_micro_batches"] for record in records]
    assert scales == pytest.approx(np.repeat(65536 / supervised, micro_batches), rel=1e-6)


# The adapter's dropout drawn by row: the same losses however the batches are cut


def by_row(**trainer):
    settings = {"train_steps": 5, "learning_rate": 0.02, "early_stop": -1, "dropout_by_row": True}
    return {"adapter": {"type": "lora", "dropout": 0.05}, "trainer": {**settings, **trainer}}


def test_losses_by_row_do_not_depend_on_the_micro_batch_on_checkpointing_or_where_memory_runs_out(
    train, tmp_path, monkeypatch
):
    def learned(name, *, observer=None, resume=False, **trainer):
        train(name, observer=observer, resume=resume, **by_row(**trainer))
        return losses(tmp_path / name)

    whole = learned("4", enable_gradient_checkpointing=False)
    for rows in (1, 8):
        np.testing.assert_allclose(learned(str(rows), batch_size=rows), whole, rtol=1e-5)
    assert np.abs(np.array(learned("not by row", dropout_by_row=False)) - whole).max() > 1e-4
    np.testing.assert_allclose(learned("on", enable_gradient_checkpointing=True), whole, rtol=1e-6)

    with stopped_after(3) as observer, pytest.raises(KeyboardInterrupt):
        learned("parts", observer=observer, enable_gradient_checkpointing=False)
    with monkeypatch.context() as later:
        later.setattr("brim.models.dropout.RowDropout.masks", "drawn otherwise")
        with pytest.raises(CheckpointError, match=r"dropout_by_row: .* \(step 3\) drops other elements of its rows"):
            learned("parts", resume=True, enable_gradient_checkpointing=False)
    torch.manual_seed(999)
    assert learned("parts", resume=True, enable_gradient_checkpointing=False) == whole
    assert (tmp_path / "4" / MODEL).read_bytes() == (tmp_path / "parts" / MODEL).read_bytes()

    passes, whole_loss = iter(range(1, 1000)), NextToken.loss

    def scarce_loss(*arguments, **settings):
        if next(passes) in (2, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole_loss(*arguments, **settings)

    monkeypatch.setattr(NextToken, "loss", scarce_loss)
    np.testing.assert_allclose(learned("scarce"), whole, rtol=1e-5)
    assert len(events(tmp_path / "scarce", "oom")) == 2


def test_the_memory_of_dropout_by_row_is_foretold(tmp_path):
    base = write_folder(tmp_path, "llama", num_hidden_layers=2)

    def allocated(device, **trainer):
        changes = by_row(batch_size=8, enable_gradient_checkpointing=False, packing=False, **trainer)
        changes["adapter"]["target_modules"] = "all-linear"
        return brim.predict_memory(usual(base, **changes), sequence_length=60, device=device).allocated_bytes

    # By row no mask is kept, else its bits: of 6 × 32 and 48 features in each layer; a token has a seed and a position.
    more = {device: allocated(device, dropout_by_row=False) - allocated(device) for device in ("cpu", "a100-80gb")}
    assert more["cpu"] == 480 * (2 * (6 * 32 + 48) // 8 - 2 * 8)
    assert more["a100-80gb"] == pytest.approx(more["cpu"], rel=0.15)  # in blocks of 512 bytes
