"""LoRA: what is trained, in which dtype, from which draw; adapters that do not fit; and dropout that is drawn by row."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from brim.config.schema import LoraConfig
from brim.errors import ModelError
from brim.models import is_adapted
from brim.models.adapters import add_adapter
from brim.models.dropout import drop_by_row

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


def test_scale_dtype_and_draw(tiny_base):
    rooted = {"r": 16, "alpha": 32, "use_rslora": True}
    for settings, scaling in [({"r": 4}, 2.0), ({"r": 4, "alpha": 4}, 1.0), (rooted, 8.0)]:
        model = adapted(tiny_base, **settings)  # alpha over r, or its root
        (layer,) = [module for name, module in model.named_modules() if name.endswith("layers.0.self_attn.q_proj")]
        assert layer.scaling == {"default": scaling}
    model = adapted(tiny_base, dtype=torch.bfloat16)
    assert {weight.dtype for weight in trained(model).values()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters() if not weight.requires_grad} == {torch.bfloat16}
    models = [trained(adapted(tiny_base, seed=seed)) for seed in (1, 1, 2)]
    draws = [next(weight for name, weight in model.items() if "lora_A" in name) for model in models]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def tiny(kind, dtype=torch.float32):
    """Models of other kinds: GPT-2's layers are transposed, Qwen2's have biases, Mixtral has experts."""
    torch.manual_seed(0)
    tokens = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    more = {
        "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},
        "qwen2": {**sizes, "num_key_value_heads": 2},
        "mixtral": {**sizes, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1},
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **tokens, **more[kind])).to(dtype).eval()


def test_unknown_targets_are_answered_with_the_layers_that_there_are():
    assert trained(add_adapter(tiny("gpt2"), LoraConfig(type="lora"), seed=0, trainable=True))  # without a warning
    with pytest.raises(ModelError, match="of this model: c_attn, c_proj, c_fc, lm_head"):
        add_adapter(tiny("gpt2"), LoraConfig(type="lora", target_modules=["q_proj"]), seed=0, trainable=True)


def test_a_saved_adapter_comes_back_where_its_layers_are_meant(tiny_base, saved, tmp_path):
    folder, logits = saved
    own = {"pretrained_adapter_weights": str(folder)}
    for trainable in (True, False):
        model = adapted(tiny_base, **own, trainable=trainable)
        assert torch.equal(model.eval()(IDS).logits, logits)
        assert bool(trained(model)) is trainable
    for targets in (["q_proj", "v_proj"], ["v_proj", "q_proj"], r".*\.(q|v)_proj", None):
        assert torch.equal(adapted(tiny_base, **own, target_modules=targets).eval()(IDS).logits, logits)
    for targets in (["q_proj"], "all-linear", r".*\.q_proj"):
        with pytest.raises(ModelError, match=r"adapter\.target_modules is .*, and the adapter to go on from has \["):
            adapted(tiny_base, **own, target_modules=targets)
    with pytest.raises(ModelError, match=r"adapter\.r is 4, and the adapter to go on from has 8"):
        adapted(tiny_base, **own, r=4)
    adapted(tiny_base, target_modules="all-linear").save_pretrained(str(tmp_path / "all"))
    assert adapted(tiny_base, pretrained_adapter_weights=str(tmp_path / "all"), target_modules="all-linear")


def drop_weights(folder):
    file = folder / "adapter_model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if "layers.1" not in name}, file)


def edit_config(**changes):
    def edit(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_weights, "cannot be loaded: Found missing adapter keys .*layers.1"),
        (edit_config(target_modules=["query"]), "cannot be loaded: .*query"),
        (edit_config(target_modules=["v_proj"]), "cannot be loaded: no layer takes .*q_proj"),
    ],
    ids=["a layer is missing", "other layers", "fewer layers"],
)
def test_an_adapter_that_does_not_fit_is_refused(tiny_base, saved, spoil, message):
    folder, _ = saved
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        adapted(tiny_base, pretrained_adapter_weights=str(folder))
    assert len(caught.value.problems[0].what) < 400
    assert caught.value.problems[0].where == str(folder)


def test_an_adapter_on_experts_comes_back_as_it_was_and_takes_no_dropout(tmp_path):
    settings = {"type": "lora", "target_modules": "all-linear", "dropout": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = add_adapter(tiny("mixtral"), LoraConfig(**settings), seed=0, trainable=True).eval()
        assert any(".experts." in name for name in trained(model))
        for weight in trained(model).values():
            nn.init.normal_(weight, std=0.5)
        model.save_pretrained(tmp_path)
        again = LoraConfig(**settings, pretrained_adapter_weights=str(tmp_path))
        back = add_adapter(tiny("mixtral"), again, seed=1, trainable=False)
    ids = torch.arange(2, 12)[None]
    assert torch.equal(back(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not torch.allclose(back(input_ids=ids).logits, tiny("mixtral")(input_ids=ids).logits)
    with pytest.raises(ModelError, match=r"adapter.dropout is 0.05, and experts .*\n  fix: set adapter.dropout: 0"):
        add_adapter(tiny("mixtral"), LoraConfig(type="lora", target_modules="all-linear"), seed=0, trainable=True)


@pytest.mark.parametrize(
    ("kind", "bias_type", "dtype"),
    [("gpt2", "all", torch.bfloat16), ("qwen2", "all", torch.float16), ("qwen2", "lora_only", torch.bfloat16)],
)
def test_biases_train_in_fp32_and_come_back_as_they_were(tmp_path, kind, bias_type, dtype):
    settings = LoraConfig(type="lora", bias_type=bias_type, dropout=0.0)
    model = add_adapter(tiny(kind, dtype), settings, seed=0, trainable=True)
    assert any(name.endswith("bias") for name in trained(model))
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
    loaded = dict(add_adapter(tiny(kind, dtype), again, seed=1, trainable=False).named_parameters())
    for name, weight in trained(model).items():
        assert torch.equal(loaded[name], weight)
    edit_config(bias="none")(tmp_path)
    with pytest.raises(ModelError, match=r"no layer takes .*\.bias"):
        add_adapter(tiny(kind, dtype), again.model_copy(update={"bias_type": "none"}), seed=0, trainable=True)


LENGTHS = [5, 9, 3, 7, 9, 1]
KEYS = [40, 7, 8, 2**40, 0, 3]


def dropping(tiny_base, *, dropout=0.3, seed=7, **settings):
    """A model whose adapter drops by row."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "down_proj"], **settings)
    model = peft.get_peft_model(base(tiny_base), lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)  # else what is dropped would not be seen
    return model.train(), drop_by_row(model, seed=seed)


