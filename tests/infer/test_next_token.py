"""Tokens are chosen by row: what is drawn does not depend on who else is in the batch."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from brim.errors import BrimError
from brim.infer.engines import NextToken, Writing
from brim.infer.engines.sampling import uniform_numbers

SETTINGS = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0]}
CPU = torch.device("cpu")


def chooser(**changes):
    constraint = changes.pop("constraint", None)
    return NextToken({**SETTINGS, **changes}, seed=changes.get("seed", 7), device=CPU, constraint=constraint)


def rows(count, *, prompt=(3, 4, 5)):
    return [Writing(position=number, key=number + 100, prompt=list(prompt)) for number in range(count)]


def scores_of(count, *, vocabulary=50, seed=0):
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_the_likeliest_token_is_taken():
    scores = scores_of(4)
    assert chooser().choose(scores, rows(4)) == scores.argmax(dim=-1).tolist()


def test_a_draw_depends_on_the_row_alone():
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    scores = scores_of(6)
    together = chooser(**sampling).choose(scores, rows(6))
    alone = [chooser(**sampling).choose(scores[i : i + 1], rows(6)[i : i + 1])[0] for i in range(6)]
    assert together == alone
    turned = chooser(**sampling).choose(scores.flip(0), rows(6)[::-1])
    assert turned == together[::-1]


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    many = [Writing(position=i, key=i, prompt=[1]) for i in range(20_000)]
    drawn = chooser(do_sample=True, top_k=0).choose(probabilities.log().expand(len(many), -1), many)
    shares = np.bincount(drawn, minlength=4) / len(many)
    assert np.abs(shares - probabilities.numpy()).max() < 4 * np.sqrt(0.25 / len(many))  # four standard errors


def test_a_token_without_probability_is_never_drawn():
    scores = torch.full((2000, 6), -torch.inf)
    scores[:, [1, 4]] = 0.0
    many = [Writing(position=i, key=i, prompt=[1]) for i in range(2000)]
    assert set(chooser(do_sample=True, top_k=0).choose(scores, many)) == {1, 4}


def test_numbers_differ_by_seed_key_and_token():
    assert uniform_numbers(1, 2, 3).tolist() == uniform_numbers(1, 2, 5)[:3].tolist()
    drawn = [
        *uniform_numbers(1, 2, 2),
        *uniform_numbers(1, 3, 2),
        *uniform_numbers(2, 2, 2),
        *uniform_numbers(-1, 2, 2),
    ]
    assert len(set(drawn)) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.7},
        {"encoder_repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[11], [4, 12]]},
        {"sequence_bias": [[[5, 9], 30.0]]},
        {"min_new_tokens": 3},
        {"suppress_tokens": [1, 2, 3]},
        {"begin_suppress_tokens": [2, 7]},
        {"forced_eos_token_id": [6]},
        {"exponential_decay_length_penalty": [1, 1.5]},
        {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9},
        {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_k": 0},
        {"repetition_penalty": 1.3, "do_sample": True, "temperature": 2.0, "min_p": 0.1, "renormalize_logits": True},
        {"remove_invalid_values": True, "suppress_tokens": [4], "no_repeat_ngram_size": 1},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_scores_are_changed_as_transformers_changes_them(changes, model):
    """The oracle is the list of processors that transformers' own `generate` builds for a row alone."""
    settings = {**SETTINGS, "top_k": 50, **changes}
    if not settings["do_sample"]:
        del settings["top_k"]
    row = Writing(
        position=0, key=0, prompt=[5, 9, 4, 5], generated=[12, 4, 4][: 7 if "forced_eos_token_id" in changes else 3]
    )
    if "forced_eos_token_id" in changes:
        row.generated = [12, 4, 4, 8, 8, 9, 9]
    scores = scores_of(1, vocabulary=model.config.vocab_size)
    config = GenerationConfig(**settings, max_length=len(row.prompt) + 8)
    config._eos_token_tensor = torch.tensor(settings["eos_token_id"])
    prompt = torch.tensor([row.prompt])
    processors = model._get_logits_processor(config, len(row.prompt), prompt, None, None, "cpu")
    expected = processors(torch.tensor([row.tokens]), scores.clone())
    seen = {}

    class Watched(NextToken):
        def _drawn(self, scores, rows):
            seen["scores"] = scores
            return super()._drawn(scores, rows)

    watched = Watched({**settings, "do_sample": True, **_neutral(settings)}, seed=0, device=CPU)
    watched.choose(scores.clone(), [row])
    assert torch.equal(seen["scores"], expected)


def _neutral(settings):
    """Sampling that changes nothing, for settings that do not sample."""
    return {} if settings["do_sample"] else {"temperature": 1.0, "top_k": 0}


def test_only_allowed_tokens_are_chosen():
    class Alternating:
        def allowed(self, generated):
            return [2, 3] if len(generated) % 2 else [4]

    writing = rows(3)
    writing[1].generated.append(4)
    chosen = chooser(constraint=Alternating()).choose(scores_of(3), writing)
    assert (chosen[0], chosen[2]) == (4, 4)
    assert chosen[1] == 2 + int(scores_of(3)[1, 3] > scores_of(3)[1, 2])


@pytest.mark.parametrize("sampling", [False, True])
def test_scores_that_are_not_finite_are_told(sampling):
    scores = scores_of(2)
    scores[1, 3] = torch.nan
    with pytest.raises(BrimError, match="the probabilities of the next token are not finite"):
        chooser(do_sample=sampling, top_k=0).choose(scores, rows(2))
