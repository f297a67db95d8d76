"""Base weights: as stored, in another dtype, drawn or whole; what each precision means; and libraries that stay quiet."""

import importlib.util
import json
import shutil
import warnings
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import make_llama, make_tokenizer
from tests.messages import refused
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from brim.config import DeviceFacts, load_config, resolve
from brim.errors import BrimError, ModelError
from brim.models import load_base, load_llm, no_library_warnings
from brim.models.folders import locate
from brim.models.loss import LogitHead, logit_head

CPU = torch.device("cpu")


def load(folder, *, initialize="pretrained", attn_implementation="sdpa", dtype=None, seed=0):
    how = {"dtype": dtype, "attn_implementation": attn_implementation, "seed": seed, "device": CPU}
    return load_base(locate(str(folder), initialize=initialize), initialize=initialize, trust_remote_code=False, **how)


@pytest.fixture
def folder(tiny_base, tmp_path):
    return shutil.copytree(tiny_base, tmp_path / "base")


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_weights_are_those_of_the_file_in_the_asked_for_dtype_and_the_model_is_ready_to_run(tiny_base, folder):
    model = load(tiny_base)
    assert not model.training
    stored = load_file(tiny_base / "model.safetensors")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert model.config._attn_implementation == "sdpa"
    assert {weight.dtype for weight in load(tiny_base, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    halves = {name: weight.bfloat16() for name, weight in stored.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, dtype="bfloat16")
    assert {weight.dtype for weight in load(folder).parameters()} == {torch.bfloat16}  # as they are stored


def test_layers_that_are_recomputed_give_the_same_gradients_and_there_are_not_more_of_them_than_layers(tmp_path):
    make_llama(tmp_path, num_hidden_layers=4)
    make_tokenizer(tmp_path)

    def loaded(layers):
        trainer = {"type": "finetune", "enable_gradient_checkpointing": layers}
        config = load_config({"base_model": str(tmp_path), "trainer": trainer}).config
        model = load_llm(config, locate(str(tmp_path)), CPU, trainable=True).model.train()
        ids = torch.arange(12).view(2, 6)
        model(input_ids=ids, labels=ids).loss.backward()
        return [each.gradient_checkpointing for each in model.model.layers], [w.grad for w in model.parameters()]

    (_, plain), (some, of_some), (every, of_every) = map(loaded, (False, 3, True))
    assert (some, every) == ([True] * 3 + [False], [True] * 4)
    assert all(map(torch.equal, plain, of_some))
    assert all(map(torch.equal, plain, of_every))
    with refused("trainer.enable_gradient_checkpointing: LlamaForCausalLM has fewer … or to a smaller number"):
        loaded(5)


def test_random_weights_follow_the_seed_and_do_not_look_at_stored_ones(tiny_base, folder):
    def embedding(base=tiny_base, **settings):
        return load(base, **settings).get_input_embeddings().weight

    drawn = embedding(initialize="random", seed=1)
    (folder / "model.safetensors").unlink()
    assert torch.equal(drawn, embedding(folder, initialize="random", seed=1))
    assert not torch.equal(drawn, embedding(initialize="random", seed=2))
    assert not torch.equal(drawn, embedding())


def test_progress_bars_are_as_they_were_and_the_folders_generation_settings_are_not_taken_but_its_tokens_are(folder):
    from transformers.utils import logging

    own = {"temperature": 0.6, "do_sample": True, "suppress_tokens": [5], "eos_token_id": [0, 9], "max_length": 4096}
    (folder / "generation_config.json").write_text(json.dumps(own))
    for switch in (logging.disable_progress_bar, logging.enable_progress_bar):
        switch()
        before = logging.is_progress_bar_enabled()
        kept = loaded(folder, "fp32").model.generation_config
        assert logging.is_progress_bar_enabled() is before
    assert kept.eos_token_id == [0, 9]
    assert (kept.temperature, kept.do_sample, kept.suppress_tokens, kept.max_length) == (None, None, None, None)


def test_a_kernel_that_is_not_installed_is_named(tiny_base):
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(ModelError, match=r"attn_implementation: the attention kernel .*\n  fix: .*auto"):
        load(tiny_base, attn_implementation="flash_attention_2")


def test_all_misfits_are_told_at_once_and_truncated_weights_refused(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for num_bytes in (0, 4, 500, 5000, -1):
        (folder / "model.safetensors").write_bytes(whole[:num_bytes])
        with pytest.raises(ModelError, match=r"a safetensors file is damaged: .*\n.*\n  fix: copy the folder again"):
            load(folder)
    (folder / "model.safetensors").write_bytes(whole)
    change_config(folder, num_hidden_layers=3, vocab_size=400)
    with pytest.raises(ModelError) as caught:
        load(folder)
    missing, misshapen = (problem.what for problem in caught.value.problems)
    assert missing.endswith("mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight …")
    assert misshapen.startswith("1 weight of the base model is of another shape than config.json says: model.embed")


@pytest.mark.parametrize("initialize", ["pretrained", "random"])
def test_a_configuration_that_cannot_be_is_named(folder, initialize):
    whole = (folder / "config.json").read_text()
    for key, value, message in [
        ("model_type", "t5", "the architecture 't5' is not a causal language model"),
        ("hidden_act", "nonsense", "config.json is damaged or does not fit: 'nonsense'"),
    ]:
        (folder / "config.json").write_text(whole)
        change_config(folder, **{key: value})
        with pytest.raises(ModelError, match=message):
            load(folder, initialize=initialize)


def test_too_little_memory_is_no_damaged_folder(folder, monkeypatch):
    for error in (
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        OSError(12, "Cannot allocate memory"),
        OSError("Cannot allocate memory (os error 12)"),  # safetensors' own
        MemoryError(),
    ):
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", Mock(side_effect=error))
        with pytest.raises(BrimError) as caught:
            load(folder)
        assert caught.value.exit_code == 1
        words = f"{folder}: the memory of this machine is too small for the base model\n  fix: set quantization: {{bits: 4}}"
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "keys", "is_placed"),
    [
        ({}, {}, True),
        ({}, {"dtype": torch.bfloat16}, True),
        ({}, {"products_dtype": torch.float32}, True),
        ({}, {"products_dtype": torch.bfloat16}, False),  # weights would be on the device twice
        ({"model_type": "mixtral"}, {}, False),  # whose experts are joined
        ({}, {"initialize": "random"}, False),
    ],
)
def test_weights_that_stay_as_they_are_read_go_straight_to_a_gpu(folder, monkeypatch, changes, keys, is_placed):
    """The device's name is CUDA's, until transformers is asked."""
    change_config(folder, **changes)
    asked = []

    def loading(name, **settings):
        asked.append(settings.pop("device_map", None))
        return original(name, **settings, **({"device_map": {"": "cpu"}} if asked[-1] else {}))

    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model)
    how = {"initialize": "pretrained", "dtype": None, "attn_implementation": "sdpa", "seed": 0, **keys}
    with nullcontext() if changes == {} else pytest.raises(ModelError):  # the weights are not a Mixtral's
        found, expected = (
            load_base(locate(str(folder)), trust_remote_code=False, device=torch.device(kind), **how)
            for kind in ("cuda", "cpu")
        )
    assert [each for each in asked if each] == [{"": "cuda"}] * is_placed
    if changes == {}:
        for mine, theirs in ((found.parameters(), expected.parameters()), (found.buffers(), expected.buffers())):
            for one, other in zip(mine, theirs, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
        assert found.lm_head.weight is found.model.embed_tokens.weight
        assert not any(hasattr(module, "_hf_hook") for module in found.modules())
        assert isinstance(logit_head(found), LogitHead)


IDS = torch.arange(20).reshape(2, 10)


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
        (tmp_path / "config.json").write_text(json.dumps({**settings, "dtype": str(dtype).removeprefix("torch.")}))
        save_file(weights, file, metadata={"format": "pt"})
        return tmp_path

    return write


def loaded(folder, name="fp16-mixed", *, trainable=True, keeps_digits=False, **keys):
    given = {"base_model": str(folder), "precision": name, "trainer": {"type": "finetune"}, **keys}
    config = resolve(load_config(given).config, DeviceFacts(kind="cpu", bf16=False)).config
    return load_llm(config, locate(str(folder)), CPU, trainable=trainable, keeps_digits=keeps_digits)


ADAPTER = {"adapter": {"type": "lora", "dropout": 0.0, "target_modules": "all-linear"}}


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
    in_four_bits = loaded(folder, quantization={"bits": 4}, **ADAPTER).model
    assert in_four_bits.get_output_embeddings().weight.dtype == torch.float16
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
    words = "… weights are beyond what float16 holds: lm_head has 70,144\n … 65,504 … fix: … precision: fp32"
    with refused(words, by=ModelError):
        loaded(folder, **ADAPTER)
    loaded(folder, "bf16-mixed", **ADAPTER)  # which holds it


def test_what_a_library_will_change_is_not_told_and_what_others_say_is():
    def warn(module, category):
        warnings.warn_explicit("of it", category, f"{module}.py", 1, module=module)

    for module, category in [("transformers.modeling_utils", FutureWarning), ("brim.models.load", DeprecationWarning)]:
        with no_library_warnings():
            warn(module, category)
        with pytest.warns(category):  # afterwards all is as it was
            warn(module, category)
    for module, category in [("transformers_of_mine", FutureWarning), ("torch.optim", UserWarning)]:
        with pytest.warns(category), no_library_warnings():
            warn(module, category)
