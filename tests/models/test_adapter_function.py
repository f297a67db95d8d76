"""brim's own LoRA function: what it keeps, which operators it runs, and that it computes what PEFT does."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from tests.memory.traced import Births
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from brim.memory.cuda import liger_stand_ins
from brim.models.adapter_function import AdapterFunction, AdapterVariant, use_adapter_function
from brim.models.dropout import drop_by_row
from brim.models.kernels import LayerKernels, forms_of

DEMO = Path(__file__).parents[2] / "examples" / "stdlib_code" / "base-model"


def with_adapter(model, *, own, targets="all-linear", **settings):
    """An adapter whose weights do something, drawn from one seed."""
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    if own:
        use_adapter_function(model)
    return model.train()


# What is kept, and which operators run: one layer of a Llama, by the difference between three layers and two

ROWS, TOKENS, HIDDEN, INNER, RANK, PROJECTIONS = 2, 16, 512, 1792, 16, 7
VIEWS = {"view", "_unsafe_view", "t", "transpose", "expand", "slice", "unsqueeze", "detach"}


class Operators(TorchDispatchMode):
    """Counts all but views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") not in VIEWS
        return func(*args, **(kwargs or {}))


def llama(num_layers, own, dropout, kernels=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 8, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=num_layers))
    if kernels is not None:
        LayerKernels(forms=forms_of(model), kernels=kernels).use(model)
    model.to(torch.bfloat16)
    if own is None:
        return model.requires_grad_(False).train()
    return with_adapter(model, own=own, r=RANK, lora_dropout=dropout)


def of_a_layer(own, *, dropout=0.05, around=nullcontext, kernels=None):
    """Bytes a token that live after a layer's forward pass, and its operators. own: None is the frozen layer."""
    found = []
    for num_layers in (2, 3):
        model = llama(num_layers, own, dropout, kernels)
        x = torch.randn(ROWS, TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        with Births() as births, Operators() as operators, around():
            out = model(inputs_embeds=x, use_cache=False)
            assert out.logits.requires_grad  # held here, and all that it keeps
        found.append((births.live_bytes / (ROWS * TOKENS), operators.count))
    (few, run_by_few), (more, run_by_more) = found
    return more - few, run_by_more - run_by_few


def hooked():
    """Hooks on what is saved, as activation checkpointing has them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def test_a_layer_keeps_each_input_once_and_of_a_product_the_factors():
    frozen, run_by_frozen = of_a_layer(None)
    # The norms' outputs, each read by two projections or three; what attention returns is kept by attention.
    inputs, hidden, bits = 2 * 2 * HIDDEN, 2 * RANK * PROJECTIONS, (6 * HIDDEN + INNER) // 8
    assert frozen + inputs + hidden + bits == of_a_layer(True)[0] <= 23_000
    assert frozen + inputs + hidden + bits + 2 * INNER == of_a_layer(True, around=hooked)[0] <= 26_500
    assert of_a_layer(False)[0] > 50_000
    assert of_a_layer(True, dropout=0.0) == (frozen + inputs + hidden, run_by_frozen + 4 * PROJECTIONS)


def test_with_ligers_kernels_it_keeps_less_and_multiplies_again_still():
    liger = liger_stand_ins(None)
    frozen, _ = of_a_layer(None, kernels=liger)
    # A norm keeps its input and a number; attention what it reads and returns, and a number a head.
    assert frozen == 2 * (2 * HIDDEN + 4) + (4 * 2 * HIDDEN + 8 * 4) + 2 * 2 * INNER == 13_352
    inputs, hidden, bits = 2 * 2 * HIDDEN, 2 * RANK * PROJECTIONS, (6 * HIDDEN + INNER) // 8
    assert of_a_layer(True, kernels=liger)[0] == frozen + inputs + hidden + bits
    assert of_a_layer(True, kernels=liger, around=hooked)[0] == frozen + inputs + hidden + bits + 2 * INNER


def test_layers_that_read_one_tensor_share_its_cast():
    def autocast():
        return torch.autocast("cpu", torch.float16)  # over bf16, so that each input is cast

    kept = of_a_layer(True, dropout=0.0, around=autocast)[0] - of_a_layer(None, around=autocast)[0]
    assert kept == 2 * 2 * HIDDEN + 2 * RANK * PROJECTIONS
    model, x = llama(2, True, 0.0), torch.randn(1, 3, HIDDEN)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with autocast(), torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        assert torch.equal(layer(x.mul_(2)), layer(x.clone()))  # in place: another value, and another cast


# Computes what PEFT does

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model whose queries, keys and values have biases."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, vocab_size=64))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


def gradient(base, *, own, bits=16, dtype=torch.float32, autocast=None, checkpointing=False, by_row=False, dropout=0.3):
    """Loss, gradient of the adapter, and what is drawn next from PyTorch's generator."""
    settings = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}, 8: {"load_in_8bit": True}}
    keys = {} if bits == 16 else {"quantization_config": BitsAndBytesConfig(**settings[bits])}
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=dtype, **keys)
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    model = with_adapter(model, own=own, r=4, lora_alpha=7, lora_dropout=dropout)
    if dtype == torch.float64:
        model.double()
    rows = drop_by_row(model, seed=5).of_rows([1, 2, 3], [17, 17, 17], step=0) if by_row else nullcontext()
    torch.manual_seed(9)
    with rows:
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    grads = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert {grad.dtype for grad in grads} == {torch.float64 if dtype == torch.float64 else torch.float32}
    return loss.item(), torch.cat([grad.double().flatten() for grad in grads]), torch.rand(())


