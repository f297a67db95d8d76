"""Texts of static batches do not depend on the batch, come back in order, and are those of a row alone in every family.

Also what both of brim's own engines do alike, and how configuration keys become transformers' settings.
"""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st
from tests.infer.families import (
    FAMILIES,
    GREEDY,
    MISLED,
    MOST_NEW,
    ON_CPU,
    RECURRENT,
    UNFIT,
    alone,
    build,
    ended,
    prompts as short_prompts,
    runs_out,
    texts,
)
from transformers import GenerationConfig as TheirConfig

from brim.config.schema import GenerationConfig
from brim.errors import InputError, OutOfMemoryError
from brim.infer.engines import FixedRoom, SlotsEngine, StaticEngine, generation_settings, respond_to
from brim.infer.engines.base import is_misled_by_its_batch
from brim.models.packing import PackedAttention

pytestmark = pytest.mark.run

SAMPLING = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 20}
OWN_ENGINES = pytest.mark.parametrize("kind", [StaticEngine, SlotsEngine])


def engine(model, *, kind=StaticEngine, rows=4, settings=GREEDY, **how):
    return kind(model, room=FixedRoom(rows, prefill_tokens=1), settings=settings, **{"seed": 0, **ON_CPU, **how})


def generate(model, prompts, *, on_batch=lambda rows: None, **how):
    return respond_to(engine(model, **how), prompts, on_batch=on_batch)


def one_by_one(model, prompts, *, end=(0,)):
    return [alone(model, row, most=GREEDY["max_new_tokens"], end=end) for row in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_do_not_depend_on_the_batch(family):
    model, rows = build(family), short_prompts()
    whole = [alone(model, row) for row in rows]
    assert len({token for text in whole for token in text}) > 12  # a model that repeats itself would prove nothing
    end, expected = ended(whole)
    assert 0 < sum(map(len, expected)) < MOST_NEW * len(whole)
    how = {"settings": {**GREEDY, "max_new_tokens": MOST_NEW, "eos_token_id": [end]}, "seed": 0, **ON_CPU}
    misled = is_misled_by_its_batch(model, [5, 17, 33, 8, 90], pad_id=1, **ON_CPU)
    assert misled == (family in MISLED)
    assert bool(SlotsEngine.why_not(model.config, how["settings"], type(model))) == (family in RECURRENT)
    assert texts(respond_to(StaticEngine(model, room=FixedRoom(4, prefill_tokens=1), **how), rows)) == expected
    for packed in [None, PackedAttention(model)][: 0 if family in RECURRENT else 1 if family in UNFIT else 2]:
        slots = SlotsEngine(model, room=FixedRoom(3, prefill_tokens=24), packed=packed, **how)
        assert texts(respond_to(slots, rows)) == expected
        assert slots.statistics.num_prefills > 4  # rows took the place of others
        assert slots.statistics.num_layouts > 1  # and the cache was laid out again


@pytest.mark.parametrize("pad", [1, 0], ids=["padding of its own", "padding that is an end"])
def test_the_end_is_cut_off_and_named(model, prompts, pad):
    free = one_by_one(model, prompts, end=())
    end = free[2][3]  # a token that the model is known to write
    responses = generate(model, prompts, settings={**GREEDY, "eos_token_id": [end, 0], "pad_token_id": pad})
    assert texts(responses) == one_by_one(model, prompts, end=(end, 0))
    reasons = ["stop" if {end, 0} & set(text) else "length" for text in free]
    assert [response.finish_reason for response in responses] == reasons
    assert set(reasons) == {"stop", "length"}


@OWN_ENGINES
def test_sampled_texts_depend_on_the_seed_but_not_on_the_batch_or_on_what_is_left_out_or_ran_out(model, prompts, kind):
    how = {"settings": SAMPLING, "seed": 3, "kind": kind}
    whole = generate(model, prompts, **how)
    for rows in (1, 11):
        assert whole == generate(model, prompts, rows=rows, **how)
    assert whole != generate(model, prompts, **{**how, "seed": 2})
    rest = [1, 4, 7]
    assert [whole[i] for i in rest] == generate(model, prompts.take(rest), rows=2, **how)
    with runs_out(model, lambda rows, tokens, number: rows > 4 and number > 5):
        assert whole == generate(model, prompts, rows=8, **how)


@pytest.mark.parametrize("after", [0, 3], ids=["prefill", "decode"])
def test_greedy_texts_are_the_same_where_memory_ran_out_on_the_way(model, prompts, freed, after):
    done, told = [], []
    freed.clear()
    with runs_out(model, lambda rows, tokens, number: rows > 3 and number > after):
        responses = generate(model, prompts, rows=8, on_batch=done.append, on_smaller=told.append)
    assert texts(responses) == one_by_one(model, prompts)
    assert [(smaller.before, smaller.after, smaller.longest) for smaller in told] == [(8, 4, 60), (4, 2, 60)]
    assert told[1].keys == (101, 107, 104, 110)
    assert done == [2, 2, 2, 2, 2, 1]
    assert len(freed) == 2


def test_a_lone_prompt_that_does_not_fit_is_named_after_all_before_it_is_told(model, prompts):
    finished = []
    with (
        runs_out(model, lambda rows, tokens, number: tokens == 9),
        pytest.raises(OutOfMemoryError, match=r"of a single row runs out of memory \(9 tokens\)") as caught,
    ):
        engine(model, rows=2).run(prompts, on_finished=finished.extend)
    assert caught.value.problems[0].where == "row 105 (numbered from 0)"
    assert sorted(prompts.lengths[[each.position for each in finished]].tolist()) == [9, 17, 28, 31, 44, 60]


@OWN_ENGINES
def test_what_the_listener_raises_ends_the_run_even_where_it_is_about_memory(model, prompts, kind):
    listener, told = Mock(side_effect=MemoryError("of the listener's own")), []
    with pytest.raises(MemoryError, match="of the listener's own"):
        engine(model, kind=kind, on_smaller=told.append).run(prompts, on_finished=listener)
    assert told == []


@OWN_ENGINES
def test_what_fewer_rows_never_cure_is_raised_as_it_is(model, prompts, monkeypatch, kind):
    monkeypatch.setattr("brim.batching.memory.oom._host_room_bytes", lambda: 80 << 30)
    broken, told = Mock(side_effect=RuntimeError("could not create a primitive")), []
    failed = pytest.raises(RuntimeError, match=r"^could not create a primitive$")
    with model.register_forward_pre_hook(broken, with_kwargs=True), failed:
        generate(model, prompts, kind=kind, is_misled=False, on_smaller=told.append)
    assert [smaller.after for smaller in told] == [2, 1]


@OWN_ENGINES
def test_no_prompts_give_no_responses_and_refused_settings_are_the_users_mistake(model, prompts, kind):
    assert generate(model, prompts.take([]), kind=kind) == []
    with pytest.raises(InputError, match=r"generation: transformers cannot generate with these settings: .*5000"):
        generate(model, prompts, kind=kind, settings={**GREEDY, "bad_words_ids": [[5000]]})


@pytest.mark.parametrize(
    "keys",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 5, "eos_token_id": [0, *range(2, 150)]},
        {"guidance_scale": 1.5},
        {"suppress_tokens": [239, 188], "bad_words_ids": [[58], [4, 5]]},
    ],
)
def test_tokens_are_chosen_as_transformers_would_choose_them(model, prompts, keys):
    """transformers, one row at a time: its processors see padding, brim's do not."""
    settings = {**GREEDY, **keys}
    for row, response in zip(prompts, generate(model, prompts, settings=settings), strict=True):
        ids = torch.tensor([row.input_ids.tolist()])
        given = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=TheirConfig(**settings))
        new = given[0, ids.shape[1] :].tolist()
        assert response.token_ids == new[: len(response.token_ids)]
        assert new[len(response.token_ids) :] == ([] if response.end_id is None else [response.end_id])


