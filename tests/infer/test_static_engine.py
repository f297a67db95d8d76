"""Texts do not depend on the batch that they were generated in, and come back in order."""

import numpy as np
import pytest
import torch

from brim.data import TokenRow, TokenRows
from brim.errors import BrimError, InputError
from brim.infer.engine import respond_to
from brim.infer.rows_at_once import RowsAtOnce
from brim.infer.static_engine import StaticEngine, end_ids

GREEDY = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0]}


def generate(model, prompts, *, on_batch=lambda rows: None, **how):
    return respond_to(StaticEngine(model, **how), prompts, on_batch=on_batch)


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


@pytest.mark.parametrize("batch_rows", [1, 3, 11, 64])
def test_greedy_batches_equal_one_by_one(model, prompts, on_cpu, batch_rows):
    responses = generate(model, prompts, settings=GREEDY, batch_rows=batch_rows, seed=0, **on_cpu)
    expected = one_by_one(model, prompts, end=[0])
    assert len({token for text in expected for token in text}) > 20  # a model that repeats itself would prove nothing
    assert [response.token_ids for response in responses] == expected


def test_the_end_is_cut_off_and_named(model, prompts, on_cpu):
    free = one_by_one(model, prompts, end=[])
    end = free[2][3]  # a token that the model is known to write
    responses = generate(model, prompts, settings={**GREEDY, "eos_token_id": [end]}, batch_rows=4, seed=0, **on_cpu)
    expected = [text[: text.index(end)] if end in text else text for text in free]
    assert [response.token_ids for response in responses] == expected
    assert [response.finish_reason for response in responses] == ["stop" if end in text else "length" for text in free]
    assert {response.finish_reason for response in responses} == {"stop", "length"}


def test_padding_that_is_also_the_end_does_not_end_texts(model, prompts, on_cpu):
    same = {**GREEDY, "pad_token_id": 0}
    responses = generate(model, prompts, settings=same, batch_rows=4, seed=0, **on_cpu)
    assert [response.token_ids for response in responses] == one_by_one(model, prompts, end=[0])


def test_sampling_repeats_with_its_seed(model, prompts, on_cpu):
    sampling = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 0}

    def texts(seed):
        found = generate(model, prompts, settings=sampling, batch_rows=4, seed=seed, **on_cpu)
        return [response.token_ids for response in found]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_every_row_is_reported_once(model, prompts, on_cpu):
    done = []
    generate(model, prompts, settings=GREEDY, batch_rows=4, seed=0, on_batch=done.append, **on_cpu)
    assert done == [4, 4, 3]


def test_no_prompts_give_no_responses(model, prompts, on_cpu):
    assert generate(model, prompts.take([]), settings=GREEDY, batch_rows=4, seed=0, **on_cpu) == []


def test_settings_that_transformers_refuses_are_the_users_mistake(model, prompts, on_cpu):
    settings = {**GREEDY, "bad_words_ids": [[5000]]}
    with pytest.raises(InputError, match=r"generation: transformers cannot generate with these settings: .*5000"):
        generate(model, prompts, settings=settings, batch_rows=4, seed=0, **on_cpu)


def test_scores_that_are_not_finite_are_named(model, on_cpu):
    import copy

    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[:] = float("nan")
    row = TokenRow(key=0, input_ids=np.array([5, 6], dtype=np.int32), supervised=np.zeros(2, dtype=bool))
    sampling = {**GREEDY, "do_sample": True, "temperature": 1.0}
    with pytest.raises(BrimError, match="the probabilities of the next token are not finite") as caught:
        generate(broken, TokenRows.from_rows([row]), settings=sampling, batch_rows=1, seed=0, **on_cpu)
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
    done, at_once = [], RowsAtOnce(8)
    scarce = Scarce(model, 3, after)
    try:
        responses = generate(
            model, prompts, settings=GREEDY, batch_rows=at_once, seed=0, on_batch=done.append, **on_cpu
        )
    finally:
        scarce.hook.remove()
    assert [response.token_ids for response in responses] == one_by_one(model, prompts, end=[0])
    assert at_once.num_rows == 2
    assert sum(done) == len(prompts)


def test_sampled_texts_do_not_hear_of_what_ran_out(model, prompts, on_cpu):
    sampled = {**GREEDY, "do_sample": True, "temperature": 1.0}
    scarce = Scarce(model, 4, after=5)
    try:
        responses = generate(model, prompts, settings=sampled, batch_rows=8, seed=3, **on_cpu)
    finally:
        scarce.hook.remove()
    assert responses == generate(model, prompts, settings=sampled, batch_rows=4, seed=3, **on_cpu)
