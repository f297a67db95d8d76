"""Only labels are written, and among them the one that the model finds likeliest, token by token."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, strategies as st

from brim.infer.engines import FixedRoom, LabelConstraint, Response, SlotsEngine, StaticEngine, respond_to

END = 0
LABELS = {
    "in": ((7, 8), (9, 8)),
    "in two": ((7, 8, 20, 21), (9, 8, 20, 21)),  # begins with the first
    "other": ((7, 30), (33,)),
    "long": ((41, 42, 43, 44, 45), (46, 42, 43, 44, 45)),
}
MOST = 6  # tokens of the longest, and its end


def test_what_may_follow():
    constraint = LabelConstraint(LABELS, end_ids=(END, 5))
    assert constraint.allowed([]) == (7, 9, 33, 41, 46)
    assert constraint.allowed([7]) == (8, 30)
    assert constraint.allowed([7, 8]) == (END, 5, 20)  # the end, or on to the longer label
    assert constraint.allowed([33]) == (END,)  # nothing to decide
    assert constraint.allowed([8]) == (END,)


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
    tokens, generated = prompt.tolist(), []
    while len(generated) < MOST:
        with torch.no_grad():
            scores = model(torch.tensor([[*tokens, *generated]])).logits[0, -1]
        may_follow = {
            form[len(generated)] for form in _all_forms() if form[: len(generated)] == tuple(generated) != form
        }
        if tuple(generated) in _all_forms():
            may_follow.add(END)
        best = max(may_follow, key=lambda token: scores[token].item())
        if best == END:
            return Response(token_ids=generated, finish_reason="stop", end_id=END)
        generated.append(best)
    raise AssertionError("a label has ended by then")


def _all_forms():
    return [form for forms in LABELS.values() for form in forms]


def _engine(kind, model, on_cpu, **settings):
    return kind(
        model,
        settings={"max_new_tokens": MOST, "pad_token_id": 1, "eos_token_id": [END], **settings},
        room=FixedRoom(4, prefill_tokens=sys.maxsize),
        seed=0,
        constraint=LabelConstraint(LABELS, end_ids=(END,)),
        **on_cpu,
    )


@pytest.mark.parametrize("kind", [SlotsEngine, StaticEngine])
def test_in_batches_labels_are_those_of_one_by_one(kind, model, prompts, on_cpu):
    responses = respond_to(_engine(kind, model, on_cpu), prompts)
    assert responses == [_one_by_one(model, row.input_ids) for row in prompts]
    assert len({tuple(response.token_ids) for response in responses}) > 2  # or the test would show little


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True, "temperature": 5.0, "top_k": 0}])
def test_beams_and_samples_are_labels_too(model, prompts, on_cpu, settings):
    responses = respond_to(_engine(StaticEngine, model, on_cpu, **settings), prompts)
    assert {tuple(response.token_ids) for response in responses} <= set(_all_forms())
    assert {response.finish_reason for response in responses} == {"stop"}


def test_an_end_without_choice_takes_no_pass(model, prompts, on_cpu):
    one_token = {"yes": ((7,),), "no": ((9,),)}
    engine = SlotsEngine(
        model,
        settings={"max_new_tokens": 2, "pad_token_id": 1, "eos_token_id": [END]},
        room=FixedRoom(4, prefill_tokens=sys.maxsize),
        seed=0,
        constraint=LabelConstraint(one_token, end_ids=(END,)),
        **on_cpu,
    )
    responses = respond_to(engine, prompts)
    assert {response.end_id for response in responses} == {END}
    assert engine.statistics.num_steps == 0  # the prompts' passes are all