FP32 = {"dtype": torch.float32}
BF16 = {"dtype": torch.bfloat16}
MIXED = {**FP32, "autocast": torch.bfloat16}
CASES = {
    "fp64": ({"dtype": torch.float64}, 1e-12),
    "fp32": (FP32, 1e-6),
    "fp32, no dropout": ({**FP32, "dropout": 0.0}, 1e-6),
    "fp32, by row": ({**FP32, "by_row": True}, 1e-6),
    "bf16-true": (BF16, 1e-2),
    "bf16-mixed": (MIXED, 1e-2),
    "fp16-mixed": ({**FP32, "autocast": torch.float16}, 2e-3),
    "fp16-mixed over bf16": ({**BF16, "autocast": torch.float16}, 2e-3),
    **{f"{bits} bits, fp32": ({**FP32, "bits": bits}, 1e-6) for bits in (4, 8)},
    **{f"{bits} bits, bf16-true": ({**BF16, "bits": bits}, 1e-2) for bits in (4, 8)},
    **{f"{bits} bits, bf16-mixed": ({**MIXED, "bits": bits}, 1e-2) for bits in (4, 8)},
}


@pytest.mark.parametrize(("case", "tolerance"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
def test_loss_and_gradient_are_those_of_peft_with_the_same_masks(base, case, tolerance, checkpointing):
    loss, grad, drawn = gradient(base, own=True, checkpointing=checkpointing, **case)
    expected, expected_grad, drawn_by_peft = gradient(base, own=False, checkpointing=checkpointing, **case)
    assert loss == pytest.approx(expected, rel=tolerance)
    assert (grad - expected_grad).norm() <= tolerance * expected_grad.norm()
    assert torch.equal(drawn, drawn_by_peft)  # a mask that is drawn again leaves the generator where it was


def test_the_demos_losses_are_those_of_peft():
    def losses(own):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO), dtype=torch.float32)
        model = with_adapter(model, own=own, r=16, lora_dropout=0.05)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
        for _ in range(8):
            ids = torch.randint(2, 2000, (2, 24))
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    assert list(losses(True)) == pytest.approx(list(losses(False)), rel=1e-5)


# PEFT's own: all else


