"""What must not change what is learned: the loss in chunks, dropout drawn by row. Whole runs, said and saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from tests.gallery import stopped_after, usual
from tests.integration.test_training_run import FULL, MODEL, log, losses
from tests.memory.tiny_architectures import write_folder
from transformers import LlamaForCausalLM

import brim
from brim.models.loss import chunked as chunked_loss, next_token_loss

pytestmark = pytest.mark.run
LORA = {"adapter": {"type": "lora", "dropout": 0.0}}


@pytest.fixture
def train(tiny_base, sums_file, tmp_path):
    """train("name", trainer={…}, …): the run in that folder, by the usual configuration with changes."""

    def run(name, *, resume=False, observer=None, say=None, **changes):
        model = brim.Model(usual(tiny_base, **changes))
        model.train(sums_file, output_directory=tmp_path / name, resume=resume, observer=observer, say=say)
        return tmp_path / name

    return run


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
def test_losses_are_those_of_whole_logits(train, small_chunks, method, precision, tolerance):
    runs = {}
    for chunked in (True, False):
        run = runs[chunked] = train(str(chunked), precision=precision, trainer={"chunked_loss": chunked}, **method)
        assert saved(run) == (chunked, [])
    np.testing.assert_allclose(losses(runs[True]), losses(runs[False]), rtol=tolerance)
    evaluated = [[r["loss"] for r in log(run) if r.get("split") == "validation"] for run in runs.values()]
    np.testing.assert_allclose(*evaluated, rtol=tolerance)
    assert not [record for record in log(runs[True]) if record.get("event") == "overflow"]


def test_the_choice_is_said_and_saved_with_a_number_and_a_reason(gallery):
    run = gallery("lora").run
    reason = "logits of 111,848 tokens at a time take 128.0 MiB"
    assert f"trainer.chunked_loss: True ({reason})" in (run / "notes.txt").read_text().splitlines()
    assert saved(run) == (True, [{"key": "trainer.chunked_loss", "value": True, "reason": reason}])


def test_an_architecture_that_does_not_allow_it_is_run_whole(train, tmp_path, monkeypatch):
    """transformers' Llama with a function behind its head that nobody knows."""
    own = LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        output.logits = output.logits - output.logits.mean(dim=-1, keepdim=True)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    reason = (
        "LlamaForCausalLM cannot be run as body and output layer: "
        "what the output layer gives is changed in a way that is not known"
    )
    said = []
    run = train("run", say=said.append, trainer={"train_steps": 1})
    assert f"trainer.chunked_loss: False ({reason})" in said
    assert saved(run)[0] is False
    with pytest.raises(brim.ConfigError) as caught:
        train("other", trainer={"chunked_loss": True})
    (problem,) = caught.value.problems
    assert problem.what == f"trainer.chunked_loss is true, which this model does not allow: {reason}"
    assert (problem.where, problem.fix) == ("trainer.chunked_loss", "set trainer.chunked_loss: auto")
    assert not (tmp_path / "other").exists()


def test_a_continued_run_keeps_its_way_unless_another_is_asked_for(train, small_chunks):
    whole = losses(train("whole", trainer={"chunked_loss": False}))
    for asked in ("auto", True):
        with stopped_after(3) as observer, pytest.raises(KeyboardInterrupt):
            train(str(asked), observer=observer, trainer={"chunked_loss": False})
        said = []
        parts = losses(train(str(asked), resume=True, say=said.append, trainer={"chunked_loss": asked}))
        assert ("trainer.chunked_loss is now true; it was false" in said) == (asked is True)
        assert (parts == whole) == (asked == "auto")
        np.testing.assert_allclose(parts, whole, rtol=1e-5)


def test_evaluation_of_a_base_model_says_what_it_chose(tiny_base, sums_file, small_chunks):
    figures = []
    for chunked in (False, "auto"):
        said, trainer = [], {"type": "none", "chunked_loss": chunked}
        model = brim.Model({**usual(tiny_base, adapter=None), "trainer": trainer})
        figures.append(model.train(sums_file, say=said.append).metrics["test"])
        assert any(line.startswith("trainer.chunked_loss: True") for line in said) == (chunked == "auto")
    assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=1e-5)
    assert figures[1]["token_accuracy"] == figures[0]["token_accuracy"]