def test_beams_are_transformers_own(model, prompts):
    settings = {**GREEDY, "num_beams": 3, "length_penalty": 0.5}
    single = generate(model, prompts, settings=settings, rows=1)
    assert generate(model, prompts, settings=settings, rows=5) == single
    assert texts(single) != one_by_one(model, prompts)


def test_beams_that_sample_draw_from_a_seed_of_their_row_and_leave_the_programs_random_numbers(model, prompts):
    settings, some = {**SAMPLING, "num_beams": 2}, prompts.take([0, 2, 5, 8])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = generate(model, some, settings=settings, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert found[1:] == generate(model, some.take([1, 2, 3]), settings=settings, seed=1)
    assert found != generate(model, some, settings=settings, seed=2)


def settings_of(**keys):
    return generation_settings(GenerationConfig(**keys), pad_id=1, end_ids=[0, 9])


def test_what_transformers_is_given():
    assert settings_of(max_new_tokens=5).items() >= {
        "max_new_tokens": 5, "do_sample": True, "temperature": 0.1, "top_k": 50, "top_p": 1.0, "num_beams": 1,
        "use_cache": True, "pad_token_id": 1,
    }.items()  # fmt: skip
    assert settings_of()["eos_token_id"] == [0, 9]
    for keys in ({"do_sample": False}, {"temperature": 0.0}, {"temperature": 0.0, "do_sample": True}):
        found = settings_of(**keys)  # greedy decoding drops what shapes sampling
        assert found["do_sample"] is False
        assert not {"temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"} & found.keys()
    assert not {"length_penalty", "early_stopping"} & settings_of(length_penalty=2.0, early_stopping=True).keys()
    beams = settings_of(num_beams=3, length_penalty=2.0, early_stopping=True)
    assert (beams["length_penalty"], beams["early_stopping"]) == (2.0, True)
    assert settings_of(top_k=None)["top_k"] == 0  # transformers' own default would be 50
    assert settings_of(pad_token_id=4)["pad_token_id"] == 4
    assert [settings_of(eos_token_id=given)["eos_token_id"] for given in (4, (4, 5), 0)] == [[4], [4, 5], [0]]
    found = settings_of(bad_words_ids=((3, 4),), suppress_tokens=(), sequence_bias=(((1,), 2.0),))
    assert (found["bad_words_ids"], found["sequence_bias"]) == ([[3, 4]], [[[1], 2.0]])
    assert "suppress_tokens" not in found


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
    TheirConfig(**settings_of(max_new_tokens=4, **keys)).validate(strict=True)
