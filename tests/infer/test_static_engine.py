"""Texts do not depend on the batch that they were generated in, and come back in order."""

import numpy as np
import pytest
import torch

from brim.data.tokens import TokenRow, TokenRows
from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer.engines import FixedRoom, SlotsEngine, StaticEngine, end_ids, respond_to

GREEDY = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0]}


def generate(model, prompts, *, rows, on_batch=lambda rows: None, **how):
    room = FixedRoom(rows, prefill_tokens=1)
    return respond_to(StaticEngine(model, room=room, **how), prompts, on_batch=on_batch)


def one_by_one(model, prompts, *, end):
    """The oracle: argmax after argmax, without padding, cache or transformers' generate."""
    texts = []
    for row in prompts:
        ids, new = torch.tensor([row.input_ids.tolist()]), []
        while len(new) < GREEDY["max_new_tokens"]:
            with torch.no_grad():
                token = int(model(input_ids=ids).logits[0, -1].argmax())
            if token in end:
                break
            new.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        texts.append(new)
    return texts


@pytest.mark.parametrize("rows", [1, 3, 11, 64])
def test_greedy_batches_equal_one_by_one(model, prompts, on_cpu, rows):
    responses = generate(model, prompts, settings=GREEDY, rows=rows, seed=0, **on_cpu)
    expected = one_by_one(model, prompts, end=[0])
    assert len({token for text in expected for token in text}) > 20  # a model that repeats itself would prove nothing
    assert [response.token_ids for response in responses] == expected


def test_the_end_is_cut_off_and_named(model, prompts, on_cpu):
    free = one_by_one(model, prompts, end=[])
    end = free[2][3]  # a token that the model is known to write
    responses = generate(model, prompts, settings={**GREEDY, "eos_token_id": [end]}, rows=4, seed=0, **on_cpu)
    expected = [text[: text.index(end)] if end in text else text for text in free]
    assert [response.token_ids for response in responses] == expected
    assert [response.finish_reason for response in responses] == ["stop" if end in text else "length" for text in free]
    assert {response.finish_reason for response in responses} == {"stop", "length"}


def test_padding_that_is_also_the_end_does_not_end_texts(model, prompts, on_cpu):
    same = {**GREEDY, "pad_token_id": 0}
    responses = generate(model, prompts, settings=same, rows=4, seed=0, **on_cpu)
    assert [response.token_ids for response in responses] == one_by_one(model, prompts, end=[0])


def test_sampling_repeats_with_its_seed(model, prompts, on_cpu):
    sampling = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 0}

    def texts(seed):
        found = generate(model, prompts, settings=sampling, rows=4, seed=seed, **on_cpu)
        return [response.token_ids for response in found]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_every_row_is_reported_once(model, prompts, on_cpu):
    done = []
    generate(model, prompts, settings=GREEDY, rows=4, seed=0, on_batch=done.append, **on_cpu)
    assert done == [4, 4, 3]


def test_no_prompts_give_no_responses(model, prompts, on_cpu):
    assert generate(model, prompts.take([]), settings=GREEDY, rows=4, seed=0, **on_cpu) == []


def test_settings_that_transformers_refuses_are_the_users_mistake(model, prompts, on_cpu):
    settings = {**GREEDY, "bad_words_ids": [[5000]]}
    with pytest.raises(InputError, match=r"generation: transformers cannot generate with these settings: .*5000"):
        generate(model, prompts, settings=settings, rows=4, seed=0, **on_cpu)


def test_scores_that_are_not_finite_are_named(model, on_cpu):
    import copy

    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[:] = float("nan")
    row = TokenRow(key=0, input_ids=np.array([5, 6], dtype=np.int32), supervised=np.zeros(2, dtype=bool))
    sampling = {**GREEDY, "do_sample": True, "temperature": 1.0}
    with pytest.raises(BrimError, match="the probabilities of the next token are not finite") as caught:
        generate(broken, TokenRows.from_rows([row]), settings=sampling, rows=1, seed=0, **on_cpu)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("own", "expected"), [(None, [7]), (7, [7]), (9, [7, 9]), ([9, 7, 8], [7, 9, 8])])
def test_the_models_own_ends_count_too(model, own, expected):
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = own
    try:
        assert end_ids(model, 7) == expected
    finally:
        model.generation_config.eos_token_id = before


class Scarce:
    """Runs out of memory in a pass of more than so many rows, some tokens after the prompt."""

    def __init__(self, model, most_rows, after=0):
        self.most_rows, self.after, self.num_passes = most_rows, after, 0
        self.hook = model.register_forward_hook(self)

    def __call__(self, module, inputs, output):
        self.num_passes += 1
        if len(output.logits) > self.most_rows and self.num_passes > self.after:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("after", [0, 3], ids=["prefill", "decode"])
def test_greedy_texts_are_the_same_where_memory_ran_out_on_the_way(model, prompts, on_cpu, after):
    done, told = [], []
    scarce = Scarce(model, 3, after)
    try:
        responses = generate(
            model, prompts, settings=GREEDY, rows=8, seed=0, on_batch=done.append, on_smaller=told.append, **on_cpu
        )
    finally:
        scarce.hook.remove()
    assert [response.token_ids for response in responses] == one_by_one(model, prompts, end=[0])
    assert [(smaller.before, smaller.after, smaller.longest) for smaller in told] == [(8, 4, 60), (4, 2, 60)]
    assert told[1].keys == (101, 107, 104, 110)
    assert done == [2, 2, 2, 2, 2, 1]


