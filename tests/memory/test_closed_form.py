"""Architectures read, activations counted, and the napkin's sums, against real models and by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.memory.tiny_architectures import FAMILIES, GPT, SMALL
from tests.memory.traced import Births
from transformers import AutoConfig, AutoModelForCausalLM

from brim.config import load_config
from brim.config.schema import LoraConfig
from brim.errors import ModelError
from brim.memory.closed_form import napkin, settings_of
from brim.memory.closed_form.architecture import FAMILIES as KNOWN, read_architecture
from brim.memory.closed_form.breakdown import stored_bytes
from brim.memory.closed_form.trained import (
    Arithmetic,
    Optimizer,
    Trained,
    kept_in_a_layer,
    lora_tensors,
    optimizer_state,
)
from brim.models.adapters import add_adapter
from brim.models.folders import ModelFolder
from brim.models.loss import chunk_rows

MODELS = Path(__file__).parents[2] / "benchmarks" / "data" / "memory" / "models"


def public(name):
    return json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))


LLAMA, MISTRAL = public("meta-llama--Llama-2-7b-hf"), public("mistralai--Mistral-7B-v0.1")
N = 6_738_415_616  # parameters of Llama 2 7B


HEADS = {**SMALL, "head_dim": 16}
TINY = FAMILIES | dict.fromkeys(("qwen3", "gemma", "gemma2", "gemma3_text", "ministral"), HEADS) | {"granite": SMALL}
TINY |= {"mixtral": {**SMALL, "num_local_experts": 4}, "qwen3_moe": {**FAMILIES["qwen3_moe"], "head_dim": 16}}
CASES = [
    *((kind, TINY[kind]) for kind in KNOWN),
    ("llama", {**HEADS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("gpt2", {**GPT, "n_inner": 96}),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
]


@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(CASES)])
def test_every_parameter_is_counted_and_every_linear_layer_has_its_shape(kind, sizes):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    architecture = read_architecture({"model_type": kind, **sizes})
    assert architecture.is_known
    assert sum(architecture.parameters().values()) == sum(each.numel() for each in model.parameters())
    names = dict(model.named_parameters())
    layers = [name for name in names if ".2." in name and name.endswith("weight")]
    shapes = sorted((name.split(".")[-2], *sorted(names[name].shape)) for name in layers if names[name].ndim == 2)
    told = [(linear.name, *sorted((linear.inputs, linear.outputs))) for linear in architecture.linears]
    fused = {linear.name for linear in architecture.linears if linear.copies > 1}
    assert sorted(each for each in told if each[0] not in fused) == shapes


def test_what_a_config_json_may_say():
    text = {"model_type": "gemma3_text", **HEADS}
    assert read_architecture({"model_type": "gemma3", "text_config": text}) == read_architecture(text)
    other = read_architecture({"model_type": "newcomer", **SMALL})
    assert not other.is_known
    assert other.linears == read_architecture({"model_type": "llama", **SMALL}).linears
    with pytest.raises(ModelError, match=r"config\.json does not say num_hidden_layers"):
        read_architecture({"model_type": "llama", **SMALL, "num_hidden_layers": None})
    in_two_bytes = [{"torch_dtype": "float16"}, {"dtype": "torch.bfloat16"}, {"dtype": None, "torch_dtype": "float16"}]
    for config in [*in_two_bytes, {"text_config": {"dtype": "float16"}}, {}]:
        assert (
            stored_bytes(config)
            == ModelFolder.stored_dtype.fget(SimpleNamespace(config=config)).itemsize
            == (2 if config else 4)
        )


ROWS, TOKENS = 2, 32
WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 176}
WIDE |= {"residual_dropout": 0, "embedding_dropout": 0}
WIDE_GPT2 = {**GPT, "n_embd": 64}
WIDE_GPT2 |= {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
ADAPTER = LoraConfig(type="lora", r=8, target_modules=("q_proj", "up_proj", "down_proj"), dropout=0.1)


def saved_by_a_layer(kind, sizes, *, dtype, lora, attention):
    """Bytes a token that live after a forward pass of one more layer, weights apart."""

    def saved(layers):
        depth = {"n_layer" if "n_layer" in sizes else "num_hidden_layers": layers}
        config = AutoConfig.for_model(kind, **{**sizes, **depth})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()
        if lora is not None:
            model = add_adapter(model, lora, seed=0, trainable=True).train()
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        with Births() as births:
            out = model(input_ids=ids, use_cache=False)
            assert out.logits.requires_grad  # held here, and all that it keeps
        return births.live_bytes

    return (saved(3) - saved(2)) / (ROWS * TOKENS)


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "lora", "attention"),
    [
        ("llama", WIDE, "bfloat16", None, "sdpa"),
        ("llama", WIDE, "bfloat16", None, "eager"),
        ("llama", WIDE, "bfloat16", ADAPTER, "sdpa"),
        ("llama", WIDE, "float32", ADAPTER, "eager"),
        ("qwen3", {**WIDE, "head_dim": 16}, "bfloat16", None, "sdpa"),
        ("gemma", {**WIDE, "head_dim": 16}, "bfloat16", None, "sdpa"),
        ("gpt2", WIDE_GPT2, "float32", None, "sdpa"),
        ("starcoder2", WIDE, "bfloat16", None, "sdpa"),
    ],
)
def test_the_rule_is_within_a_hundredth_of_what_is_saved(kind, sizes, dtype, lora, attention):
    each = 4 if dtype == "float32" else 2
    arithmetic = Arithmetic(compute_bytes=each, residual_bytes=each, autocast=False)
    how = {"lora": lora, "attention": attention, "sequence_length": TOKENS}
    parts = kept_in_a_layer(read_architecture({"model_type": kind, **sizes}), arithmetic, **how)
    saved = saved_by_a_layer(kind, sizes, dtype=getattr(torch, dtype), lora=lora, attention=attention)
    # What is left out: a few numbers a token, such as the norms' variances.
    assert 0 <= saved - sum(part.bytes_per_token for part in parts) <= 0.01 * saved


def adapter_part(*, recomputed=False, **settings):
    lora = LoraConfig(type="lora", r=8, target_modules=("q_proj", "k_proj", "down_proj"), dropout=0.1, **settings)
    parts = kept_in_a_layer(
        read_architecture({"model_type": "llama", **WIDE}),
        Arithmetic(compute_bytes=2, residual_bytes=2, autocast=False),
        lora=lora,
        attention="sdpa",
        sequence_length=8,
        recomputed=recomputed,
    )
    (adapter,) = (part for part in parts if part.name == "adapter")
    return adapter.formula, adapter.bytes_per_token


def test_an_adapter_keeps_an_input_once_a_product_where_it_is_recomputed_and_dropouts_mask_with_dora():
    assert adapter_part() == ("64 × 2 B + 3 × 8 × 2 B + 304 × 1 bit", 214)
    assert adapter_part(recomputed=True) == ("240 × 2 B + 3 × 8 × 2 B + 304 × 1 bit", 566)
    assert adapter_part(use_dora=True) == ("304 × 4 B + 3 × 8 × 4 B + 304 × 1 B", 1616)


def worked(base, phase="train", rows=1, tokens=2048, world_size=1, chunked_loss=False, **keys):
    config = load_config({"base_model": "base", "trainer": {"type": "finetune", "optimizer": "adamw"}, **keys}).config
    shape = {"batch_size": rows, "sequence_length": tokens, "world_size": world_size}
    return napkin(base, settings_of(config, base, phase=phase, chunked_loss=chunked_loss, **shape))


def lines(found):
    return {line.name: line for line in found.lines}


def test_112_gigabytes_of_the_workshop():
    found = worked(LLAMA, precision="fp32")
    by_name = lines(found)
    assert by_name["weights"].num_bytes == by_name["gradients"].num_bytes == 4 * N
    assert by_name["adamw"].num_bytes == 8 * N
    assert by_name["weights"].formula.startswith("6,738,415,616 parameters × 4 B (embeddings 131,072,000 + attention")
    assert by_name["adamw"].formula == "6,738,415,616 trained × 2 averages × 4 B"
    assert found.moments["update"] == 16 * N
    cut = lines(worked(LLAMA, precision="fp32", world_size=4))
    assert [cut[name].num_bytes for name in ("weights", "gradients", "adamw")] == [N, N, 2 * N]
    assert cut["adamw"].formula.endswith("/ 4 processes")


def test_lora_on_mistral_in_16_bits_with_checkpointing():
    adapter = {"type": "lora", "r": 16, "dropout": 0, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    trainer = {"type": "finetune", "optimizer": "adamw", "enable_gradient_checkpointing": True}
    found = worked(MISTRAL, rows=4, tokens=4096, precision="bf16-true", adapter=adapter, trainer=trainer)
    by_name = lines(found)
    added = 32 * 16 * (4 * 4096 + 2 * 4096 + 2 * 1024)  # q and o: 4096 + 4096 each; k and v: 4096 + 1024 each
    formula = f"r 16 × (inputs + outputs) of q_proj, k_proj, v_proj, o_proj = {added:,} × 4 B"
    assert by_name["weights"].num_bytes == 7_241_732_096 * 2
    assert by_name["adapter"].num_bytes == by_name["gradients"].num_bytes == 4 * added
    assert by_name["adapter"].formula == formula
    assert by_name["between the layers"].num_bytes == 4 * 4096 * 32 * 4096 * 2
    assert by_name["logits and loss"].num_bytes == 4 * 4096 * 32_000 * 12
    assert found.peak == "loss"
    # The same run on an A100 with transformers' Trainer (gpu_memory_a100.csv), which holds the 16-bit logits, too.
    assert found.total_bytes + 4 * 4096 * 32_000 * 2 == pytest.approx(26_704_571_904, rel=0.02)


def test_layers_that_are_not_recomputed_keep_what_they_keep_without_checkpointing():
    none, some, every = (
        worked(LLAMA, precision="fp32", trainer={"type": "finetune", "enable_gradient_checkpointing": of})
        for of in (False, 8, True)
    )
    by_name = lines(some)
    assert 32 * by_name["activations"].num_bytes == 24 * lines(none)["activations"].num_bytes
    assert 32 * by_name["between the layers"].num_bytes == 8 * lines(every)["between the layers"].num_bytes
    assert by_name["inside one layer"].moments == ("backward ends",)


def test_quantised_weights_by_hand():
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    four = lines(worked(LLAMA, precision="bf16-true", adapter="lora", quantization={"bits": 4}))
    assert four["weights in 4 bits"].num_bytes == layers // 2 + layers // 64 + layers // 64 // 256 * 4
    assert four["weights in 4 bits"].num_bytes * 8 / layers == pytest.approx(4.127, abs=1e-3)
    assert four["weights"].num_bytes == 2 * (N - layers)
    single = {"bits": 4, "bnb_4bit_use_double_quant": False}
    plain = lines(worked(LLAMA, precision="bf16-true", adapter="lora", quantization=single))
    assert plain["weights in 4 bits"].num_bytes * 8 == 4.5 * layers
    eight = lines(worked(LLAMA, precision="bf16-true", adapter="lora", quantization={"bits": 8}))
    assert eight["weights in 8 bits"].num_bytes == layers + 4 * 32 * (5 * 4096 + 2 * 11_008)


def test_mixed_precision_casts_the_weights_that_train_and_frozen_ones_lie_in_the_dtype_of_arithmetic():
    others = 131_072_000 + 65 * 4096  # embeddings and norms
    assert lines(worked(LLAMA, precision="bf16-mixed"))["casts"].num_bytes == 2 * (N - others)
    for stored, num_bytes in (("float16", 2 * N), ("float32", 2 * N + 2 * others)):
        found = lines(worked({**LLAMA, "torch_dtype": stored}, precision="bf16-mixed", adapter="lora"))
        assert "casts" not in found
        assert found["weights"].num_bytes == num_bytes
        frozen = "of which 6,607,077,376 frozen in linear layers × 2 B"
        assert (frozen in found["weights"].formula) == (stored == "float32")
    trainer = {"type": "finetune", "enable_gradient_checkpointing": True}
    for precision, each in (("fp16-mixed", 2), ("bf16-mixed", 4)):  # stored in fp16: two dtypes of 16 bits make 32
        found = lines(worked(LLAMA, precision=precision, adapter="lora", trainer=trainer))
        assert found["between the layers"].num_bytes == 2048 * 32 * 4096 * each


@pytest.mark.parametrize("head_trains", [True, False])
def test_a_chunk_of_logits_instead_of_all(head_trains):
    keys = {} if head_trains else {"adapter": "lora"}
    found = lines(worked(LLAMA, rows=8, precision="bf16-true", chunked_loss=True, **keys))
    rows = chunk_rows(32_000, head_trains=head_trains)
    of_the_head = 32_000 * 4096 * 4 if head_trains else 0
    assert found["logits and loss"].num_bytes == rows * 32_000 * 6 + 2 * 8 * 2048 * 4096 * 2 + of_the_head


def test_the_cache_grows_to_prompt_and_answer_and_beams_are_rows():
    keys = {"phase": "generate", "precision": "bf16-true"}
    found = worked(MISTRAL, rows=4, tokens=1000, generation={"max_new_tokens": 24}, **keys)
    assert lines(found)["KV cache, prefill"].num_bytes == 4 * 1000 * 2 * 32 * 1024 * 2
    assert lines(found)["KV cache, decode"].num_bytes == 4 * 1024 * 2 * 32 * 1024 * 2
    assert set(found.moments) == {"prefill", "decode"}
    beams = lines(worked(MISTRAL, rows=2, tokens=10, generation={"max_new_tokens": 1, "num_beams": 3}, **keys))
    assert beams["KV cache, prefill"].formula.startswith("6 rows × 10 tokens")


def test_loading_is_weights_alone_evaluating_keeps_no_layers_and_each_moment_is_the_sum_of_its_lines():
    assert worked(LLAMA, phase="load", precision="bf16-true").total_bytes == 2 * N
    scored = lines(worked(LLAMA, phase="evaluate", rows=2, tokens=100, precision="bf16-true"))
    assert scored["logits and loss"].num_bytes == 200 * 32_000 * 10
    assert "activations" not in scored
    found = worked(LLAMA, precision="bf16-mixed", trainer={"type": "finetune", "enable_gradient_checkpointing": True})
    for moment, total in found.moments.items():
        assert total == sum(line.num_bytes for line in found.lines if moment in line.moments)
    assert found.total_bytes == max(found.moments.values()) == found.as_dict()["total_bytes"]
    notes = worked({**LLAMA, "model_type": "newcomer"}).notes
    assert notes == ("newcomer is not known to the napkin: taken for a Llama",)


def test_what_an_optimizer_keeps():
    tensors = [Trained(rows=4, columns=40, count=2), Trained(rows=40, columns=2, count=1)]
    assert sum(tensor.elements for tensor in tensors) == 400
    for kind, element_bytes, state_bytes in (
        ("adam", 4, 8 * 400),
        ("adamw", 2, 4 * 400),
        ("sgd", 4, 0),
        ("lion", 4, 4 * 400),
        ("adamw_8bit", 4, 8 * 400),  # each tensor is below 4,096 elements
        ("paged_adamw", 4, 0),
    ):
        state = optimizer_state(Optimizer(type=kind), tensors, element_bytes=element_bytes)
        assert state.num_bytes == state_bytes, kind
    scaled = optimizer_state(Optimizer(type="adamw_8bit"), [Trained(rows=64, columns=100, count=3)], element_bytes=4)
    assert scaled.num_bytes == 2 * 3 * (6_400 + 25 * 4)  # a scale for 256 values
    # Against the real optimizers.
    weights = [torch.nn.Parameter(torch.ones(30, 20)), torch.nn.Parameter(torch.ones(7))]
    shapes = [Trained(rows=30, columns=20, count=1), Trained(rows=7, columns=1, count=1)]
    for name, kind in [("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor)]:
        optimizer = kind(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        tensors = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
        kept = sum(tensor.nbytes for tensor in tensors)
        assert optimizer_state(Optimizer(type=name), shapes, element_bytes=4).num_bytes == kept


def test_adapters_on_named_on_all_and_on_matched_layers():
    def added(targets, base=LLAMA):
        lora = LoraConfig(type="lora", r=2, target_modules=targets)
        return sum(tensor.elements for tensor in lora_tensors(read_architecture(base), lora))

    assert added(None) == added(("q_proj", "v_proj")) == 32 * 2 * 2 * 8192
    assert added("all-linear") == 32 * 2 * (4 * 8192 + 3 * (4096 + 11_008))
    assert added(r"model\.layers\.[0-3]\.mlp\.down_proj") == 4 * 2 * (4096 + 11_008)
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    assert added(("mlp.c_proj",), gpt2) == 3 * 2 * (256 + 64)
    assert added(("c_proj",), gpt2) == 3 * 2 * (256 + 64 + 64 + 64)
