"""Bases in 4 and 8 bits: what is stored, what is computed from it, folders that come quantised, and bitsandbytes."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file
from tests.messages import refused
from tests.train.scarce import rows_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from brim import predict_memory
from brim.config import DeviceFacts, load_config, resolve
from brim.data.tokens import collate
from brim.errors import ModelError
from brim.models import load_llm, require_bitsandbytes, unquantised_experts, with_stored_quantization
from brim.models.adapters import add_adapter
from brim.models.folders import locate
from brim.models.loss import NextToken

CPU = torch.device("cpu")
LORA = {"type": "lora", "dropout": 0.0, "target_modules": "all-linear"}
FOUR = {"bits": 4}
EIGHT = {"bits": 8}
LAYERS = (Linear4bit, Linear8bitLt)
BITS = pytest.mark.parametrize("settings", [FOUR, EIGHT], ids=["4 bits", "8 bits"])


def load(base, quantization, *, precision="fp32", trainable=False, **keys):
    """A model as a configuration says, and the folder that it is from."""
    given = {"base_model": str(base), "precision": precision, "quantization": quantization, **keys}
    folder = locate(str(base))
    config = with_stored_quantization(load_config(given).config, folder)
    resolved = resolve(config, DeviceFacts(kind="cpu", bf16=False)).config
    return load_llm(resolved, folder, CPU, trainable=trainable).model


def quantised(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LAYERS)}


def dequantised(layer):
    """The weight that a layer stands for, by bitsandbytes' own functions."""
    if isinstance(layer, Linear4bit):
        return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return int8_vectorwise_dequant(layer.weight.data, scales)


def plain_twin(model, base):
    """An ordinary model with the weights that the quantised one stands for: the oracle."""
    twin = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, layer in quantised(model).items():
            twin.get_submodule(name).weight.copy_(dequantised(layer))
    return twin.eval()


def batch():
    rows = rows_of([9, 30, 4, 17])
    return collate([rows[number] for number in range(4)], pad_id=1)


@pytest.mark.parametrize(
    ("bits", "kind", "double"),
    [(4, "nf4", True), (4, "nf4", False), (4, "fp4", True), (4, "fp4", False), (8, "nf4", True)],
)
def test_weights_are_quantised_from_their_stored_digits_as_is_asked_for(tiny_base, bits, kind, double):
    stored = load_file(tiny_base / "model.safetensors")  # which are not rounded to another dtype before
    settings = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double} if bits == 4 else {}
    for name, layer in quantised(load(tiny_base, {"bits": bits, **settings})).items():
        weight = stored[f"{name}.weight"]
        packed, *_ = int8_vectorwise_quant(weight.half()) if bits == 8 else quantize_4bit(weight, quant_type=kind)
        assert torch.equal(layer.weight.data, packed)
        if bits == 4:
            state = layer.weight.quant_state
            assert (state.quant_type, state.nested, state.blocksize) == (kind, double, 64)


