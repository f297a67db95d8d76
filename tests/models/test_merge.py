"""Merging: what the merged layers compute, against formulas in fp64 on the files alone; what cannot be merged."""

import json
import math

import peft
import pytest
import torch
from safetensors import safe_open
from tests.infer.families import build
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from brim.config.schema import LoraConfig
from brim.errors import ModelError
from brim.models import PassingMerge, merge_adapter
from brim.models.adapters import add_adapter

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT, on what follows then
IDS = torch.tensor([[5, 6, 7, 8, 9, 40, 41]])
PREFIX = "base_model.model."
QUANTIZED = {
    "4-bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8-bit": {"load_in_8bit": True},
}
LORA = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 4},
    "dora": {"use_dora": True},
    "all-linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "dora on the embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["lm_head"]},
}


def loaded(folder, dtype=torch.float32, quantized=None):
    given = {"quantization_config": BitsAndBytesConfig(**QUANTIZED[quantized])} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given).eval()


@pytest.fixture
def gpt2(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def saved_adapter(base, path, settings):
    """An adapter in whose weights, biases and magnitudes each element is drawn, on disk as PEFT writes it."""
    model = add_adapter(base, LoraConfig(type="lora", dropout=0.0, **settings), seed=0, trainable=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                drawn = torch.randn(weight.shape) * 0.1
                weight.copy_(weight * (1 + drawn) if "magnitude" in name else drawn)
    model.save_pretrained(str(path), save_embedding_layers=False)
    return path


def adapted(base, path):
    settings = LoraConfig(type="lora", pretrained_adapter_weights=str(path))
    return add_adapter(base, settings, seed=0, trainable=False).eval()


def tensors(file):
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_tensor(name).double() for name in stored.keys()}  # noqa: SIM118 (not a dict)


def oracle(base, adapter, *, transposed=()):
    """The merged state dict in fp64, from the adapter's files and the base's weights, without PEFT."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / (math.sqrt(settings["r"]) if settings["use_rslora"] else settings["r"])
    stored = tensors(adapter / "adapter_model.safetensors")
    learned = {name.removeprefix(PREFIX): weight for name, weight in stored.items()}
    state = {name: weight.detach().clone().double() for name, weight in base.items()}
    for name, weight in learned.items():
        if name.endswith(".bias"):
            state[name.replace(".base_layer", "")] = weight
        layer, _, part = name.partition(".lora_")
        if part not in ("A.weight", "embedding_A"):
            continue
        other = learned[f"{layer}.lora_B.weight" if part == "A.weight" else f"{layer}.lora_embedding_B"]
        flip = part == "embedding_A" or layer.endswith(tuple(transposed))
        new = (state[f"{layer}.weight"].T if flip else state[f"{layer}.weight"]) + scale * other @ weight
        if settings["use_dora"]:
            lengths = new.pow(2).sum(1).sqrt()
            new = new * (learned[f"{layer}.lora_magnitude_vector"].flatten() / lengths)[:, None]
        state[f"{layer}.weight"] = new.T if flip else new
    return state


def assert_equal(model, state, *, tolerance):
    merged = model.state_dict()
    assert merged.keys() == state.keys()
    for name, weight in state.items():
        assert (merged[name].double() - weight).abs().max() <= tolerance * weight.abs().max(), name


def dequantized(base):
    """A state dict with plain weights: 4 bits by bitsandbytes' own function, 8 bits as integers times row scales."""
    import bitsandbytes as bnb
    from transformers.pytorch_utils import Conv1D

    state = {name: weight for name, weight in base.state_dict().items() if ".weight." not in name and "SCB" not in name}
    for name, layer in base.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            weight = layer.weight.data.double() * layer.weight.SCB.double()[:, None] / 127
        else:
            continue
        state[f"{name}.weight"] = weight.T if layer.source_cls is Conv1D else weight
    return {name: weight for name, weight in state.items() if not name.endswith("weight_format")}


@pytest.fixture
def adapter(tiny_base, tmp_path):
    """An adapter with such settings, on disk."""
    return lambda **settings: saved_adapter(loaded(tiny_base), tmp_path / "adapter", settings)


@pytest.mark.parametrize("settings", LORA.values(), ids=LORA)
def test_merged_weights_are_those_of_the_formula(tiny_base, adapter, tmp_path, settings):
    base, path = loaded(tiny_base), adapter(**settings)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = adapted(base, path)
    logits = model(IDS).logits
    merged = merge_adapter(model, dtype=torch.float32)
    assert_equal(merged, oracle(before, path), tolerance=1e-6)
    assert torch.allclose(merged(IDS).logits, logits, atol=1e-5)
    assert not torch.allclose(loaded(tiny_base)(IDS).logits, logits, atol=1e-1)
    if settings == LORA["head"]:  # a weight that is no longer shared is saved twice
        merged.save_pretrained(tmp_path / "merged")
        again = loaded(tmp_path / "merged")
        assert not again.config.tie_word_embeddings
        assert torch.equal(again.get_input_embeddings().weight, before["model.embed_tokens.weight"])
        assert torch.allclose(again(IDS).logits, logits, atol=1e-5)


@pytest.mark.parametrize(
    ("bias_type", "quantized"), [("all", None), ("lora_only", None), ("all", "4-bit"), ("lora_only", "8-bit")]
)
def test_transposed_layers_and_trained_biases(gpt2, tmp_path, bias_type, quantized):
    settings = {"bias_type": bias_type, "target_modules": ["c_attn", "c_proj"]}
    path = saved_adapter(loaded(gpt2), tmp_path / "adapter", settings)
    base = loaded(gpt2, quantized=quantized)
    before = dequantized(base)
    merged = merge_adapter(adapted(base, path), dtype=torch.float32)
    assert_equal(merged, oracle(before, path, transposed=["c_attn", "c_proj"]), tolerance=1e-6)


@pytest.mark.parametrize(
    ("quantized", "dtype", "settings"),
    [
        ("4-bit", torch.float32, LORA["dora"]),
        ("4-bit", torch.bfloat16, LORA["all-linear"]),
        ("8-bit", torch.float32, LORA["all-linear"]),
        ("8-bit", torch.bfloat16, LORA["dora"]),
    ],
    ids=str,
)
def test_a_quantised_base_is_dequantised_before_it_is_merged(tiny_base, adapter, tmp_path, quantized, dtype, settings):
    path, base = adapter(**settings), loaded(tiny_base, dtype, quantized)
    before = dequantized(base)
    merged = merge_adapter(adapted(base, path), dtype=torch.float32)
    assert_equal(merged, oracle(before, path), tolerance=1e-6)
    merged.save_pretrained(tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert torch.equal(loaded(tmp_path / "merged")(IDS).logits, merged(IDS).logits)


def test_16_bits_are_the_rounded_weights_and_nothing_else(tiny_base, adapter, tmp_path):
    path = adapter()
    exact = merge_adapter(adapted(loaded(tiny_base), path), dtype=torch.float32).state_dict()
    for dtype in (torch.bfloat16, torch.float16):
        merged = merge_adapter(adapted(loaded(tiny_base), path), dtype=dtype)
        assert all(torch.equal(weight, exact[name].to(dtype)) for name, weight in merged.state_dict().items())
        merged.save_pretrained(tmp_path / "merged")
        assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == str(dtype)[6:]


def bits(model):
    return {name: (id(weight), weight.clone()) for name, weight in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "all-linear"])
def test_weights_that_are_merged_for_a_while_come_back_to_the_bit(tiny_base, adapter, kind, dtype, most):
    path = adapter(**LORA[kind])
    model = adapted(loaded(tiny_base, dtype), path)
    expected = merge_adapter(adapted(loaded(tiny_base, dtype), path), dtype=dtype)
    before, unmerged, merge = bits(model), model(IDS).logits, PassingMerge(model)
    touched_bytes = sum(layer.weight.nbytes for layer in model.modules() if hasattr(layer, "lora_A"))
    held_bytes = sum(weight.nbytes for weight in model.parameters())
    assert merge.against == ""
    with merge.tried():
        tried = model(IDS).logits
    with pytest.raises(ZeroDivisionError), merge.done(keeps=True):  # as out of memory might be
        merged_bytes = sum(weight.nbytes for weight in model.parameters())
        assert "lora" not in str(model.get_base_model()).lower()
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
        assert torch.equal(model.generate(IDS, max_new_tokens=3), expected.generate(IDS, max_new_tokens=3))
        _ = 1 / 0
    assert torch.equal(tried, expected(IDS).logits)
    assert ((tried - unmerged).abs().max() / unmerged.abs().max()).item() <= most
    assert merge.kept_bytes == held_bytes - merged_bytes + touched_bytes
    for name, (identity, weight) in bits(model).items():
        assert identity == before[name][0]
        assert torch.equal(weight, before[name][1])
    assert torch.equal(model(IDS).logits, unmerged)
    with merge.done(keeps=False):
        pass
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_what_is_tried_shows_where_a_model_reads_weights_by_itself():
    base = build("jamba").eval()  # its time steps: by dt_proj.weight and dt_proj.bias, past PEFT's layer
    model = add_adapter(base, LoraConfig(type="lora", target_modules=["dt_proj"]), seed=0, trainable=True).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape))
        merge, unmerged = PassingMerge(model), model(IDS).logits
        with merge.tried():
            tried = model(IDS).logits
        with merge.done(keeps=True):
            done = model(IDS).logits
    assert torch.equal(tried, done)
    assert not torch.allclose(tried, unmerged, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "quantized", "reason"),
    [
        ("head", None, "another layer shares the weight of lm_head"),
        ("embedding", None, "another layer shares the weight of model.embed_tokens"),
        ("lora", "4-bit", r"is quantised"),
        ("lora", "8-bit", r"is quantised"),
    ],
)
def test_what_is_not_merged_for_a_while(tiny_base, adapter, kind, quantized, reason):
    model = adapted(loaded(tiny_base, quantized=quantized), adapter(**LORA[kind]))
    assert reason in PassingMerge(model).against


def test_what_has_no_formula_is_refused(tiny_base):
    for change, message in [
        ({"lora_bias": True}, r"cannot be merged: model\.layers\.0\.self_attn\.q_proj \(Linear, Linear\)"),
        ({"trainable_token_indices": [5, 6]}, r"cannot be merged: model\.embed_tokens \(TrainableTokensWrapper\)"),
    ]:
        settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **change)
        base = loaded(tiny_base)
        for layer in base.model.layers:
            layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(32))
        with pytest.raises(ModelError, match=message):
            merge_adapter(peft.get_peft_model(base, settings), dtype=torch.float32)


def test_whole_modules_that_were_saved_with_an_adapter_take_the_place_of_the_bases(tiny_base):
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(loaded(tiny_base), settings)
    head = model.base_model.model.lm_head.modules_to_save["default"]
    torch.nn.init.normal_(head.weight)
    expected = head.weight.detach().clone()
    merged = merge_adapter(model, dtype=torch.float32)
    assert torch.equal(merged.lm_head.weight, expected)
    assert torch.equal(merged.model.embed_tokens.weight, loaded(tiny_base).model.embed_tokens.weight)
