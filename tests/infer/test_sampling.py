"""The next token: chosen by row, whoever else is in the batch; and, where labels are asked for, from them alone."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.infer.families import GREEDY as SETTINGS, ON_CPU
from transformers import GenerationConfig

from brim.errors import BrimError
from brim.infer.engines import (
    FixedRoom,
    LabelConstraint,
    NextToken,
    Response,
    SlotsEngine,
    StaticEngine,
    Writing,
    respond_to,
)
from brim.infer.engines.sampling import uniform_numbers

CPU = torch.device("cpu")


def chooser(**changes):
    constraint = changes.pop("constraint", None)
    return NextToken({**SETTINGS, **changes}, seed=changes.get("seed", 7), device=CPU, constraint=constraint)


def rows(count, *, prompt=(3, 4, 5)):
    return [Writing(position=number, key=number + 100, prompt=list(prompt)) for number in range(count)]


def scores_of(count, *, vocabulary=50, seed=0):
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_greedy_token_is_the_likeliest_and_a_draw_depends_on_the_row_alone():
    scores = scores_of(6)
    assert chooser().choose(scores, rows(6)) == scores.argmax(dim=-1).tolist()
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    together = chooser(**sampling).choose(scores, rows(6))
    assert together == [chooser(**sampling).choose(scores[i : i + 1], rows(6)[i : i + 1])[0] for i in range(6)]
    assert chooser(**sampling).choose(scores.flip(0), rows(6)[::-1]) == together[::-1]
    assert uniform_numbers(1, 2, 3).tolist() == uniform_numbers(1, 2, 5)[:3].tolist()
    numbers = [uniform_numbers(seed, key, 2) for seed, key in ((1, 2), (1, 3), (2, 2), (-1, 2))]
    assert len(set(np.concatenate(numbers))) == 8


def drawn_from(scores, number):
    many = [Writing(position=i, key=i, prompt=[1]) for i in range(number)]
    return chooser(do_sample=True, top_k=0).choose(scores.expand(number, -1), many)


def test_draws_follow_the_probabilities_and_a_token_without_any_is_never_drawn():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    shares = np.bincount(drawn_from(probabilities.log(), 20_000), minlength=4) / 20_000
    assert np.abs(shares - probabilities.numpy()).max() < 4 * np.sqrt(0.25 / 20_000)  # four standard errors
    scores = torch.full((6,), -torch.inf)
    scores[[1, 4]] = 0.0
    assert set(drawn_from(scores, 2000)) == {1, 4}


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
    more = [8, 8, 9, 9] if "forced_eos_token_id" in changes else []
    row = Writing(position=0, key=0, prompt=[5, 9, 4, 5], generated=[12, 4, 4, *more])
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

    neutral = {} if settings["do_sample"] else {"temperature": 1.0, "top_k": 0}  # sampling that changes nothing
    watched = Watched({**settings, "do_sample": True, **neutral}, seed=0, device=CPU)
    watched.choose(scores.clone(), [row])
    assert torch.equal(seen["scores"], expected)


@pytest.mark.parametrize("sampling", [False, True])
def test_scores_that_are_not_finite_are_told(sampling):
    scores = scores_of(2)
    scores[1, 3] = torch.nan
    with pytest.raises(BrimError, match="the probabilities of the next token are not finite") as caught:
        chooser(do_sample=sampling, top_k=0).choose(scores, rows(2))
    assert type(caught.value) is BrimError  # and not the user's mistake


END = 0
LABELS = {
    "in": ((7, 8), (9, 8)),
    "in two": ((7, 8, 20, 21), (9, 8, 20, 21)),  # begins with the first
    "other": ((7, 30), (33,)),
    "long": ((41, 42, 43, 44, 45), (46, 42, 43, 44, 45)),
}
MOST = 6  # tokens of the longest, and its end
FORMS = [form for forms in LABELS.values() for form in forms]


def test_what_may_follow_a_label():
    constraint = LabelConstraint(LABELS, end_ids=(END, 5))
    assert constraint.allowed([7, 8]) == (END, 5, 20)  # the end, or on to the longer label
    assert constraint.allowed([33]) == constraint.allowed([8]) == (END,)  # nothing to decide


def _written(constraint, so_far=()):
    """Every response that a constraint lets through."""
    for token in constraint.allowed(so_far):
        if token == END:
            yield so_far
        else:
            yield from _written(constraint, (*so_far, token))


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8))
def test_labels_and_nothing_else_can_be_written(forms):
    constraint = LabelConstraint({str(number): (form,) for number, form in enumerate(forms)}, end_ids=(END,))
    written = list(_written(constraint))
    assert sorted(written) == sorted(set(forms))


def _one_by_one(model, prompt):
    """The likeliest of the allowed tokens, from a whole forward pass for each."""
    tokens, generated = prompt.tolist(), ()
    while len(generated) < MOST:
        with torch.no_grad():
            scores = model(torch.tensor([[*tokens, *generated]])).logits[0, -1]
        may_follow = {form[len(generated)] for form in FORMS if form[: len(generated)] == generated != form}
        if generated in FORMS:
            may_follow.add(END)
        best = max(may_follow, key=lambda token: scores[token].item())
        if best == END:
            return Response(token_ids=list(generated), finish_reason="stop", end_id=END)
        generated += (best,)
    raise AssertionError("a label has ended by then")


def _engine(kind, model, labels=LABELS, **settings):
    return kind(
        model,
        settings={"max_new_tokens": MOST, "pad_token_id": 1, "eos_token_id": [END], **settings},
        room=FixedRoom(4, prefill_tokens=sys.maxsize),
        seed=0,
        constraint=LabelConstraint(labels, end_ids=(END,)),
        **ON_CPU,
    )


def test_in_batches_labels_are_those_of_one_by_one_and_beams_and_samples_are_labels_too(model, prompts):
    expected = [_one_by_one(model, row.input_ids) for row in prompts]
    assert len({tuple(response.token_ids) for response in expected}) > 2  # or the test would show little
    for kind in (SlotsEngine, StaticEngine):
        assert respond_to(_engine(kind, model), prompts) == expected
    for settings in ({"num_beams": 3}, {"do_sample": True, "temperature": 5.0, "top_k": 0}):
        responses = respond_to(_engine(StaticEngine, model, **settings), prompts)
        assert {tuple(response.token_ids) for response in responses} <= set(FORMS)
        assert {response.finish_reason for response in responses} == {"stop"}
    engine = _engine(SlotsEngine, model, {"yes": ((7,),), "no": ((9,),)}, max_new_tokens=2)
    assert {response.end_id for response in respond_to(engine, prompts)} == {END}
    assert engine.statistics.num_steps == 0  # an end without choice takes no pass
