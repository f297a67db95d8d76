"""Dropout that is drawn by row."""

import peft
import pytest
import torch
from tests.conftest import make_llama
from torch import nn
from transformers import AutoModelForCausalLM

from brim.errors import ModelError
from brim.models import RowDropout
from brim.models.adapters import drop_by_row

LENGTHS = [5, 9, 3, 7, 9, 1]
KEYS = [40, 7, 8, 2**40, 0, 3]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_llama(folder)
    return folder


def adapted(base, *, dropout=0.3, targets=("q_proj", "down_proj"), **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=list(targets), **settings)
    model = peft.get_peft_model(model, lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)  # else what is dropped would not be seen
    return model.train()


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


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_the_cut_does_not_matter(base, cuts, settings):
    model = adapted(base, **settings)
    dropout = drop_by_row(model, seed=7)
    losses, grad = gradient(model, dropout, ALL)
    other_losses, other_grad = gradient(model, dropout, cuts)
    assert other_losses == pytest.approx(losses, rel=1e-6)
    assert (other_grad - grad).norm() <= 1e-6 * grad.norm()


def test_as_pytorch_draws_it_the_cut_matters(base):
    model = adapted(base)
    untold = RowDropout(seed=7)
    torch.manual_seed(0)
    losses, _ = gradient(model, untold, ALL)
    torch.manual_seed(0)
    others, _ = gradient(model, untold, CUTS[0])
    assert others != pytest.approx(losses, rel=1e-5)


def test_seed_step_row_and_layer_decide(base):
    model = adapted(base)
    dropout = drop_by_row(model, seed=7)
    losses, _ = gradient(model, dropout, ALL)
    assert gradient(model, dropout, ALL)[0] == losses
    assert gradient(model, dropout, ALL, step=1)[0] != pytest.approx(losses, rel=1e-5)
    again = adapted(base)
    assert gradient(again, drop_by_row(again, seed=7), ALL)[0] == losses
    other = adapted(base)
    assert gradient(other, drop_by_row(other, seed=8), ALL)[0] != pytest.approx(losses, rel=1e-5)


def layers(model):
    return [each for name, each in model.named_modules() if name.endswith("lora_dropout.default")]


@pytest.mark.parametrize(("p", "features"), [(0.05, 64), (0.5, 33), (0.9, 6)])
def test_the_rate_and_the_scale(base, p, features):
    model = adapted(base, dropout=p)
    dropout = drop_by_row(model, seed=3)
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


def test_a_rate_just_below_one_is_finite(base):
    model = adapted(base, dropout=0.9999999)
    dropout = drop_by_row(model, seed=3)
    with dropout.of_rows([1], [200], step=0):
        assert layers(model)[0](torch.ones(1, 200, 8)).isfinite().all()


def test_neighbouring_elements_and_rows_have_nothing_in_common(base):
    model = adapted(base, dropout=0.5)
    dropout = drop_by_row(model, seed=3)
    with dropout.of_rows(range(64), [100] * 64, step=0):
        kept = (layers(model)[0](torch.ones(64, 100, 32)) > 0).float() - 0.5
    pairs = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), *[(kept[..., s:], kept[..., :-s]) for s in (1, 2, 4)]]
    for a, b in pairs:
        assert abs(4 * (a * b).mean().item()) < 5 / a.numel() ** 0.5


def test_checkpointed_activations_are_computed_again_with_the_same_masks(base):
    model = adapted(base)
    dropout = drop_by_row(model, seed=7)
    losses, grad = gradient(model, dropout, ALL)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    again_losses, again_grad = gradient(model, dropout, ALL)
    assert again_losses == losses
    assert torch.equal(again_grad, grad)


def test_evaluation_drops_nothing_and_needs_no_rows(base):
    model = adapted(base)
    plain = model.eval()(input_ids=torch.tensor([[5, 6, 7]])).logits
    drop_by_row(model, seed=7)
    assert torch.equal(model(input_ids=torch.tensor([[5, 6, 7]])).logits, plain)


def test_pytorchs_random_states_are_left_alone(base):
    model = adapted(base)
    dropout = drop_by_row(model, seed=7)
    torch.manual_seed(5)
    gradient(model, dropout, ALL)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)


def test_without_adapter_dropout_there_is_nothing_to_draw(base):
    assert drop_by_row(adapted(base, dropout=0.0), seed=7) is None
    assert drop_by_row(nn.Sequential(nn.Dropout(0.5)), seed=7) is None


@pytest.mark.parametrize("shape", [(27, 8), (2, 8, 8), (2, 9, 4, 8)])
def test_a_layer_that_does_not_see_rows_of_tokens_is_refused(base, shape):
    model = adapted(base)
    dropout = drop_by_row(model, seed=7)
    with (
        dropout.of_rows([1, 2], [9, 4], step=0),
        pytest.raises(ModelError, match=r"layer .*q_proj\.default sees \[.*\], not rows of tokens") as raised,
    ):
        layers(model)[0](torch.ones(shape))
    assert "expected: 2 × 9 × features" in str(raised.value)
    assert "fix: set trainer.dropout_by_row: false or adapter.dropout: 0" in str(raised.value)
