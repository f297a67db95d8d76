"""Whoever is in the batch, a row's text is the one that it has alone."""

import gc
import weakref

import pytest
import torch

from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer.engines import FixedRoom, Passes, SlotsEngine, respond_to
from brim.infer.engines.cache import RowCache

NEW_TOKENS = 12
GREEDY = {
    "max_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "num_beams": 1,
    "pad_token_id": 1,
    "eos_token_id": list(range(30, 60)),  # a tenth of the vocabulary: responses end at different lengths
}
SAMPLING = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 0}


def engine(model, *, rows=3, prefill_tokens=64, settings=GREEDY, **changes):
    how = {"seed": 0, "device": torch.device("cpu"), **changes}
    return SlotsEngine(model, settings=settings, room=FixedRoom(rows, prefill_tokens=prefill_tokens), **how)


def texts(responses):
    return [response.token_ids for response in responses]


@pytest.fixture
def precision(on_cpu):
    return on_cpu["precision"]


@pytest.fixture(scope="module")
def expected(model):
    """Argmax after argmax, without padding, cache or an engine; by prompt."""
    known = {}

    def one(prompt):
        if tuple(prompt) not in known:
            new = []
            while len(new) < NEW_TOKENS:
                with torch.no_grad():
                    token = int(model(input_ids=torch.tensor([[*prompt, *new]])).logits[0, -1].argmax())
                if token in GREEDY["eos_token_id"]:
                    break
                new.append(token)
            known[tuple(prompt)] = new
        return known[tuple(prompt)]

    return lambda prompts: [one(row.input_ids.tolist()) for row in prompts]


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize(("rows", "prefill_tokens"), [(1, 1), (2, 1000), (3, 40), (5, 64), (11, 5), (64, 10_000)])
def test_greedy_text_is_that_of_each_row_alone(model, prompts, precision, expected, rows, prefill_tokens, refill):
    made = engine(model, rows=rows, prefill_tokens=prefill_tokens, refill=refill, precision=precision)
    responses = respond_to(made, prompts)
    assert texts(responses) == expected(prompts)
    assert len({len(text) for text in texts(responses)}) > 4  # all of one length would not show much
    for response in responses:
        assert (response.finish_reason == "stop") == (len(response.token_ids) < NEW_TOKENS)
        assert (response.end_id in GREEDY["eos_token_id"]) == (response.finish_reason == "stop")


def test_rows_that_wait_take_the_place_of_those_that_have_ended(model, prompts, precision):
    refilled, static = (engine(model, refill=refill, precision=precision) for refill in (True, False))
    respond_to(refilled, prompts)
    respond_to(static, prompts)
    assert refilled.statistics.num_row_steps == static.statistics.num_row_steps
    assert refilled.statistics.num_steps < static.statistics.num_steps
    assert refilled.statistics.mean_rows > 2


def test_sampled_text_is_the_same_in_any_batch(model, prompts, precision):
    found = [
        texts(respond_to(engine(model, rows=rows, settings=SAMPLING, precision=precision), prompts))
        for rows in (1, 4, 11)
    ]
    assert found[0] == found[1] == found[2]
    other = engine(model, rows=4, settings=SAMPLING, seed=1, precision=precision)
    assert texts(respond_to(other, prompts)) != found[0]


def test_sampled_text_is_the_same_when_other_rows_are_gone(model, prompts, precision):
    every = texts(respond_to(engine(model, settings=SAMPLING, precision=precision), prompts))
    some = texts(respond_to(engine(model, settings=SAMPLING, precision=precision), prompts.take([7, 2, 9])))
    assert some == [every[7], every[2], every[9]]


def test_what_looks_back_sees_no_padding(model, prompts, precision):
    penalty = {**GREEDY, "repetition_penalty": 1.9, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    alone, together = (
        texts(respond_to(engine(model, rows=rows, settings=penalty, precision=precision), prompts)) for rows in (1, 11)
    )
    assert alone == together
    assert min(map(len, alone)) >= 4


def test_rows_go_alone_where_a_batch_misleads_the_model(model, prompts, precision, expected):
    """As in transformers' DeepSeek-V3 before 5.17, whose scores change with the padding of the rows beside."""

    def mislead(module, args, output):
        if len(output.logits) > 1:
            output.logits = output.logits.roll(1, dims=-1)
        return output

    made = engine(model, rows=5, precision=precision)
    handle = model.register_forward_hook(mislead)
    try:
        assert texts(respond_to(made, prompts)) == expected(prompts)
    finally:
        handle.remove()
    assert made.statistics.most_rows == 1


def test_each_response_is_reported_once_as_it_ends(model, prompts, precision):
    reported = []
    engine(model, precision=precision).run(
        prompts, on_finished=lambda each: reported.append([f.position for f in each])
    )
    assert sorted(position for each in reported for position in each) == list(range(len(prompts)))
    assert len(reported) > 3


def test_one_new_token_needs_no_step(model, prompts, precision, expected):
    made = engine(model, settings={**GREEDY, "max_new_tokens": 1}, precision=precision)
    assert texts(respond_to(made, prompts)) == [text[:1] for text in expected(prompts)]
    assert made.statistics.num_steps == 0


def test_no_prompts_give_no_responses(model, prompts, precision):
    assert respond_to(engine(model, precision=precision), prompts.take([])) == []


class RunsOut:
    """A model that runs out of memory whenever a pass has more rows, or more tokens, than are allowed."""

    def __init__(self, model, *, rows, tokens=10_000):
        self.model, self.rows, self.tokens, self.times = model, rows, tokens, 0
        self.handle = model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, module, args, given):
        rows, tokens = given["input_ids"].shape
        if rows > self.rows or rows * tokens > self.tokens:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.handle.remove()


