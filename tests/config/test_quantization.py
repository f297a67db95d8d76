"""`quantization`: what goes together, what has no effect, and what `auto` becomes."""

from __future__ import annotations

import pytest

from brim.config import DeviceFacts, load_config, resolve
from brim.errors import ConfigError

CPU = DeviceFacts(kind="cpu", bf16=False)
GPU = DeviceFacts(kind="cuda", bf16=True)
OLD_GPU = DeviceFacts(kind="cuda", bf16=False)


def test_ludwigs_defaults_but_for_the_compute_dtype(minimal):
    assert load_config(minimal()).config.quantization is None
    assert load_config(minimal(quantization={})).config.quantization.model_dump() == {
        "backend": "bitsandbytes",
        "bits": 4,
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
        "bnb_4bit_compute_dtype": "auto",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_type": "nf4",
    }


def test_random_weights_are_not_quantised(minimal, problems):
    assert problems(minimal(quantization={"bits": 4}, initialize="random", trainer={"type": "finetune"})) == [
        "initialize: random weights (initialize: random) cannot be quantised: nothing could be learned in them\n"
        "  fix: remove quantization, or start from pretrained weights"
    ]


def test_biases_of_quantised_layers_do_not_train(minimal, problems):
    adapter = {"type": "lora", "bias_type": "all"}
    assert problems(minimal(quantization={"bits": 8}, adapter=adapter)) == [
        "adapter.bias_type: adapter.bias_type all trains biases, which bitsandbytes' layers cannot do\n"
        "  fix: set adapter.bias_type: none, or remove quantization"
    ]


def test_keys_of_other_bits_are_noted(minimal):
    assert load_config(minimal(quantization={"bits": 4, "llm_int8_threshold": 5.0})).notes == (
        "quantization.llm_int8_threshold: quantization.llm_int8_threshold has no effect with bits: 4",
    )
    eight = {"bits": 8, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "float16"}
    assert load_config(minimal(quantization=eight)).notes == (
        "quantization.bnb_4bit_compute_dtype: quantization.bnb_4bit_compute_dtype has no effect with bits: 8",
        "quantization.bnb_4bit_quant_type: quantization.bnb_4bit_quant_type has no effect with bits: 8",
    )
    spelled_out = {"bits": 8, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    assert load_config(minimal(quantization=spelled_out)).notes == ()


@pytest.mark.parametrize(
    ("device", "precision", "dtype", "reason"),
    [
        (CPU, "auto", "float32", "precision is fp32"),
        (GPU, "auto", "bfloat16", "precision is bf16-true"),
        (OLD_GPU, "auto", "float16", "precision is fp16-mixed"),
        (GPU, "fp32", "float32", "precision is fp32"),
        (CPU, "bf16-mixed", "bfloat16", "precision is bf16-mixed"),
    ],
)
def test_the_compute_dtype_is_that_of_the_precision(minimal, device, precision, dtype, reason):
    source = minimal(quantization={"bits": 4}, adapter="lora", precision=precision, trainer={"type": "finetune"})
    resolution = resolve(load_config(source).config, device)
    assert resolution.config.quantization.bnb_4bit_compute_dtype == dtype
    choices = {choice.key: str(choice) for choice in resolution.choices}
    key = "quantization.bnb_4bit_compute_dtype"
    assert choices[key] == f"{key}: {dtype} ({reason})"
    assert resolve(resolution.config, device).choices == ()


def test_a_given_compute_dtype_stays(minimal):
    source = minimal(quantization={"bits": 4, "bnb_4bit_compute_dtype": "float16"})
    assert resolve(load_config(source).config, CPU).config.quantization.bnb_4bit_compute_dtype == "float16"


def test_what_comes_quantised_is_held_to_the_same_rules(minimal):
    """The base model's folder can bring quantization that the configuration does not name."""
    from brim.config.schema import QuantizationConfig

    config = load_config(minimal(adapter={"type": "lora", "bias_type": "all"})).config
    quantised = config.model_copy(update={"quantization": QuantizationConfig(bits=8)})
    with pytest.raises(ConfigError, match="trains biases, which bitsandbytes' layers cannot do"):
        resolve(quantised, CPU)
