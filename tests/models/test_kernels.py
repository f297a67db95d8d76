"""Layers that compute by Liger's kernels: which, when they are taken, and what they and their stand-ins keep.

Liger's own run here where it is installed; their values with TRITON_INTERPRET=1 alone, in which Triton runs on a CPU.
"""

import copy
import os
import sys

import peft
import pytest
import torch
from tests.infer.families import build
from tests.memory.traced import Births, training
from torch.nn.functional import silu
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from brim.config import load_config
from brim.errors import ConfigError, InputError
from brim.memory.cuda import liger_stand_ins
from brim.models.adapter_function import use_adapter_function
from brim.models.kernels import Kernels, LayerKernels, choice, forms_of, kernels_choice
from brim.models.kernels.forms import PLAIN
from brim.models.packing import small_model

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 99}
ARCHITECTURE = LlamaConfig(**SIZES)


# Which layers

ALL = ["RMSNorm", "SwiGLU", "RoPE"]
FORMS = {
    "llama": ((0.0, "llama"), ALL),
    "qwen3": ((0.0, "llama"), ALL),
    "olmo2": ((0.0, "gemma"), ALL),  # the weight comes in before the rounding
    "gemma3_text": ((1.0, "gemma"), ["RMSNorm", "RoPE"]),  # a GELU's gate
    "glm": ((0.0, "llama"), ["RMSNorm"]),  # neighbours are rotated, not halves
    "stablelm": (None, ["SwiGLU", "RoPE"]),  # other norms
    "codegen": (None, []),  # its attention's `apply_rotary_pos_emb` takes other tensors
    "gpt2": (None, []),
}


@pytest.mark.parametrize(("family", "norm", "names"), [(name, *found) for name, found in FORMS.items()], ids=FORMS)
def test_a_trial_says_which_layers_there_are_and_other_functions_for_them_give_the_same(family, norm, names):
    model = build(family)
    forms = forms_of(model)
    assert (forms.names, set(forms.norms.values())) == (names, {norm} - {None})
    used, called = counting(PLAIN)
    agrees, reason = choice.compared(model, LayerKernels(forms=forms, kernels=used), "bf16-true")
    assert agrees, reason
    assert set(called) == {{"RMSNorm": "norm", "SwiGLU": "gate", "RoPE": "rotate"}[name] for name in names}


def counting(kernels):
    called = []

    def noted(name):
        def function(*given):
            called.append(name)
            return getattr(kernels, name)(*given)

        return function

    return Kernels(norm=noted("norm"), gate=noted("gate"), rotate=noted("rotate")), called


# When they are taken

H100, HERE = (9, 0), torch.device("cpu")  # a CPU stands for the GPU at hand


def chosen(asked="auto", architecture=ARCHITECTURE, *, capability=H100, at_hand=None):
    config = load_config({**training("base"), "model_parameters": {"kernels": asked}, "precision": "bf16-true"}).config
    found = kernels_choice(config, lambda: architecture, capability=capability, at_hand=at_hand)
    return None if found is None else (found.value, found.reason)


