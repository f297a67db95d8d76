"""LoRA: what is trained, in which dtype, from which draw; and adapters that do not fit."""

import json
import shutil
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from brim.config.schema import LoraConfig
from brim.errors import ModelError
from brim.models import is_adapted
from brim.models.adapters import add_adapter

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def base(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def adapted(folder, *, seed=0, trainable=True, dtype=torch.float32, **settings):
    return add_adapter(base(folder, dtype), LoraConfig(type="lora", **settings), seed=seed, trainable=trainable)


def trained(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.fixture
def saved(tiny_base, tmp_path):
    """An adapter whose weights do something."""
    model = adapted(tiny_base, dropout=0.0)
    with torch.no_grad():
        for weight in trained(model).values():
            weight.normal_()
    model.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter", model.eval()(IDS).logits


def test_a_new_adapter_changes_nothing_and_trains_alone(tiny_base):
    model = adapted(tiny_base)
    assert is_adapted(model)
    assert not is_adapted(base(tiny_base))
    assert all("lora_" in name for name in trained(model))
    # 2 layers × (q: 32→8→32, v: 32→8→16)
    assert sum(weight.numel() for weight in trained(model).values()) == 2 * (2 * 32 * 8 + 32 * 8 + 8 * 16)
    assert torch.equal(model.eval()(IDS).logits, base(tiny_base)(IDS).logits)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [({"r": 4}, 2.0), ({"r": 4, "alpha": 4}, 1.0), ({"r": 16, "alpha": 32, "use_rslora": True}, 8.0)],
)
def test_the_scale_is_alpha_over_r_or_its_root(tiny_base, settings, scaling):
    model = adapted(tiny_base, **settings)
    (layer,) = [module for name, module in model.named_modules() if name.endswith("layers.0.self_attn.q_proj")]
    assert layer.scaling == {"default": scaling}


def test_adapters_are_fp32_on_a_bf16_base(tiny_base):
    model = adapted(tiny_base, dtype=torch.bfloat16)
    assert {weight.dtype for weight in trained(model).values()} == {torch.float32}
    frozen = {weight.dtype for weight in model.parameters() if not weight.requires_grad}
    assert frozen == {torch.bfloat16}


def test_the_draw_follows_the_seed_alone(tiny_base):
    def draw(seed):
        torch.manual_seed(torch.seed())
        return next(weight for name, weight in trained(adapted(tiny_base, seed=seed)).items() if "lora_A" in name)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_all_linear_layers_can_be_meant(tiny_base):
    names = {
        name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained(adapted(tiny_base, target_modules="all-linear"))
    }
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_unknown_targets_are_answered_with_the_layers_that_there_are(tiny_base):
    with pytest.raises(ModelError, match=r"q_prj.*\n  expected: .*: q_proj, k_proj, .*\n  fix: .*all-linear"):
        adapted(tiny_base, target_modules=["q_prj"])


def test_transposed_layers_as_in_gpt2_are_adapted_without_a_warning():
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2():
        return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=8, n_layer=1, n_head=2, n_positions=16))

    assert trained(add_adapter(gpt2(), LoraConfig(type="lora"), seed=0, trainable=True))
    with pytest.raises(ModelError, match="of this model: c_attn, c_proj, c_fc, lm_head"):
        add_adapter(gpt2(), LoraConfig(type="lora", target_modules=["q_proj"]), seed=0, trainable=True)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_saved_adapter_comes_back(tiny_base, saved, trainable):
    folder, logits = saved
    model = adapted(tiny_base, pretrained_adapter_weights=str(folder), trainable=trainable)
    assert torch.equal(model.eval()(IDS).logits, logits)
    assert bool(trained(model)) is trainable


def drop_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "layers.1" not in name},
        folder / "adapter_model.safetensors",
    )


def edit_config(**changes):
    def edit(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "the folder holds no adapter_config.json\n"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "holds no adapter_model.safetensors\n"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "cannot be loaded"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 9), "cannot be loaded"),
        (drop_weights, "cannot be loaded: Found missing adapter keys .*layers.1"),
        (edit_config(r=4), "has 8 rows, and r in adapter_config.json is 4"),
        (edit_config(target_modules=["query"]), "cannot be loaded: .*query"),
        (edit_config(target_modules=["v_proj"]), "cannot be loaded: no layer takes .*q_proj"),
        (edit_config(peft_type="NONSENSE"), "cannot be loaded"),
    ],
    ids=["no config", "no weights", "broken config", "empty config", "broken weights", "a layer is missing", "another rank",
         "other layers", "fewer layers", "unknown kind"],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(tiny_base, saved, spoil, message):
    folder, _ = saved
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        adapted(tiny_base, pretrained_adapter_weights=str(folder))
    assert len(caught.value.problems[0].what) < 400
    assert caught.value.problems[0].where == str(folder)


