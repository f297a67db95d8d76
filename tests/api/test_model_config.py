"""What a model's configuration becomes: given as a Config, or going on from an adapter."""

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import brim


def test_a_config_is_taken_as_the_mapping_it_was_made_from(config):
    # What nobody has set is still to be chosen: here the batch size, 8 / 2.
    mapping = {**config, "trainer": {"type": "finetune", "effective_batch_size": 8, "gradient_accumulation_steps": 2}}
    given = brim.Model(brim.Model(mapping).config)
    assert given.config == brim.Model(mapping).config
    assert given.config.model_fields_set == brim.Model(mapping).config.model_fields_set
    assert given.config.trainer.model_fields_set == brim.Model(mapping).config.trainer.model_fields_set
    assert given.notes == brim.Model(mapping).notes


@pytest.mark.parametrize("adapter", [{"r": 4, "alpha": None}, {"r": 4, "alpha": 4, "target_modules": "all-linear"}])
def test_a_run_that_goes_on_from_an_adapter_says_what_that_is(config, sums_file, tmp_path, adapter):
    brim.Model({**config, "adapter": {"type": "lora", **adapter}}).train(sums_file, output_directory=tmp_path / "first")
    weights = str(tmp_path / "first" / "model")
    second = brim.Model({**config, "adapter": {"type": "lora", "pretrained_adapter_weights": weights}})
    second.train(sums_file, output_directory=tmp_path / "second")
    loaded = brim.Model.load(tmp_path / "second")
    assert (loaded.config.adapter.r, loaded.config.adapter.alpha) == (4, adapter["alpha"] or 8)
    assert loaded.evaluate(sums_file).metrics == second.evaluate(sums_file).metrics
    contrary = {"type": "lora", "r": 8, "pretrained_adapter_weights": weights}
    with pytest.raises(brim.ModelError, match=r"adapter\.r is 8, and the adapter to go on from has 4"):
        brim.Model({**config, "adapter": contrary}).evaluate(sums_file)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
def test_biases_are_trained_on_a_base_in_16_bits(config, sums_file, tmp_path, tiny_base, precision, dtype):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    architecture = AutoConfig.from_pretrained(base, attention_bias=True)
    AutoModelForCausalLM.from_config(architecture, dtype=dtype).save_pretrained(base)
    changes = {"base_model": str(base), "precision": precision, "adapter": {"type": "lora", "bias_type": "all"}}
    model = brim.Model({**config, **changes})
    model.train(sums_file, output_directory=tmp_path / "run")
    loaded = brim.Model.load(tmp_path / "run")
    assert loaded.evaluate(sums_file).metrics == model.evaluate(sums_file).metrics