def gradient(model, dropout, cuts, *, step=0):
    """Losses of the rows and the gradient of their sum, with rows cut so."""
    tokens = torch.randint(2, 290, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    losses = {}
    for rows in cuts:
        lengths = [LENGTHS[row] for row in rows]
        with dropout.of_rows([KEYS[row] for row in rows], lengths, step=step):
            logits = model(input_ids=tokens[rows, : max(lengths)]).logits
            each = [line[:length].logsumexp(-1).sum() for line, length in zip(logits, lengths, strict=True)]
            torch.stack(each).sum().backward()
        losses.update({row: loss.item() for row, loss in zip(rows, each, strict=True)})
    return [losses[row] for row in range(len(LENGTHS))], torch.cat(
        [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    )


ALL = [[0, 1, 2, 3, 4, 5]]
CUTS = [[[row] for row in range(6)], [[5, 1], [0, 2, 3, 4]], [[4, 3, 2, 1, 0, 5]]]


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_the_cut_does_not_matter_and_checkpointed_activations_have_the_same_masks(tiny_base, settings):
    model, dropout = dropping(tiny_base, **settings)
    losses, grad = gradient(model, dropout, ALL)
    for cuts in CUTS:
        other_losses, other_grad = gradient(model, dropout, cuts)
        assert other_losses == pytest.approx(losses, rel=1e-6)
        assert (other_grad - grad).norm() <= 1e-6 * grad.norm()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    again_losses, again_grad = gradient(model, dropout, ALL)
    assert again_losses == losses
    assert torch.equal(again_grad, grad)


def test_seed_step_row_and_layer_decide_and_pytorchs_random_states_are_left_alone(tiny_base):
    model, dropout = dropping(tiny_base)
    torch.manual_seed(5)
    losses, _ = gradient(model, dropout, ALL)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    assert gradient(model, dropout, ALL)[0] == losses
    assert gradient(model, dropout, ALL, step=1)[0] != pytest.approx(losses, rel=1e-5)
    assert gradient(*dropping(tiny_base), ALL)[0] == losses
    assert gradient(*dropping(tiny_base, seed=8), ALL)[0] != pytest.approx(losses, rel=1e-5)
    ids = torch.tensor([[5, 6, 7]])  # evaluation drops nothing and needs no rows
    plain, nothing = dropping(tiny_base, dropout=0.0)
    assert torch.equal(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    assert nothing is None  # there is nothing to draw
    assert drop_by_row(nn.Sequential(nn.Dropout(0.5)), seed=7) is None


def layers(model):
    return [each for name, each in model.named_modules() if name.endswith("lora_dropout.default")]


@pytest.mark.parametrize(("p", "features"), [(0.05, 64), (0.5, 33), (0.9, 6)])
def test_the_rate_and_the_scale(tiny_base, p, features):
    model, dropout = dropping(tiny_base, dropout=p, seed=3)
    x = torch.ones(3, 400, features)
    with dropout.of_rows([1, 2, 3], [400, 400, 200], step=5):
        masks = [layer(x) for layer in layers(model)]
    for mask in masks:
        real = torch.cat([mask[0], mask[1], mask[2, :200]])
        kept = real[real > 0]
        rate = 1 - len(kept) / real.numel()
        assert rate == pytest.approx(p, abs=5 * (p * (1 - p) / real.numel()) ** 0.5)
        assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)), rtol=1e-3)
        assert mask.shape == x.shape
    drawn = [mask[row, :200] > 0 for mask in masks for row in range(3)]
    assert not any(torch.equal(a, b) for number, a in enumerate(drawn) for b in drawn[:number])