def test_only_plain_lora_on_linear_layers_is_computed_so():
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    small |= {"num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    sizes = {"gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}, "qwen2": small, "mixtral": small}

    def layers(kind="qwen2", targets="all-linear", **settings):
        config = AutoConfig.for_model(kind, vocab_size=60, bos_token_id=0, eos_token_id=0, **sizes[kind])
        model = with_adapter(AutoModelForCausalLM.from_config(config), own=True, targets=targets, **settings)
        return {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if any(isinstance(each, AdapterVariant) for each in getattr(layer, "lora_variant", {}).values())
        }

    assert layers() == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers(use_dora=True) == set()
    assert layers(targets=["q_proj"], lora_bias=True) == set()
    assert layers(targets=["embed_tokens", "q_proj"]) == {"q_proj"}
    assert layers("gpt2", ["c_attn"], fan_in_fan_out=True) == set()
    assert layers("mixtral", ["q_proj"], target_parameters=["mlp.experts.down_proj"]) == {"q_proj"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_off_merged_and_saved_it_is_pefts(base, tmp_path, dtype):
    def made(own):
        return with_adapter(Qwen2ForCausalLM.from_pretrained(base, dtype=dtype), own=own, r=4).eval()

    ours, theirs = made(True), made(False)
    plain = Qwen2ForCausalLM.from_pretrained(base, dtype=dtype).eval()
    with torch.inference_mode():
        adapted = ours(input_ids=IDS).logits
        with ours.disable_adapter():
            assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    torch.testing.assert_close(adapted, theirs(input_ids=IDS).logits, rtol=2e-2, atol=2e-2)
    for name, model in (("ours", ours), ("theirs", theirs)):
        model.save_pretrained(tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    for safe in (True, False):
        for model in (ours, theirs):
            model.merge_adapter(safe_merge=safe)
        assert_same_weights(ours, theirs)
        assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
        for model in (ours, theirs):
            model.unmerge_adapter()
        assert_same_weights(ours, theirs)


def assert_same_weights(ours, theirs):
    for (name, mine), weight in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, weight), name


def test_a_product_that_a_checkpoint_around_its_factors_makes_again_is_kept():
    def gradients(run):
        mlp = llama(1, True, 0.0).get_base_model().model.layers[0].mlp
        hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        mlp.down_proj(run(lambda x: mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), hidden)).square().sum().backward()
        return [hidden.grad, *(p.grad for p in mlp.parameters() if p.requires_grad)]

    plain = gradients(lambda function, hidden: function(hidden))
    recomputed = gradients(partial(checkpoint, use_reentrant=False))
    assert all(torch.equal(one, other) for one, other in zip(recomputed, plain, strict=True))


def test_what_a_hook_keeps_of_the_base_is_not_overwritten_and_small_scales_do_not_overflow():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8, bias=False))
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=64, lora_alpha=1, target_modules=["0"], init_lora_weights=False)
    )
    use_adapter_function(model)
    layer, kept = model.base_model.model[0], []
    handle = layer.get_base_layer().register_forward_hook(lambda module, given, output: kept.append(output))
    x = torch.randn(4, 8)
    out = model(x)
    torch.testing.assert_close(kept[0], x @ layer.get_base_layer().weight.t())
    assert not torch.allclose(out, kept[0])
    handle.remove()
    with torch.no_grad():
        torch.testing.assert_close(model(x), out)  # without gradients it is computed directly
    half = AdapterFunction.apply
    down, up = (torch.full(*each, requires_grad=True) for each in (((64, 8), 0.01), ((8, 64), 40.0)))
    rows = torch.full((4, 8), 1.0, dtype=torch.float16, requires_grad=True)
    half(torch.zeros(4, 8, dtype=torch.float16), rows, rows, None, down, up, 1 / 64, None, True).backward(
        torch.full((4, 8), 256.0, dtype=torch.float16)
    )
    assert all(bool(each.grad.isfinite().all()) for each in (down, up, rows))
