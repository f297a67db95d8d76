"""The loss against transformers' own, and its independence from padding."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from brim.data.tokens import TokenRow, collate
from brim.models import next_token_loss, next_token_scores


def rows(lengths, num_prompt_tokens=2):
    import numpy as np

    generator = np.random.default_rng(0)
    return [
        TokenRow(
            key=key,
            input_ids=generator.integers(2, 300, length).astype(np.int32),
            supervised=np.arange(length) >= num_prompt_tokens,
        )
        for key, length in enumerate(lengths)
    ]


def labels(rows):
    """What transformers' own loss wants: the ids, -100 on the prompt and the padding."""
    from torch.nn.utils.rnn import pad_sequence

    marked = [
        torch.where(torch.from_numpy(row.supervised), torch.from_numpy(row.input_ids).long(), -100) for row in rows
    ]
    return pad_sequence(marked, batch_first=True, padding_value=-100)


@pytest.fixture
def model(tiny_base):
    return AutoModelForCausalLM.from_pretrained(tiny_base).eval()


def test_the_sum_is_transformers_mean_times_the_supervised_tokens(model):
    (row,) = rows([9])
    batch = collate([row], pad_id=1)
    expected = model(input_ids=batch.input_ids, labels=labels([row])).loss * 7
    torch.testing.assert_close(next_token_loss(model, batch), expected)


def test_padding_changes_nothing(model):
    some = rows([9, 30, 4, 17])
    together = next_token_loss(model, collate(some, pad_id=1))
    alone = sum(next_token_loss(model, collate([row], pad_id=1)) for row in some)
    torch.testing.assert_close(together, alone)


def test_the_first_token_is_no_target(model):
    (row,) = rows([6], num_prompt_tokens=0)
    batch = collate([row], pad_id=1)
    assert int(next_token_scores(model, batch).num_supervised) == 5 == row.num_supervised


def test_scores_by_row_sum_to_the_loss_and_count_hits(model):
    some = rows([9, 30, 4, 17])
    batch = collate(some, pad_id=1)
    scores = next_token_scores(model, batch)
    torch.testing.assert_close(scores.loss.sum().float(), next_token_loss(model, batch))
    assert scores.num_supervised.tolist() == [7, 28, 2, 15]
    predicted = model(input_ids=batch.input_ids).logits.argmax(-1)[:, :-1]
    targets = labels(some)[:, 1:]
    hits = ((predicted == targets) & (targets != -100)).sum(1)
    assert scores.num_correct.tolist() == hits.tolist()


def test_the_gradient_of_a_batch_is_the_sum_of_its_cuts(model):
    some = rows([9, 30, 4, 17])

    def gradient(cuts):
        model.zero_grad()
        for cut in cuts:
            next_token_loss(model, collate(cut, pad_id=1)).backward()
        return torch.cat([p.grad.flatten().clone() for p in model.parameters()])

    whole, cut = gradient([some]), gradient([some[:1], some[1:]])
    assert float((whole - cut).norm() / whole.norm()) < 1e-6