def test_the_loop_never_holds_whole_logits(train, small_chunks, monkeypatch):
    rows, linear = [], torch.nn.functional.linear

    def noted(given, weight, bias=None):
        if weight.shape[0] == 300:
            rows.append(given.numel() // given.shape[-1])
        return linear(given, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", noted)
    train("run", trainer={"epochs": 1})
    assert 1 < max(rows) <= 5


def test_chunks_know_the_loss_scale_beforehand(train, monkeypatch):
    scales = []

    def noted(*args, gradient_scale, **kwargs):
        scales.append(float(gradient_scale))
        return chunked_loss.chunked_loss_sum(*args, gradient_scale=gradient_scale, **kwargs)

    monkeypatch.setattr("brim.models.loss.next_token.chunked_loss_sum", noted)
    steps = [r for r in log(train("run", precision="fp16-mixed", trainer={"epochs": 1})) if r.get("split") == "train"]
    supervised = np.diff([0, *(record["num_supervised_tokens"] for record in steps)])
    micro_batches = [record["num_micro_batches"] for record in steps]
    assert scales == pytest.approx(np.repeat(65536 / supervised, micro_batches), rel=1e-6)


# The adapter's dropout drawn by row: the same losses however the batches are cut


def by_row(**trainer):
    settings = {"train_steps": 5, "learning_rate": 0.02, "early_stop": -1, "dropout_by_row": True}
    return {"adapter": {"type": "lora", "dropout": 0.05}, "trainer": {**settings, **trainer}}


def test_losses_by_row_do_not_depend_on_the_micro_batch_on_checkpointing_or_where_memory_runs_out(train, monkeypatch):
    whole = train("4", **by_row(enable_gradient_checkpointing=False))
    for rows in (1, 8):
        np.testing.assert_allclose(losses(train(str(rows), **by_row(batch_size=rows))), losses(whole), rtol=1e-5)
    other = train("not by row", **by_row(dropout_by_row=False))
    assert np.abs(np.array(losses(other)) - losses(whole)).max() > 1e-4
    checkpointed = train("on", **by_row(enable_gradient_checkpointing=True))
    np.testing.assert_allclose(losses(checkpointed), losses(whole), rtol=1e-6)

    with stopped_after(3) as observer, pytest.raises(KeyboardInterrupt):
        train("parts", observer=observer, **by_row(enable_gradient_checkpointing=False))
    torch.manual_seed(999)
    parts = train("parts", resume=True, **by_row(enable_gradient_checkpointing=False))
    assert losses(parts) == losses(whole)
    weights = [load_file(run / MODEL) for run in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    passes = iter(range(1, 1000))

    def scarce_loss(*arguments, **settings):
        if next(passes) in (2, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return next_token_loss(*arguments, **settings)

    monkeypatch.setattr("brim.train.gradient.next_token_loss", scarce_loss)
    scarce = train("scarce", **by_row())
    assert [record.get("event") for record in log(scarce)].count("oom") == 2
    np.testing.assert_allclose(losses(scarce), losses(whole), rtol=1e-5)


def test_the_memory_of_dropout_by_row_is_foretold(tmp_path):
    base = write_folder(tmp_path, "llama", num_hidden_layers=2)

    def allocated(device, **trainer):
        changes = by_row(batch_size=8, enable_gradient_checkpointing=False, **trainer)
        return brim.predict_memory(usual(base, **changes), sequence_length=60, device=device).allocated_bytes

    # On a GPU PyTorch keeps a mask of one byte an element, too; on a CPU it keeps fp32 noise.
    assert allocated("a100-80gb") == allocated("a100-80gb", dropout_by_row=False)
    assert allocated("cpu") < allocated("cpu", dropout_by_row=False)
