"""What each precision means for weights, arithmetic and the loss scale."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import make_llama, make_tokenizer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from brim.config import DeviceFacts, load_config, resolve
from brim.errors import ModelError
from brim.models import load_llm, locate, precision

CPU = torch.device("cpu")
IDS = torch.arange(20).reshape(2, 10)


@pytest.mark.parametrize(
    ("name", "trained", "frozen", "arithmetic", "scales_loss"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32, False),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
        ("bf16-mixed", torch.float32, None, torch.bfloat16, False),
        ("fp16-mixed", torch.float32, None, torch.float16, True),
    ],
)
def test_a_precision_is_these_three_things(name, trained, frozen, arithmetic, scales_loss):
    kind = precision(name)
    assert kind.weights_dtype(frozen=False) == trained
    assert kind.weights_dtype(frozen=True) == frozen  # None: as stored
    assert kind.scales_loss is scales_loss
    layer = torch.nn.Linear(4, 4, dtype=trained)
    with kind.autocast(torch.device("cpu")):
        assert layer(torch.ones(1, 4, dtype=trained)).dtype == arithmetic


@pytest.fixture
def base(tmp_path):
    """A function that writes a tiny Llama with a head of its own, in a dtype and with a few values changed."""

    def write(dtype, **values):
        make_tokenizer(tmp_path)
        make_llama(tmp_path, tie_word_embeddings=False)
        file = tmp_path / "model.safetensors"
        weights = {name: weight.to(dtype) for name, weight in load_file(file).items()}
        for name, value in values.items():
            weights[f"{name}.weight"].view(-1)[0] = value
        settings = json.loads((tmp_path / "config.json").read_text())
        dtype_name = str(dtype).removeprefix("torch.")
        (tmp_path / "config.json").write_text(json.dumps({**settings, "dtype": dtype_name}))
        save_file(weights, file, metadata={"format": "pt"})
        return tmp_path

    return write


def loaded(folder, name="fp16-mixed", *, trainable=True, keeps_digits=False, **keys):
    given = {"base_model": str(folder), "precision": name, "trainer": {"type": "finetune"}, **keys}
    config = resolve(load_config(given).config, DeviceFacts(kind="cpu", bf16=False)).config
    return load_llm(config, locate(str(folder)), CPU, trainable=trainable, keeps_digits=keeps_digits)


ADAPTER = {"adapter": {"type": "lora", "dropout": 0.0, "target_modules": "all-linear"}}
FOUR_BITS = {**ADAPTER, "quantization": {"bits": 4}}


def copies_kept(llm):
    """Bytes of tensors that a forward pass keeps for the backward pass, of a frozen matrix's shape and not its own."""
    frozen = [weight for weight in llm.model.parameters() if weight.ndim == 2 and not weight.requires_grad]
    own = {weight.untyped_storage().data_ptr() for weight in llm.model.parameters()}
    shapes = {tuple(shape) for weight in frozen for shape in (weight.shape, weight.T.shape)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tuple(tensor.shape) in shapes and storage.data_ptr() not in own and not tensor.requires_grad:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), llm.precision.autocast(CPU):
        llm.model(input_ids=IDS, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("keys", "stored"),
    # A CPU's autocast cannot put 4-bit layers' bf16 results beside each other, as CUDA's can.
    [(ADAPTER, torch.bfloat16), (FOUR_BITS, torch.float32)],
    ids=["16-bit base", "4-bit base"],
)
def test_autograd_keeps_no_copies_of_frozen_weights(base, keys, stored):
    folder = base(stored)
    assert copies_kept(loaded(folder, keeps_digits=True, **keys)) > 0  # the output layer's at least
    assert copies_kept(loaded(folder, **keys)) == 0


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fp16-mixed", "bf16-mixed"])
def test_weights_that_are_cast_once_give_the_same_numbers(base, stored, name):
    found = []
    for keeps_digits in (True, False):
        llm = loaded(base(stored), name, keeps_digits=keeps_digits, **ADAPTER)
        generator = torch.Generator().manual_seed(0)
        learning = [(key, weight) for key, weight in llm.model.named_parameters() if weight.requires_grad]
        for _, weight in learning:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
        with llm.precision.autocast(CPU):
            logits = llm.model(input_ids=IDS, use_cache=False).logits
        (1024 * logits.float().logsumexp(-1).mean()).backward()
        found.append([logits.detach(), *(weight.grad for _, weight in learning)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_weights_that_train_and_what_autocast_leaves_alone_stay(base):
    folder = base(torch.bfloat16)
    assert {weight.dtype for weight in loaded(folder).model.parameters()} == {torch.float32}
    evaluated = loaded(folder, trainable=False).model
    dtypes = {name: weight.dtype for name, weight in evaluated.named_parameters()}
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == torch.bfloat16
    assert dtypes["lm_head.weight"] == dtypes["model.layers.0.mlp.up_proj.weight"] == torch.float16
    adapted = loaded(folder, **ADAPTER).model
    assert {weight.dtype for weight in adapted.parameters() if weight.requires_grad} == {torch.float32}
    assert {weight.dtype for weight in loaded(folder, "bf16-true", **ADAPTER).model.parameters()} == {
        torch.bfloat16,
        torch.float32,  # the adapter
    }


def test_a_head_that_is_the_embedding_stays_and_gpt2_s_turned_layers_do_not(tmp_path):
    torch.manual_seed(0)
    small = GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    make_tokenizer(tmp_path)
    GPT2LMHeadModel(small).save_pretrained(tmp_path)
    model = loaded(tmp_path, trainable=False).model
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.dtype == torch.float32
    assert model.transformer.h[0].mlp.c_fc.weight.dtype == torch.float16
    assert isinstance(model.transformer.h[0].mlp.c_fc.bias, nn.Parameter)


def test_a_weight_beyond_fp16_is_refused_by_name(base):
    folder = base(torch.bfloat16, lm_head=70_000)
    with pytest.raises(ModelError) as caught:
        loaded(folder, **ADAPTER)
    (problem,) = caught.value.problems
    assert problem.what == "weights are beyond what float16 holds: lm_head has 70,144"
    assert "65,504" in problem.expected
    assert "precision: fp32" in problem.fix
    loaded(folder, "bf16-mixed", **ADAPTER)  # which holds it
