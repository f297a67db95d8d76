"""A response in pieces, against the whole of it."""

from dataclasses import replace

import pytest

import brim
from brim.config.schema import MemoryConfig
from brim.errors import InputError
from brim.memory import budget as at_hand
from brim.planning import generation as generation_planning, plan_of_one

PROMPTS = ["add 3 and 4 =", "add 1 and 2 = 3; the sum of", "x"]
CONFIG = {
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "generation": {"max_new_tokens": 6, "do_sample": False},
    "trainer": {"type": "none"},
}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 200, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def model(tiny_base):
    return brim.Model({**CONFIG, "base_model": str(tiny_base)})


@pytest.mark.parametrize("settings", [{}, SAMPLED, {**SAMPLED, "repetition_penalty": 1.2}], ids=str)
def test_pieces_join_up_to_the_whole_response(model, settings):
    for prompt in PROMPTS:
        pieces = list(model.generate(prompt, stream=True, **settings))
        assert all(pieces)
        assert "".join(pieces) == model.generate(prompt, **settings)


def test_a_response_that_is_ended_has_no_end_in_it(model):
    """Sampled until one of the base's 300 tokens ends it: what is tested is that it does."""
    settings = {**SAMPLED, "eos_token_id": list(range(150)), "max_new_tokens": 40}
    whole = [model.generate(f"{number} and", **settings) for number in range(5)]
    assert whole == ["".join(model.generate(f"{number} and", stream=True, **settings)) for number in range(5)]
    assert max(map(len, whole)) < 40


def test_a_list_of_one_prompt_is_one_prompt(model):
    assert "".join(model.generate(PROMPTS[:1], stream=True)) == model.generate(PROMPTS[0])


@pytest.mark.parametrize("prompts", [PROMPTS, []])
def test_other_numbers_of_prompts_are_refused(model, prompts):
    with pytest.raises(
        InputError, match=r"prompts cannot be answered piece by piece(.|\n)*one prompt with stream=True"
    ):
        model.generate(prompts, stream=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 2}, r"generation\.num_beams"),
        ({"prompt_lookup_num_tokens": 3}, r"generation\.prompt_lookup_num_tokens"),
        ({"guidance_scale": 1.5}, r"generation\.guidance_scale"),
    ],
)
def test_settings_that_need_the_whole_response_are_named_before_anything_is_made(model, settings, words):
    with pytest.raises(InputError, match=f"a response cannot be given while it is made: {words}"):
        model.generate(PROMPTS[0], stream=True, **settings)


def test_prompts_that_cannot_be_continued_are_told_at_once(model):
    with pytest.raises(brim.DataError, match="1 prompt is empty"):
        model.generate("", stream=True)
    with pytest.raises(brim.DataError, match="1 prompt is too long"):
        model.generate("x" * 200, stream=True)
    with pytest.raises(brim.ConfigError, match="max_tokens"):
        model.generate("x", stream=True, max_tokens=3)


def test_an_architecture_with_a_state_of_another_kind_says_all_at_the_end(model, monkeypatch):
    from brim.workflows.prediction import chat as streaming

    monkeypatch.setattr(streaming, "why_not_slots", lambda *_: "Mamba keeps a state that is not keys and values")
    assert list(model.generate(PROMPTS[0], stream=True)) == [model.generate(PROMPTS[0])]


def exact_bytes(model, prompt_tokens, monkeypatch):
    """What a budget has beside the weights and the pass of one such prompt, and what these take, traced themselves."""
    monkeypatch.setattr(generation_planning, "_WORTH_TRACING_S", 0.0)  # no bound, which a trace may be below
    monkeypatch.setattr(at_hand, "resident_bytes", lambda: 10**9)  # or it would change by a few MiB in a test

    def planned(budget):
        memory = MemoryConfig(budget=budget, margin="0B")
        session = replace(model._open(), config=model._open().config.model_copy(update={"memory": memory}))
        return plan_of_one(model._weights(), session, prompt_tokens=prompt_tokens)

    ample = planned("1500MiB")
    outside_bytes, peak_bytes = ample.budget.outside_bytes, ample.shapes[0].peak_bytes
    scarce = planned(f"{outside_bytes + peak_bytes}B")  # which has this very shape traced
    return outside_bytes + scarce.shapes[0].peak_bytes


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_that_the_budget_does_not_hold_is_refused_before_it_is_begun(model, monkeypatch, stream):
    enough_bytes = exact_bytes(model, 100, monkeypatch)

    def held(num_bytes):
        memory = {"budget": f"{num_bytes}B", "margin": "0B"}
        return brim.Model({**CONFIG, "base_model": model.config.base_model, "memory": memory})

    assert "".join(held(enough_bytes).generate("x" * 100, stream=stream)) == model.generate("x" * 100)
    less, read = held(enough_bytes - 1), []
    assert "".join(less.generate("x" * 60, stream=stream)) == model.generate("x" * 60)
    less._weights().model.register_forward_pre_hook(lambda *given: read.append(1))
    with pytest.raises(
        InputError,
        match=r"100 tokens, and a response of up to 6 take(.|\n)*\(memory.budget\)(.|\n)*raise memory.budget",
    ):
        less.generate("x" * 100, stream=stream)
    assert read == []