def test_out_of_memory_costs_no_row_and_no_token(model, prompts, precision, expected):
    smaller = []
    made = engine(model, rows=8, prefill_tokens=1000, precision=precision, on_smaller=smaller.append)
    reported = []
    with RunsOut(model, rows=3) as limit:
        made.run(prompts, on_finished=reported.extend)
    assert limit.times == made.statistics.num_out_of_memory == len(smaller) > 0
    assert sorted(each.position for each in reported) == list(range(len(prompts)))
    by_position = {each.position: each.response.token_ids for each in reported}
    assert [by_position[i] for i in range(len(prompts))] == expected(prompts)
    assert made.statistics.most_rows <= 3
    assert "generation: 8 rows of up to" in str(smaller[0])


def test_memory_that_is_short_for_a_while_only_narrows_the_batch(model, prompts, precision, expected):
    """In the middle of the rows' texts: what they have is kept."""
    made, times = engine(model, rows=4, precision=precision), []

    def now_and_then(module, args, given):
        if not isinstance(given["past_key_values"], RowCache):
            return  # the trial whether rows may be together
        times.append(len(times))
        if given["input_ids"].shape[1] == 1 and len(times) in (9, 17):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"
            )

    handle = model.register_forward_pre_hook(now_and_then, with_kwargs=True)
    try:
        assert texts(respond_to(made, prompts)) == expected(prompts)
    finally:
        handle.remove()
    assert made.statistics.num_out_of_memory == 2


def test_a_prompt_that_does_not_fit_alone_is_named(model, prompts, precision):
    made, reported = engine(model, precision=precision), []
    with (
        RunsOut(model, rows=8, tokens=50),
        pytest.raises(OutOfMemoryError, match=r"row 101 .*generation of a single row runs out of memory \(60 tokens\)"),
    ):
        made.run(prompts, on_finished=reported.extend)
    assert made.statistics.num_out_of_memory >= 2  # it had a second try


def test_other_errors_are_not_taken_for_a_lack_of_memory(model, prompts, precision):
    def fail(module, args):
        raise RuntimeError("something else")

    handle = model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="something else"):
            respond_to(engine(model, precision=precision), prompts)
    finally:
        handle.remove()


def test_what_the_receiver_raises_ends_the_run(model, prompts, precision):
    def full(finished):
        raise BrimError("the disk is full")

    with pytest.raises(BrimError, match="the disk is full"):
        engine(model, precision=precision).run(prompts, on_finished=full)


def test_a_lack_of_memory_where_responses_are_kept_is_not_the_engines(model, prompts, precision):
    def full(finished):
        raise MemoryError

    made = engine(model, precision=precision)
    with pytest.raises(MemoryError):
        made.run(prompts, on_finished=full)
    assert made.statistics.num_out_of_memory == 0


def test_memory_that_runs_out_while_a_row_leaves_loses_no_response(model, prompts, precision, expected, monkeypatch):
    copied, copy_row = [], RowCache.remove

    def remove(cache, slot):
        copied.append(slot)
        if len(copied) in (2, 5):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        copy_row(cache, slot)

    monkeypatch.setattr(RowCache, "remove", remove)
    made, reported = engine(model, rows=4, precision=precision), []
    made.run(prompts, on_finished=reported.extend)
    assert made.statistics.num_out_of_memory == 2
    assert sorted(each.position for each in reported) == list(range(len(prompts)))
    by_position = {each.position: each.response.token_ids for each in reported}
    assert [by_position[i] for i in range(len(prompts))] == expected(prompts)


def test_the_cache_is_gone_with_the_last_row(model, prompts, precision, monkeypatch):
    """At once, not when Python next looks for cycles: on a GPU the next step of training wants the memory."""
    made, begin = [], Passes.__init__

    def watched(self, *args, **how):
        begin(self, *args, **how)
        made.append(weakref.ref(self.cache))

    monkeypatch.setattr(Passes, "__init__", watched)
    gc.collect()
    gc.disable()
    try:
        respond_to(engine(model, precision=precision), prompts)
        assert [cache() for cache in made] == [None]
    finally:
        gc.enable()


def test_settings_that_transformers_refuses_are_the_users_mistake(model, prompts, precision):
    settings = {**GREEDY, "bad_words_ids": [[5000]]}
    with pytest.raises(InputError, match="generation: transformers cannot generate with these settings"):
        respond_to(engine(model, settings=settings, precision=precision), prompts)
