"""Tiny models of transformers, forward and backward, as CUDA would run them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig

from brim.memory.cuda import CudaTarget, FlashAttnPackage, as_on_cuda

pytestmark = pytest.mark.usefixtures("fake")

TARGET = CudaTarget(compute_capability=(8, 0))
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "eos_token_id": 1, "bos_token_id": 1}
CONFIGS = {
    "llama": LlamaConfig(hidden_size=64, intermediate_size=96, num_key_value_heads=2, **SIZES),
    "gemma2": Gemma2Config(
        hidden_size=64, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=8, **SIZES
    ),
    "mixtral": MixtralConfig(hidden_size=64, intermediate_size=96, num_key_value_heads=2, num_local_experts=4, **SIZES),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, eos_token_id=1, bos_token_id=1),
}


def build(name, attention="eager", dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype, attn_implementation=attention)


def gradient_functions(tensor):
    names, nodes, seen = set(), [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            nodes.extend(following for following, _ in node.next_functions)
    return names


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.parametrize(
    ("name", "attention", "expected"),
    [
        ("llama", "eager", "SoftmaxBackward0"),
        ("llama", "sdpa", "FlashKernelBackward"),
        ("llama", "flash", "_FixedBackward"),
        ("gemma2", "eager", "SoftmaxBackward0"),
        ("gemma2", "flash", "_FixedBackward"),
        ("gpt2", "eager", "SoftmaxBackward0"),
        ("gpt2", "sdpa", "FlashKernelBackward"),
        ("gpt2", "flash", "_FixedBackward"),
    ],
)
def test_every_weight_gets_a_gradient(name, attention, expected, reentrant, rows):
    package = FlashAttnPackage(target=TARGET) if attention == "flash" else None
    model = build(name, "sdpa" if attention == "sdpa" else "eager").train()
    if reentrant is not None:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
            {"use_reentrant": reentrant}
        )
        if reentrant:
            model.enable_input_require_grads()
    tokens = torch.zeros(rows, 32, dtype=torch.long)
    with as_on_cuda(model, TARGET, flash_attention=package):
        logits = model(input_ids=tokens, use_cache=False).logits
        if reentrant is None:
            assert expected in gradient_functions(logits)
        logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), "_GroupedBackward"), ((7, 5), "grouped_mm_fallback")], ids=str
)
def test_experts_are_one_grouped_product(capability, expected, dtype):
    model = build("mixtral", "sdpa", dtype).train()
    with as_on_cuda(model, CudaTarget(compute_capability=capability)):
        logits = model(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False).logits
        assert any(expected in name for name in gradient_functions(logits)), gradient_functions(logits)
        logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash"])
def test_a_padded_prompt_and_the_next_token(attention):
    package = FlashAttnPackage(target=TARGET) if attention == "flash" else None
    model = build("llama", "sdpa" if attention == "sdpa" else "eager").eval()
    with as_on_cuda(model, TARGET, flash_attention=package), torch.no_grad():
        tokens = torch.zeros(2, 32, dtype=torch.long)
        first = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True)
        second = model(
            input_ids=tokens[:, :1],
            attention_mask=torch.ones(2, 33, dtype=torch.long),
            past_key_values=first.past_key_values,
            use_cache=True,
        )
    assert second.logits.shape == (2, 1, 96)
    assert second.past_key_values.get_seq_length() == 33


def test_transformers_is_left_as_it_was():
    from transformers import masking_utils, modeling_flash_attention_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = (masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._upad_input)
    names = set(ALL_ATTENTION_FUNCTIONS.keys())
    model = build("llama")
    with as_on_cuda(model, TARGET, flash_attention=FlashAttnPackage(target=TARGET)):
        assert model.config._attn_implementation != "eager"
    assert model.config._attn_implementation == "eager"
    assert set(ALL_ATTENTION_FUNCTIONS.keys()) == names
    assert before == (masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._upad_input)
    assert torch.nn.functional.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