def test_pickled_adapters_are_not_opened(tiny_base, saved, tmp_path):
    folder, _ = saved
    shutil.move(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors"):
        adapted(tiny_base, pretrained_adapter_weights=str(folder))


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["v_proj", "q_proj"], r".*\.(q|v)_proj", None],
    ids=["same", "another order", "pattern", "null"],
)
def test_target_modules_that_mean_the_adapters_layers_are_fine(tiny_base, saved, targets):
    folder, logits = saved
    model = adapted(tiny_base, pretrained_adapter_weights=str(folder), target_modules=targets)
    assert torch.equal(model.eval()(IDS).logits, logits)


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear", r".*\.q_proj"])
def test_target_modules_that_mean_other_layers_are_refused(tiny_base, saved, targets):
    folder, _ = saved
    with pytest.raises(ModelError, match=r"adapter\.target_modules is .*, and the adapter to go on from has \["):
        adapted(tiny_base, pretrained_adapter_weights=str(folder), target_modules=targets)


def test_all_linear_is_what_it_was(tiny_base, tmp_path):
    adapted(tiny_base, target_modules="all-linear").save_pretrained(str(tmp_path))
    assert adapted(tiny_base, pretrained_adapter_weights=str(tmp_path), target_modules="all-linear")


def experts():
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return MixtralForCausalLM(config).eval()


def test_an_adapter_on_experts_comes_back_as_it_was(tmp_path):
    settings = {"type": "lora", "target_modules": "all-linear", "dropout": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = add_adapter(experts(), LoraConfig(**settings), seed=0, trainable=True).eval()
        assert any(".experts." in name for name in trained(model))
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(tmp_path)
        again = LoraConfig(**settings, pretrained_adapter_weights=str(tmp_path))
        back = add_adapter(experts(), again, seed=1, trainable=False)
    ids = torch.arange(2, 12)[None]
    assert torch.equal(back(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not torch.allclose(back(input_ids=ids).logits, experts()(input_ids=ids).logits)


def test_experts_are_adapted_without_dropout_only():
    with pytest.raises(ModelError, match=r"adapter.dropout is 0.05, and experts .*\n  fix: set adapter.dropout: 0"):
        add_adapter(experts(), LoraConfig(type="lora", target_modules="all-linear"), seed=0, trainable=True)


def test_settings_that_contradict_the_adapter_are_refused(tiny_base, saved):
    folder, _ = saved
    with pytest.raises(ModelError, match=r"adapter\.r is 4, and the adapter to go on from has 8"):
        adapted(tiny_base, pretrained_adapter_weights=str(folder), r=4)


def with_biases(kind, dtype):
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokens = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        settings = GPT2Config(**tokens, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        return GPT2LMHeadModel(settings).to(dtype).eval()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**tokens, **sizes, num_hidden_layers=1)).to(dtype).eval()


@pytest.mark.parametrize("bias_type", ["all", "lora_only"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_biases_train_in_fp32_and_come_back_as_they_were(tmp_path, kind, bias_type, dtype):
    settings = LoraConfig(type="lora", bias_type=bias_type, dropout=0.0)
    model = add_adapter(with_biases(kind, dtype), settings, seed=0, trainable=True)
    biases = {name for name in trained(model) if name.endswith("bias")}
    assert biases
    with torch.autocast("cpu", dtype=dtype):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert {weight.dtype for weight in trained(model).values()} == {torch.float32}
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in trained(model).values())
    with torch.no_grad():
        for weight in trained(model).values():
            weight.add_(torch.randn_like(weight) / 1000)  # what 16 bits would round
    model.save_pretrained(str(tmp_path))
    again = settings.model_copy(update={"pretrained_adapter_weights": str(tmp_path)})
    loaded = dict(add_adapter(with_biases(kind, dtype), again, seed=1, trainable=False).named_parameters())
    for name, weight in trained(model).items():
        assert torch.equal(loaded[name], weight)


def test_a_bias_that_no_layer_takes_is_refused(tmp_path):
    settings = LoraConfig(type="lora", bias_type="all")
    add_adapter(with_biases("qwen2", torch.float32), settings, seed=0, trainable=True).save_pretrained(str(tmp_path))
    edit_config(bias="none")(tmp_path)
    again = LoraConfig(type="lora", pretrained_adapter_weights=str(tmp_path))
    with pytest.raises(ModelError, match=r"no layer takes .*k_proj\.bias"):
        add_adapter(with_biases("qwen2", torch.float32), again, seed=0, trainable=True)
