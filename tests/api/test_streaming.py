"""A response in pieces, against the whole of it."""

import pytest

import brim
from brim.errors import InputError

PROMPTS = ["add 3 and 4 =", "add 1 and 2 = 3; the sum of", "x"]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 200, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def model(tiny_base):
    config = {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 6, "do_sample": False},
        "trainer": {"type": "none"},
    }
    return brim.Model(config)


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
    from brim.api import streaming

    monkeypatch.setattr(streaming, "why_not_slots", lambda *_: "Mamba keeps a state that is not keys and values")
    assert list(model.generate(PROMPTS[0], stream=True)) == [model.generate(PROMPTS[0])]