def test_neighbouring_elements_and_rows_have_nothing_in_common(tiny_base):
    model, dropout = dropping(tiny_base, dropout=0.5, seed=3)
    with dropout.of_rows(range(64), [100] * 64, step=0):
        kept = (layers(model)[0](torch.ones(64, 100, 32)) > 0).float() - 0.5
    pairs = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), *[(kept[..., s:], kept[..., :-s]) for s in (1, 2, 4)]]
    for a, b in pairs:
        assert abs(4 * (a * b).mean().item()) < 5 / a.numel() ** 0.5
    model, dropout = dropping(tiny_base, dropout=0.9999999, seed=3)  # a rate just below one is finite
    with dropout.of_rows([1], [200], step=0):
        assert layers(model)[0](torch.ones(1, 200, 8)).isfinite().all()


def test_a_layer_that_does_not_see_rows_of_tokens_is_refused(tiny_base):
    model, dropout = dropping(tiny_base)
    words = r"layer .*q_proj\.default sees \[.*\], not rows of tokens\n  expected: 2 × 9 × features.*\n  fix: set trainer\.dropout_by_row: false or adapter\.dropout: 0"
    for shape in ((27, 8), (2, 8, 8), (2, 9, 4, 8)):
        with dropout.of_rows([1, 2], [9, 4], step=0), pytest.raises(ModelError, match=words):
            layers(model)[0](torch.ones(shape))