def test_a_lone_prompt_that_does_not_fit_is_named_after_all_before_it_is_told(model, prompts, on_cpu):
    def scarce(module, args, kwargs):
        if kwargs["input_ids"].shape[1] == 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    finished = []
    hook = model.register_forward_pre_hook(scarce, with_kwargs=True)
    try:
        engine = StaticEngine(model, room=FixedRoom(2, prefill_tokens=1), settings=GREEDY, seed=0, **on_cpu)
        with pytest.raises(
            OutOfMemoryError, match=r"generation of a single row runs out of memory \(9 tokens\)"
        ) as caught:
            engine.run(prompts, on_finished=finished.extend)
    finally:
        hook.remove()
    assert caught.value.problems[0].where == "row 105 (numbered from 0)"
    assert sorted(prompts.lengths[[each.position for each in finished]].tolist()) == [9, 17, 28, 31, 44, 60]


def test_what_the_listener_raises_ends_the_run_even_where_it_is_about_memory(model, prompts, on_cpu):
    def listener(finished):
        raise MemoryError("of the listener's own")

    engine = StaticEngine(model, room=FixedRoom(4, prefill_tokens=1), settings=GREEDY, seed=0, **on_cpu)
    with pytest.raises(MemoryError, match="of the listener's own"):
        engine.run(prompts, on_finished=listener)


SAMPLING = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 20}


def test_sampled_texts_do_not_depend_on_the_batch_or_on_what_is_left_out(model, prompts, on_cpu):
    whole = generate(model, prompts, settings=SAMPLING, rows=4, seed=3, **on_cpu)
    assert whole == generate(model, prompts, settings=SAMPLING, rows=11, seed=3, **on_cpu)
    rest = [1, 4, 7]
    assert [whole[i] for i in rest] == generate(model, prompts.take(rest), settings=SAMPLING, rows=2, seed=3, **on_cpu)


def test_sampled_texts_do_not_hear_of_what_ran_out(model, prompts, on_cpu):
    scarce = Scarce(model, 4, after=5)
    try:
        responses = generate(model, prompts, settings=SAMPLING, rows=8, seed=3, **on_cpu)
    finally:
        scarce.hook.remove()
    assert responses == generate(model, prompts, settings=SAMPLING, rows=4, seed=3, **on_cpu)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 5, "eos_token_id": [0, *range(2, 150)]},
        {"guidance_scale": 1.5},
        {"suppress_tokens": [239, 188], "bad_words_ids": [[58], [4, 5]]},
    ],
)
def test_tokens_are_chosen_as_transformers_would_choose_them(model, prompts, on_cpu, keys):
    """transformers, one row at a time: its processors see padding, brim's do not."""
    from transformers import GenerationConfig

    settings = {**GREEDY, **keys}
    responses = generate(model, prompts, settings=settings, rows=4, seed=0, **on_cpu)
    for row, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([row.input_ids.tolist()])
        given = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GenerationConfig(**settings))
        new = given[0, ids.shape[1] :].tolist()
        assert response.token_ids == new[: len(response.token_ids)]
        assert new[len(response.token_ids) :] == ([] if response.end_id is None else [response.end_id])


def test_beams_are_transformers_own(model, prompts, on_cpu):
    settings = {**GREEDY, "num_beams": 3, "length_penalty": 0.5}
    alone = generate(model, prompts, settings=settings, rows=1, seed=0, **on_cpu)
    assert generate(model, prompts, settings=settings, rows=5, seed=0, **on_cpu) == alone
    assert [response.token_ids for response in alone] != one_by_one(model, prompts, end=[0])


def test_beams_that_sample_draw_from_a_seed_of_their_row(model, prompts, on_cpu):
    settings = {**SAMPLING, "num_beams": 2}
    some = prompts.take([0, 2, 5, 8])
    texts = generate(model, some, settings=settings, rows=4, seed=1, **on_cpu)
    assert texts[1:] == generate(model, some.take([1, 2, 3]), settings=settings, rows=4, seed=1, **on_cpu)
    assert texts != generate(model, some, settings=settings, rows=4, seed=2, **on_cpu)


def test_the_programs_own_random_numbers_go_on_as_if_nothing_had_been_drawn(model, prompts, on_cpu):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generate(model, prompts.take([0, 2]), settings={**SAMPLING, "num_beams": 2}, rows=2, seed=1, **on_cpu)
    assert torch.equal(torch.get_rng_state(), before)


class Even:
    """Even tokens first, then odd ones."""

    def allowed(self, generated):
        return range(len(generated) % 2 + 2, 300, 2)


@pytest.mark.parametrize("keys", [{}, {"num_beams": 2}, {"do_sample": True, "temperature": 1.0}])
def test_a_constraint_holds(model, prompts, on_cpu, keys):
    responses = generate(model, prompts, settings={**GREEDY, **keys}, rows=4, seed=0, constraint=Even(), **on_cpu)
    assert {tuple(token % 2 for token in response.token_ids) for response in responses} == {(0, 1) * 4}


@pytest.mark.parametrize("kind", [StaticEngine, SlotsEngine])
def test_what_fewer_rows_never_cure_is_raised_as_it_is(model, prompts, on_cpu, monkeypatch, kind):
    monkeypatch.setattr("brim.batching.oom._host_room_bytes", lambda: 80 << 30)
    told = []

    def broken(module, args, kwargs):
        raise RuntimeError("could not create a primitive")

    room = FixedRoom(4, prefill_tokens=1)
    engine = kind(model, room=room, settings=GREEDY, seed=0, is_misled=False, on_smaller=told.append, **on_cpu)
    hook = model.register_forward_pre_hook(broken, with_kwargs=True)
    try:
        with pytest.raises(RuntimeError, match=r"^could not create a primitive$"):
            engine.run(prompts, on_finished=lambda finished: None)
    finally:
        hook.remove()
    assert [smaller.after for smaller in told] == [2, 1]
