"""Base weights: as stored, in another dtype, or drawn; and nothing but whole ones."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from brim.errors import BrimError, ModelError
from brim.models import load_base, locate

CPU = torch.device("cpu")


def load(folder, **changes):
    settings = {
        "initialize": "pretrained",
        "dtype": None,
        "attn_implementation": "sdpa",
        "trust_remote_code": False,
        "seed": 0,
        "device": CPU,
    }
    settings |= changes
    return load_base(locate(str(folder), initialize=settings["initialize"]), **settings)


@pytest.fixture
def folder(tiny_base, tmp_path):
    return shutil.copytree(tiny_base, tmp_path / "base")


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_weights_are_those_of_the_file_and_the_model_is_ready_to_run(tiny_base):
    model = load(tiny_base)
    assert not model.training
    stored = load_file(tiny_base / "model.safetensors")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_in_the_asked_for_dtype(tiny_base, dtype):
    assert {weight.dtype for weight in load(tiny_base, dtype=dtype).parameters()} == {dtype}


def test_without_a_dtype_weights_stay_as_they_are_stored(folder):
    halves = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, dtype="bfloat16")
    assert {weight.dtype for weight in load(folder).parameters()} == {torch.bfloat16}


def test_random_weights_follow_the_seed_and_need_no_file(folder):
    (folder / "model.safetensors").unlink()

    def embedding(seed):
        return load(folder, initialize="random", seed=seed).get_input_embeddings().weight

    assert torch.equal(embedding(1), embedding(1))
    assert not torch.equal(embedding(1), embedding(2))


def test_random_weights_do_not_look_at_stored_ones(tiny_base):
    drawn = load(tiny_base, initialize="random", seed=5).get_input_embeddings().weight
    assert not torch.equal(drawn, load(tiny_base).get_input_embeddings().weight)


def test_transformers_progress_bars_are_as_they_were(tiny_base):
    from transformers.utils import logging

    for switch in (logging.enable_progress_bar, logging.disable_progress_bar):
        switch()
        before = logging.is_progress_bar_enabled()
        load(tiny_base)
        assert logging.is_progress_bar_enabled() is before
    logging.enable_progress_bar()


def test_the_folders_generation_settings_are_not_taken_but_its_tokens_are(folder):
    own = {"temperature": 0.6, "do_sample": True, "suppress_tokens": [5], "eos_token_id": [0, 9], "max_length": 4096}
    (folder / "generation_config.json").write_text(json.dumps(own))
    kept = load(folder).generation_config
    assert kept.eos_token_id == [0, 9]
    assert (kept.temperature, kept.do_sample, kept.suppress_tokens, kept.max_length) == (None, None, None, None)


def test_a_kernel_that_is_not_installed_is_named(tiny_base):
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(ModelError, match=r"attn_implementation: the attention kernel .*\n  fix: .*auto"):
        load(tiny_base, attn_implementation="flash_attention_2")


def test_all_misfits_are_told_at_once(folder):
    change_config(folder, num_hidden_layers=3, vocab_size=400)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert [problem.what for problem in caught.value.problems] == [
        "9 weights of the base model are missing: model.layers.2.input_layernorm.weight, "
        "model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight …",
        "1 weight of the base model is of another shape than config.json says: "
        "model.embed_tokens.weight is 300×32, not 400×32",
    ]


@pytest.mark.parametrize("num_bytes", [0, 4, 500, 5000, -1])
def test_truncated_weights_are_refused(folder, num_bytes):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:num_bytes])
    with pytest.raises(ModelError, match=r"a safetensors file is damaged: .*\n.*\n  fix: copy the folder anew"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonsense"}, "the architecture 'nonsense' is not a causal language model"),
        ({"model_type": "t5"}, "the architecture 't5' is not a causal language model"),
        ({"hidden_size": "wide"}, "hidden_size in config.json is 'wide'"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json is 0"),
        ({"num_attention_heads": 3}, "config.json is damaged or does not fit: .*not a multiple"),
        ({"hidden_act": "nonsense"}, "config.json is damaged or does not fit: 'nonsense'"),
    ],
)
@pytest.mark.parametrize("initialize", ["pretrained", "random"])
def test_a_configuration_that_cannot_be_is_named(folder, changes, message, initialize):
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load(folder, initialize=initialize)


@pytest.mark.parametrize("initialize", ["pretrained", "random"])
def test_code_of_the_folder_runs_only_where_it_is_trusted(folder, tmp_path, initialize):
    ran = tmp_path / "ran"
    change_config(folder, model_type="theirs", auto_map={"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"})
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ModelError, match=r"asks for its own code to be run \(auto_map"):
        load(folder, initialize=initialize)
    assert not ran.exists()


def test_a_folder_cannot_switch_its_own_code_on(folder, tmp_path):
    ran = tmp_path / "ran"
    change_config(
        folder,
        model_type="theirs",
        trust_remote_code=True,
        auto_map={"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"},
    )
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="asks for its own code to be run"):
        load(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_no_damaged_folder(folder, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(BrimError) as caught:
        load(folder)
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"{folder}: the memory of this machine is too small for the base model\n"
        "  fix: set quantization: {bits: 4}, choose a smaller base model, or end what else takes memory there"
    )