@BITS
@pytest.mark.parametrize("precision", ["fp32", "bf16-true", "bf16-mixed"])
def test_only_linear_layers_but_the_last_are_quantised(tiny_base, settings, precision):
    model = load(tiny_base, settings, precision=precision, adapter=LORA, trainable=True, trainer={"type": "finetune"})
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rsplit(".", 2)[-2] for name in quantised(model)} == projections
    assert len(quantised(model)) == 2 * len(projections)
    assert type(model.get_output_embeddings()) is nn.Linear
    weights = dict(model.named_parameters())
    packed = {torch.uint8} if settings is FOUR else {torch.int8}
    assert {weights[f"{name}.weight"].dtype for name in quantised(model)} == packed
    rest = {name: w for name, w in weights.items() if "norm" in name or "embed_tokens" in name}
    assert len(rest) == 6
    assert {weight.dtype for weight in rest.values()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    trained = {(weight.dtype, "lora_" in name) for name, weight in weights.items() if weight.requires_grad}
    assert trained == {(torch.float32, True)}
    if settings is FOUR:
        wanted = torch.float32 if precision == "fp32" else torch.bfloat16
        assert {layer.compute_dtype for layer in quantised(model).values()} == {wanted}


def test_an_explicit_compute_dtype_is_used(tiny_base):
    models = (load(tiny_base, {**FOUR, **more}) for more in ({}, {"bnb_4bit_compute_dtype": "bfloat16"}))
    exact, rough = (float(NextToken().loss(model, batch()).detach()) for model in models)
    assert exact != rough
    assert rough == pytest.approx(exact, rel=1e-2)


@BITS
def test_training_and_evaluation_compute_what_dequantised_weights_would(tiny_base, settings):
    """On a CPU; bitsandbytes alone would take another kernel for evaluation there."""
    model, ids = load(tiny_base, settings), batch().input_ids
    expected = plain_twin(model, tiny_base)(ids).logits
    in_evaluation = model.eval()(ids).logits
    assert torch.equal(in_evaluation, model.train()(ids).logits)
    torch.testing.assert_close(in_evaluation, expected, rtol=1e-5, atol=1e-6)
    # And a row does not depend on the rows beside it.
    torch.testing.assert_close(in_evaluation[:1, :9], model.eval()(ids[:1, :9]).logits, rtol=1e-5, atol=1e-6)


@BITS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_adapters_gradient_is_that_over_dequantised_weights(tiny_base, settings, checkpointing):
    """Also with activation checkpointing, although nothing below the first adapter needs a gradient."""
    trainer = {"type": "finetune", "enable_gradient_checkpointing": checkpointing}
    model = load(tiny_base, settings, adapter=LORA, trainer=trainer, trainable=True)
    adapter = load_config({"base_model": "m", "adapter": LORA}).config.adapter
    twin = add_adapter(plain_twin(load(tiny_base, settings), tiny_base), adapter, seed=42, trainable=True)
    gradients = []
    for each in (model, twin):
        for name, weight in each.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
                torch.manual_seed(1)
                nn.init.normal_(weight, std=0.05)
        NextToken().loss(each.train(), batch()).backward()
        gradients.append({name: w.grad for name, w in each.named_parameters() if w.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) == 28
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6, msg=name)


@BITS
def test_dora_and_transposed_layers_and_biases(tmp_path, settings):
    qwen2 = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    qwen2["num_key_value_heads"] = 2
    for name, sizes in {"gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}, "qwen2": qwen2}.items():
        base = tmp_path / name
        architecture = AutoConfig.for_model(name, vocab_size=300, bos_token_id=0, eos_token_id=0, **sizes)
        AutoModelForCausalLM.from_config(architecture).save_pretrained(base)
        (base / "tokenizer.json").write_text("{}")
        plain = float(NextToken().loss(load(base, None), batch()).detach())
        model = load(base, settings, adapter={**LORA, "use_dora": True}, trainer={"type": "finetune"}, trainable=True)
        assert quantised(model)
        loss = NextToken().loss(model, batch())
        assert float(loss.detach()) == pytest.approx(plain, rel=0.02)
        loss.backward()
        assert all(w.grad.isfinite().all() for w in model.parameters() if w.requires_grad)
        # PEFT puts each 8-bit weight anew into its layer in the first pass; the second must find the scales.
        assert NextToken().loss(model, batch()) == loss


def test_experts_that_are_not_quantised_are_told(tiny_base, tmp_path):
    config = AutoConfig.for_model(
        "mixtral", vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    line = unquantised_experts(load(tmp_path, FOUR, adapter=LORA, trainer={"type": "finetune"}, trainable=True))
    assert line is not None
    assert f"{2 * 3 * 16 * 24:,} in all" in line
    assert unquantised_experts(load(tiny_base, FOUR)) is None


@pytest.fixture(scope="module")
def stored(tiny_base, tmp_path_factory):
    """A folder whose weights are in 4 bits, as transformers saves it."""
    folder = tmp_path_factory.mktemp("stored")
    load(tiny_base, {**FOUR, "bnb_4bit_quant_type": "nf4"}).save_pretrained(folder)
    shutil.copy(tiny_base / "tokenizer.json", folder)
    return folder


def test_random_weights_are_plain_whatever_the_folder_holds(stored):
    model = load(stored, None, initialize="random", trainer={"type": "finetune"}, trainable=True)
    assert quantised(model) == {}
    assert not hasattr(model.config, "quantization_config")


def test_the_configuration_takes_over_what_the_folder_says_and_may_not_contradict_it(stored):
    folder = locate(str(stored))

    def settled(**source):
        return with_stored_quantization(load_config({"base_model": "m", **source}).config, folder).quantization

    taken = settled(quantization={"bnb_4bit_compute_dtype": "float16"}).model_dump()
    assert taken == {
        "backend": "bitsandbytes", "bits": 4, "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False,
        "bnb_4bit_compute_dtype": "float16", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "nf4",
    }  # fmt: skip
    assert settled(initialize="random") is None
    contradictions = {"bnb_4bit_use_double_quant": ("false", "true"), "bnb_4bit_quant_type": ("fp4", "nf4")}
    stands = "and the base model's weights are stored with"
    told = [f"{folder.name}: quantization.{key} is {a}, {stands} {b}\n" for key, (a, b) in contradictions.items()]
    with refused(*told, by=ModelError):
        settled(quantization={"bits": 4, "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4"})
    with pytest.raises(ModelError, match=r"quantization.bits is 8, and the base model's weights are stored with 4"):
        settled(quantization=EIGHT)


def test_other_methods_are_refused(tiny_base, tmp_path):
    shutil.copytree(tiny_base, tmp_path, dirs_exist_ok=True)
    architecture = json.loads((tmp_path / "config.json").read_text())
    unknown = ("a method that config.json does not name", {}), ("a method that config.json does not name", "odd")
    known = [(name, {"quant_method": name}) for name in ("gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes")]
    for name, stored_as in (*known, *unknown):
        (tmp_path / "config.json").write_text(json.dumps({**architecture, "quantization_config": stored_as}))
        words = rf"the base model's weights are quantised by {name}\n  expected: weights of 16"
        with pytest.raises(ModelError, match=words):
            load(tmp_path, None)


FP4_OF_MXFP4 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]  # OCP MX, E2M1


@pytest.fixture
def in_mxfp4(tmp_path):
    """A folder as gpt-oss comes: blocks of 32 numbers of 4 bits, each with an exponent; and the experts' weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, dtype="bfloat16",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors, weights = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (num_experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
        values = torch.tensor(FP4_OF_MXFP4)[halves] * 2.0 ** (scales.float() - 127)[..., None]
        weights[name] = values.flatten(-2).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    architecture = json.loads((tmp_path / "config.json").read_text())
    architecture["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path, weights


def test_blocks_of_mxfp4_are_dequantised_as_they_are_loaded_and_not_quantised_once_more(in_mxfp4):
    folder, weights = in_mxfp4
    model = load(folder, None, precision="bf16-true", trainer={"type": "finetune"}, trainable=True)
    found = {name: value for name, value in model.named_parameters() if name in weights}
    assert found.keys() == weights.keys()
    assert all(torch.equal(value.float(), weights[name]) for name, value in found.items())
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert all(value.requires_grad for value in found.values())
    assert not hasattr(model.config, "quantization_config")  # what is saved of it is not quantised
    with pytest.raises(ModelError, match=r"quantization.bits is 4, and the base model's experts are stored in mxfp4"):
        load(folder, FOUR)


def test_the_memory_of_mxfp4_is_that_of_its_dequantised_weights(in_mxfp4):
    folder, _ = in_mxfp4
    adapter = LORA | {"target_modules": ["q_proj"]}
    config = {"base_model": str(folder), "adapter": adapter}
    config["trainer"] = {"type": "finetune", "enable_gradient_checkpointing": False}  # no question of two predictions
    stored = predict_memory(config, sequence_length=16, device="a100-80gb")
    architecture = json.loads((folder / "config.json").read_text())
    del architecture["quantization_config"]
    (folder / "config.json").write_text(json.dumps(architecture))
    plain = predict_memory(config, sequence_length=16, device="a100-80gb")
    assert stored.by_category == plain.by_category
    (choice,) = [choice for choice in stored.choices if choice not in plain.choices]
    assert choice.startswith("base_model: dequantised (stored in mxfp4, whose 4-bit blocks do not train")


@pytest.mark.parametrize("shape", [(64, 688), (3, 96), (5, 32), (16, 64), (7, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_no_whole_number_of_blocks_is_dequantised_right(shape, dtype):
    require_bitsandbytes()
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).reshape(-1, 64)
    scales = flat.abs().amax(dim=1, keepdim=True)
    nearest = (flat / scales).unsqueeze(-1).sub(state.code).abs().argmin(dim=-1)
    expected = (state.code[nearest] * scales).flatten()[: weight.numel()].reshape(shape)
    state.dtype = dtype
    torch.testing.assert_close(dequantize_4bit(packed, state), expected.to(dtype), rtol=1e-2, atol=1e-6)


def test_without_bitsandbytes_the_install_command_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    words = r"cannot be imported: .*\n  fix: install it with `pip install 'brim\[quantization\]'"
    with pytest.raises(ModelError, match=words):
        require_bitsandbytes()


@pytest.mark.process
def test_importing_it_says_nothing_fetches_nothing_and_leaves_the_compiler_alone(tmp_path):
    """With a package `kernels` at hand, it would have native code from the Hub run on some CPUs."""
    (tmp_path / "kernels.py").write_text("def get_kernel(*a, **k):\n    raise SystemExit('fetched')\n")
    code = (
        "import kernels, sys, torch\n"
        "from brim.models import require_bitsandbytes\n"
        "before = torch.compile; require_bitsandbytes()\n"
        "assert sys.modules['kernels'] is kernels and 'bitsandbytes' in sys.modules\n"
        "assert 'torch._inductor' not in sys.modules and torch.compile is before\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
