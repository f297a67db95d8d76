"""Export: the folder opens in PEFT and in plain transformers, computes what brim computes, and names no path."""

import json
from pathlib import Path

import pytest
import torch

import brim
from brim.api.session import open_session
from brim.models.llm import load_llm

IDS = torch.tensor([[70, 71, 72, 100, 101, 130, 40, 41, 42]])
QUANTIZED = {"16-bit": None, "4-bit": {"bits": 4}, "8-bit": {"bits": 8}}


@pytest.fixture
def trained(config, sums_file, tmp_path):
    """trained(adapter=…, …) -> the folder of a run whose adapter does something."""

    def run(name="run", **changes):
        model = brim.Model({**config, "adapter": {"type": "lora", "dropout": 0.0}, **changes})
        model.train(sums_file, output_directory=tmp_path / name)
        return tmp_path / name

    return run


def unmerged_logits(run):
    """What the run's model computes, as it is evaluated."""
    session = open_session(brim.Model.load(run).config)
    llm = load_llm(session.config, session.folder, session.device, trainable=False)
    with torch.no_grad(), llm.precision.autocast(llm.device):
        return llm.model(IDS).logits.float()


def plain_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def texts(folder):
    """Everything in a folder that a person, or a script, may read a path from."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"}


def test_an_exported_adapter_opens_in_peft_and_computes_the_same(trained, tiny_base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    run = trained()
    result = brim.Model.load(run).export(tmp_path / "out")
    assert (result.kind, result.divergence) == ("adapter", None)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, unmerged_logits(run))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 6


def test_brim_goes_on_from_an_exported_adapter(trained, config, sums_file, tmp_path):
    run = trained()
    brim.Model.load(run).export(tmp_path / "out")
    adapter = {"type": "lora", "pretrained_adapter_weights": str(tmp_path / "out")}
    again = brim.Model({**config, "adapter": adapter, "trainer": {"type": "none"}})
    assert again.evaluate(sums_file).metrics == brim.Model.load(run).evaluate(sums_file).metrics


def test_a_fully_trained_model_is_exported_as_it_is(trained, tmp_path):
    run = trained(adapter=None)
    assert brim.Model.load(run).export(tmp_path / "out").kind == "full"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()
    assert torch.equal(plain_logits(tmp_path / "out"), unmerged_logits(run))


@pytest.mark.parametrize("quantization", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_merged_model_opens_in_plain_transformers_with_the_logits_that_were_reported(
    trained, config, tmp_path, quantization, precision
):
    run = trained(quantization=quantization, precision=precision)
    result = brim.Model.load(run).export(tmp_path / "out", merge=True)
    assert result.kind == "merged"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("README.md", "export.json", "manifest.json"),
    }
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["dtype"] == "bfloat16"
    assert "quantization_config" not in stored
    assert stored["tie_word_embeddings"]
    reported = json.loads((tmp_path / "out" / "export.json").read_text())["divergence"]
    assert reported["mean_kl"] == result.divergence.mean_kl <= 0.01
    expected = oracle(run, tmp_path / "out")
    assert reported["num_tokens"] == expected["num_tokens"]
    for name in ("mean_kl", "same_top", "max_logit_difference"):
        assert reported[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-9), name


def oracle(run, out):
    """The figures by their definition, row by row, over the supervised tokens of the validation rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = brim.Model.load(run)
    session = open_session(model.config)
    llm = load_llm(session.config, session.folder, session.device, trainable=False)
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = [json.loads(line) for line in Path(session.config.dataset).read_text().splitlines()]
    kl, same, largest = [], [], []
    for row in rows:
        if row["split"] != 1:
            continue
        prompt, answer = (tokenizer(row[name]).input_ids for name in ("question", "answer"))
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad(), llm.precision.autocast(llm.device):
            first = llm.model(ids).logits[0, len(prompt) - 1 : -1].double()
            second = merged(ids).logits[0, len(prompt) - 1 : -1].double()
        p, q = first.softmax(-1), second.softmax(-1)
        kl += (p * (p / q).log()).sum(-1).tolist()
        same += (first.argmax(-1) == second.argmax(-1)).tolist()
        largest.append(float((first - second).abs().max()))
    return {
        "num_tokens": len(kl),
        "mean_kl": sum(kl) / len(kl),
        "same_top": sum(same) / len(same),
        "max_logit_difference": max(largest),
    }
