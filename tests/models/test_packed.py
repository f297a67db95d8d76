"""Packed rows against padded ones: one loss and one gradient, in every family that passes the trial."""

import pytest
import torch
from tests.infer.families import FAMILIES, UNFIT, build, rows_of
from transformers import AutoConfig, LlamaConfig, masking_utils

from brim.config import load_config
from brim.data.tokens import collate, pack
from brim.models.loss import LogitHead, NextToken, logit_head
from brim.models.packing import PackedAttention, attention as packed, packing_choice, packing_fit, passing

TEXTS = {f"{way}_features": [{"name": way, "type": "text"}] for way in ("input", "output")}
LENGTHS = [9, 30, 1, 4, 17]  # the longest of them beyond every window


def gradient(model, batch, *, head=None, attention=None):
    """The loss and all its gradient, as one vector."""
    model.zero_grad()
    if attention is None:
        loss = NextToken(head=head).loss(model, batch)
        loss.backward()
    else:
        with attention.of(batch.packed):
            loss = NextToken(head=head).loss(model, batch)
            loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def apart(one, other):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_says_which_families_are_fit_and_those_have_one_loss_and_gradient(family):
    model = build(family)
    fit = packing_fit(model.config)
    assert fit.is_fit == (family not in UNFIT), fit.reason
    if not fit.is_fit:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5 if parameter.ndim > 1 else 1  # large weights blow up what rounding makes
    rows = list(rows_of(LENGTHS, num_prompt_tokens=2))
    padded, joined, attention = collate(rows, pad_id=1), pack(rows, pad_id=1), PackedAttention(model)
    assert apart(gradient(model, joined, attention=attention), gradient(model, padded)) < 1e-6
    with torch.no_grad(), attention.of(joined.packed):
        found = NextToken().scores(model, joined)
    expected = NextToken().scores(model, padded)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert found.num_correct.tolist() == expected.num_correct.tolist()
    assert found.num_supervised.tolist() == expected.num_supervised.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("chunked", [False, True])
def test_in_64_bits_they_are_equal_to_the_last_digits_with_checkpoints_and_chunks_in_any_bins(family, chunked):
    model = build(family).double()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    head = logit_head(model) if chunked else None
    assert not chunked or isinstance(head, LogitHead)
    rows, attention = list(rows_of(LENGTHS, num_prompt_tokens=2)), PackedAttention(model)
    # Whole logits are summed in 32 bits, and Gemma rotates and norms in them.
    limit = 1e-12 if chunked and family != "gemma3_text" else 1e-6
    whole = gradient(model, collate(rows, pad_id=1), head=head)
    for bins in ([rows], [rows[:2], rows[2:]], [rows[1:2], [rows[0], *rows[2:]]], [[row] for row in rows]):
        parts = [gradient(model, pack(some, pad_id=1), head=head, attention=attention) for some in bins]
        assert apart([sum(each) for each in zip(*parts, strict=True)], whole) < limit


def test_a_cpu_packs_where_asked_and_what_cannot_be_had_overrules():
    def choice(capability=None, *, attention="sdpa", **trainer):
        base = {"base_model": "x", "model_parameters": {"attn_implementation": attention}, "trainer": trainer}
        return packing_choice(load_config({**base, **TEXTS}).config, lambda: LlamaConfig(), capability=capability)

    assert choice(packing=False) is None
    assert choice(packing=True) is None
    found = choice()
    assert (found.value, found.overrules) == (False, False)
    assert "where a training's plan estimates" in found.reason
    for asked in (choice(packing=True, attention="eager"), choice((7, 5), packing=True)):
        assert (asked.value, asked.overrules, asked.as_note().kind) == (False, True, "note")
        assert "trainer.packing: False, not as configured (" in str(asked)
    assert choice((7, 5)).as_note().kind == "detail"


def test_a_packed_batch_says_where_each_row_lies_and_is_filled_up():
    batch = pack(list(rows_of([3, 5], num_prompt_tokens=2)), pad_id=1)
    assert batch.input_ids.shape == (1, 64)
    assert batch.packed.lengths == (3, 5, 56)
    assert (batch.num_rows, batch.packed.bounds.tolist()) == (2, [0, 3, 8, 64])
    assert batch.packed.position_ids[0, :10].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert batch.target_rows.tolist() == [0, 1, 1, 1]
    # Logits are needed from the position before the first target on.
    assert (batch.num_logits, batch.logit_positions.tolist()) == (63, [0, 3, 4, 5])
    assert batch.input_ids[0, -56:].tolist() == [1] * 56
    assert pack(list(rows_of([64])), pad_id=1).packed.lengths == (64,)


def test_a_trial_sees_a_window_that_is_forgotten_and_a_row_that_sees_another(monkeypatch):
    slides = AutoConfig.for_model("mistral", sliding_window=4096, num_key_value_heads=8)
    assert packing_fit(slides).is_fit
    monkeypatch.setattr(packed, "_window", lambda length, width, device: torch.ones(1, 1, length, length).bool().tril())
    assert "other scores" in packing_fit(slides).reason
    monkeypatch.undo()
    monkeypatch.setattr(packed, "_row_by_row", one_row)
    assert "other scores" in packing_fit(LlamaConfig()).reason


def one_row(module, query, key, value, rows, sliding_window, **options):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **options)[0]


def test_afterwards_the_model_has_its_own_attention_again():
    model = build("llama")
    attention, batch = PackedAttention(model), pack(list(rows_of([4])), pad_id=1)
    with pytest.raises(KeyError), attention.of(batch.packed):
        assert model.config._attn_implementation == "brim_packed"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "_brim_packed_rows")


def test_passes_of_padded_rows_may_end_in_any_order():
    """Those of two threads do; what transformers looks with, for others' models, is put back after the last."""
    looks = masking_utils.find_packed_sequence_indices
    passes = [passing(None, None) for _ in range(2)]
    for each in passes:
        each.__enter__()
    for each in passes:
        assert masking_utils.find_packed_sequence_indices is not looks
        each.__exit__(None, None, None)
    assert masking_utils.find_packed_sequence_indices is looks
