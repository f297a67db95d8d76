"""Divergence of two models: exact figures on logits written by hand, and where the tokens end."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brim.data.tokens import TokenRow, TokenRows
from brim.infer import Runner, divergence, evaluate as module, logits_of
from brim.models import precision

HALF = [0.0, 0.0]  # logits of the probabilities 1/2 and 1/2
QUARTER = [0.0, math.log(3)]  # of 1/4 and 3/4


def logits(*batches):
    return [torch.tensor(batch).reshape(-1, 2) for batch in batches]


def test_the_figures_are_means_over_the_tokens_of_all_batches():
    found = divergence(logits([HALF, HALF, HALF], [QUARTER]), iter(logits([HALF, HALF, QUARTER], [QUARTER])))
    assert found.num_tokens == 4
    assert found.mean_kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 4, rel=1e-6)
    assert found.same_top == 3 / 4
    assert found.max_logit_difference == pytest.approx(math.log(3))


def test_it_is_taken_from_the_first_models_side():
    found = divergence(logits([QUARTER]), iter(logits([HALF])))
    assert found.mean_kl == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2), rel=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_never_near(broken):
    for first, second in ([HALF], [[broken, 0.0]]), ([[broken, 0.0]], [HALF]):
        assert math.isnan(divergence(logits(first), iter(logits(second))).mean_kl)
    assert math.isnan(divergence(logits([HALF], [HALF]), iter(logits([[broken, 0.0]], [HALF]))).mean_kl)


def test_no_tokens_are_no_agreement():
    found = divergence([], iter([]))
    assert (found.num_tokens, math.isnan(found.mean_kl), math.isnan(found.same_top)) == (0, True, True)


def test_other_tokens_are_a_mistake():
    with pytest.raises(ValueError, match="shorter"):
        divergence(logits([HALF], [HALF]), iter(logits([HALF])))


class Echo(torch.nn.Module):
    """Logits that name the token that was read: one where the vocabulary has it."""

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 8).float())


def rows(*supervised):
    made = []
    for key, marks in enumerate(supervised):
        ids = np.arange(len(marks), dtype=np.int32)
        made.append(TokenRow(key=key, input_ids=ids, supervised=np.asarray(marks, dtype=np.bool_)))
    return TokenRows.from_rows(made)


HOW = Runner(pad_id=7, batch_rows=2, device=torch.device("cpu"))


def test_logits_are_those_before_each_supervised_token():
    given = rows([False, True, True], [False, False, False, True], [True, False, True])
    first, second = (part.argmax(-1).tolist() for part in logits_of(Echo(), given, HOW, precision("fp32")))
    assert (first, second) == ([0, 1, 2], [1])  # a first token has nothing before it


def test_there_are_no_more_than_the_most(monkeypatch):
    monkeypatch.setattr(module, "_MOST_TOKENS", 4)
    given = rows(*[[False, True, True]] * 6)
    assert [len(part) for part in logits_of(Echo(), given, HOW, precision("fp32"))] == [4]
    monkeypatch.setattr(module, "_MOST_TOKENS", 100)
    monkeypatch.setattr(module, "_MOST_BYTES", 5 * 4 * 8)
    assert [len(part) for part in logits_of(Echo(), given, HOW, precision("fp32"))] == [4, 1]


def test_a_batch_that_runs_out_of_memory_comes_out_whole_in_the_order_of_its_rows(monkeypatch):
    class Scarce(Echo):
        def forward(self, input_ids, use_cache):
            if len(input_ids) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(input_ids, use_cache)

    given = rows([False, True, True], [False, True], [False, False, False, True], [True, True])
    parts = [part.argmax(-1).tolist() for part in logits_of(Scarce(), given, HOW, precision("fp32"))]
    assert parts == [[0, 1, 0], [2, 0]]
    monkeypatch.setattr(module, "_MOST_TOKENS", 2)
    assert [len(part) for part in logits_of(Scarce(), given, HOW, precision("fp32"))] == [2]