@pytest.fixture
def installed(monkeypatch):
    """Set what stands for Liger's kernels, on what stands for a GPU."""
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    monkeypatch.setattr(choice, "require_extra", lambda *names, **words: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def install(**kernels):
        made = Kernels(**{"norm": PLAIN.norm, "gate": PLAIN.gate, "rotate": PLAIN.rotate, **kernels})
        monkeypatch.setattr(choice, "liger_kernels", lambda: made)
        monkeypatch.setattr(choice.importlib.metadata, "version", lambda name: "1")

    return install


def test_without_a_gpu_or_training_nothing_is_chosen_and_what_is_asked_for_and_cannot_be_is_refused():
    assert chosen(capability=None) is None
    assert chosen("torch") is None
    untrained = load_config({"base_model": "base", "trainer": {"type": "none"}}).config
    assert kernels_choice(untrained, lambda: ARCHITECTURE, capability=H100) is None
    for capability in (None, (7, 5)):
        with pytest.raises(ConfigError, match=r"model_parameters.kernels is liger, and cannot be: .* 8\.0"):
            chosen("liger", capability=capability)


def test_without_the_package_they_are_pytorchs_or_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    value, reason = chosen()
    assert value == "torch"
    assert "pip install 'brim[liger]'" in reason
    with pytest.raises(
        InputError, match=r"model_parameters.kernels: liger needs (.*\n.*)pip install 'brim\[liger\]'"
    ) as raised:
        chosen("liger", at_hand=HERE)
    assert raised.value.exit_code == 2
    assert chosen("liger") is None  # of another machine


def test_at_hand_they_are_taken_where_a_random_model_has_the_same_gradient(installed):
    installed()
    assert chosen() == (
        "liger",
        "RMSNorm, SwiGLU and RoPE are Liger's, 3 of 3; not tried, since the device is not at hand",
    )
    assert chosen(architecture=GPT2Config(n_embd=8, n_head=2, n_layer=1))[0] == "torch"
    installed(norm=lambda x, weight, *others: x * weight)
    value, reason = chosen(at_hand=HERE)
    assert value == "torch"
    assert "Liger's kernels were tried: scores are" in reason
    with pytest.raises(ConfigError, match="were tried: scores are"):
        chosen("liger", at_hand=HERE)
    installed(gate=failing)
    assert chosen(at_hand=HERE) == ("torch", "Liger's kernels were tried: RuntimeError: no C compiler")
    installed()
    value, reason = chosen(at_hand=HERE)
    assert value == "liger"
    assert reason.startswith("RMSNorm, SwiGLU and RoPE are Liger's: a gradient ")
    installed(gate=failing)
    assert chosen(at_hand=HERE) == (value, reason)  # what agrees is kept, and not tried again


def test_a_class_that_fails_in_another_way_than_over_the_tensors_is_not_passed_over(installed, monkeypatch):
    installed()
    monkeypatch.setattr(LlamaMLP, "forward", broken)
    untried = LlamaConfig(**{**SIZES, "vocab_size": 98})
    assert chosen(architecture=untried) == ("torch", "no small model of it could be built, or tried: KeyError")


def broken(self, x):
    raise KeyError("scales")


def failing(gate, up):
    raise RuntimeError("no C compiler")


# With adapters


class LigerSiLUMulFunction(torch.autograd.Function):
    """Liger's way with memory: the factors' gradients are written over them, unseen by autograd."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1]))
        return silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        flat, share = grad.reshape(gate.shape), torch.sigmoid(gate)
        of_gate, of_up = flat * up * (share + gate * share * (1 - share)), flat * gate * share
        gate.data.copy_(of_gate)
        up.data.copy_(of_up)
        return gate.view(grad.shape), up.view(grad.shape)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
def test_a_product_whose_factors_are_overwritten_later_is_multiplied_again_before(checkpointing):
    def gradient(gate):
        torch.manual_seed(0)
        model = LlamaForCausalLM(ARCHITECTURE)
        forms = forms_of(model)
        LayerKernels(forms=forms, kernels=Kernels(norm=PLAIN.norm, gate=gate, rotate=PLAIN.rotate)).use(model)
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
                {"use_reentrant": False}
            )
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
        use_adapter_function(model)
        ids = torch.randint(99, (2, 9))
        model.double().train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    torch.testing.assert_close(gradient(LigerSiLUMulFunction.apply), gradient(PLAIN.gate), rtol=1e-9, atol=1e-12)


# Liger's own, where it is installed


@pytest.fixture
def liger(monkeypatch):
    """Return Liger's kernels, on a CPU; without their values unless Triton interprets them."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops import rms_norm, rope, swiglu

    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret(monkeypatch, rms_norm)
        return choice.liger_kernels()

    class Off:
        def __getitem__(self, grid):
            return lambda *given, **options: None

    for module, name in (
        (rms_norm, "_rms_norm_forward_kernel"), (rms_norm, "_rms_norm_backward_kernel"), (rope, "_triton_rope"),
        (swiglu, "_swiglu_forward_kernel"), (swiglu, "_swiglu_backward_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Off())
    return choice.liger_kernels()


def interpret(monkeypatch, rms_norm):
    """Mend what the interpreter of Triton 3.9 lacks: numbers of a kernel as tensors, and libdevice's rsqrt."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    own = interpreter._implicit_cvt

    def converted(given):
        if not isinstance(given, float):
            return own(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton runs on a CPU with TRITON_INTERPRET=1")
@pytest.mark.parametrize("family", [name for name, (_, names) in FORMS.items() if names])
@pytest.mark.parametrize("precision", ["fp32", "fp16-true"])  # the interpreter's bf16 is of integers
def test_ligers_scores_and_gradient_are_pytorchs(liger, family, precision):
    model = small_model(build(family).config, trust_remote_code=False, attention=None)
    agrees, reason = choice.compared(model, LayerKernels(forms=forms_of(model), kernels=liger), precision)
    assert agrees, reason


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has tensors of its own")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_stand_ins_allocate_and_keep_what_ligers_functions_do(liger, monkeypatch, kind, trains, dtype):
    monkeypatch.setattr("brim.memory.cuda.liger._MULTIPROCESSORS", 1)  # as Liger takes a CPU
    base = kind[0](kind[1](**SIZES)).requires_grad_(trains)
    forms = forms_of(base)

    def log(kernels):
        model = copy.deepcopy(base).to(dtype).train()
        LayerKernels(forms=forms, kernels=kernels).use(model)
        x = torch.randn(2, 24, 64, dtype=dtype, requires_grad=True)
        with Births() as births:
            births.know(x, *model.parameters(), *model.buffers())
            model(inputs_embeds=x, use_cache=False).logits.sum().backward()
            return list(births.log)

    assert log(liger) == log(liger_stand_ins(None))
