"""From configuration keys to transformers' settings."""

import pytest
from hypothesis import given, strategies as st
from transformers import GenerationConfig as TheirConfig

from brim.config.schema import GenerationConfig
from brim.infer.engines import generation_settings


def settings(**keys):
    return generation_settings(GenerationConfig(**keys), pad_id=1, end_ids=[0, 9])


def test_the_defaults_sample_as_ludwig_does():
    assert (
        settings(max_new_tokens=5).items()
        >= {
            "max_new_tokens": 5,
            "do_sample": True,
            "temperature": 0.1,
            "top_k": 50,
            "top_p": 1.0,
            "num_beams": 1,
            "use_cache": True,
            "pad_token_id": 1,
            "eos_token_id": [0, 9],
        }.items()
    )


@pytest.mark.parametrize("keys", [{"do_sample": False}, {"temperature": 0.0}, {"temperature": 0.0, "do_sample": True}])
def test_greedy_decoding_drops_what_shapes_sampling(keys):
    given = settings(**keys)
    assert given["do_sample"] is False
    assert not {"temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"} & given.keys()


def test_beam_keys_stay_for_beams_alone():
    assert not {"length_penalty", "early_stopping"} & settings(length_penalty=2.0, early_stopping=True).keys()
    beams = settings(num_beams=3, length_penalty=2.0, early_stopping=True)
    assert (beams["length_penalty"], beams["early_stopping"]) == (2.0, True)


def test_no_top_k_means_all_tokens():
    assert settings(top_k=None)["top_k"] == 0  # transformers' own default would be 50


def test_the_configurations_tokens_win():
    assert settings(pad_token_id=4)["pad_token_id"] == 4
    assert settings(eos_token_id=4)["eos_token_id"] == [4]
    assert settings(eos_token_id=(4, 5))["eos_token_id"] == [4, 5]
    assert settings(eos_token_id=0)["eos_token_id"] == [0]


def test_transformers_gets_lists_and_no_empty_ones():
    given = settings(bad_words_ids=((3, 4),), suppress_tokens=(), sequence_bias=(((1,), 2.0),))
    assert given["bad_words_ids"] == [[3, 4]]
    assert given["sequence_bias"] == [[[1], 2.0]]
    assert "suppress_tokens" not in given


@given(
    do_sample=st.booleans(),
    temperature=st.sampled_from([0.0, 0.1, 1.5]),
    top_k=st.sampled_from([None, 1, 50]),
    num_beams=st.integers(1, 3),
    early_stopping=st.sampled_from([True, False, "never"]),
    length_penalty=st.sampled_from([-1.0, 0.0, 2.0]),
    typical_p=st.sampled_from([0.5, 1.0]),
)
def test_transformers_accepts_whatever_the_configuration_does(**keys):
    TheirConfig(**settings(max_new_tokens=4, **keys)).validate(strict=True)
