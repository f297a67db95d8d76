"""Tokens as they are made, against those that the engine gives at the end."""

import gc
import weakref

import pytest
import torch

from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer import stream, stream_tokens
from brim.infer.engines import FixedRoom, Passes, SlotsEngine, respond_to

GREEDY = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0]}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 50}


@pytest.fixture
def prompt(prompts):
    return prompts[4].input_ids.tolist()


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3}])
def test_the_tokens_are_those_of_the_engine(model, prompts, on_cpu, settings):
    engine = SlotsEngine(model, settings=settings, room=FixedRoom(4, prefill_tokens=200), seed=3, **on_cpu)
    responses = respond_to(engine, prompts)
    for row, response in zip(prompts, responses, strict=True):
        tokens = stream_tokens(model, row.input_ids.tolist(), settings=settings, seed=3, key=row.key, **on_cpu)
        assert list(tokens) == response.token_ids


def test_the_end_is_not_among_the_tokens(model, prompt, on_cpu):
    free = list(stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu))
    assert len(free) == 8
    settings = {**GREEDY, "eos_token_id": [0, free[3]]}
    assert list(stream_tokens(model, prompt, settings=settings, seed=0, **on_cpu)) == free[: free.index(free[3])]


def test_a_token_comes_before_the_next_one_is_made(model, prompt, on_cpu):
    num_passes = 0

    def count(module, inputs, output):
        nonlocal num_passes
        num_passes += 1

    hook = model.register_forward_hook(count)
    try:
        tokens = stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu)
        seen = [num_passes for _ in tokens]
    finally:
        hook.remove()
    assert seen == list(range(1, 9))
    assert num_passes == 8


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache that is made."""
    made = []

    class Watched(Passes):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self.cache))

    monkeypatch.setattr(stream, "Passes", Watched)
    return made


def test_an_iterator_that_is_closed_or_dropped_frees_its_cache(model, prompt, on_cpu, caches):
    gc.disable()
    try:
        closed = stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu)
        dropped = stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu)
        next(closed), next(dropped)
        assert all(cache() is not None for cache in caches)
        closed.close()
        del dropped
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_a_lack_of_memory_is_named_and_leaves_no_cache(model, prompt, on_cpu, caches):
    def scarce(module, inputs, output):
        if caches[-1]().end > len(prompt) + 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = model.register_forward_hook(scarce)
    seen = []
    try:
        with pytest.raises(OutOfMemoryError, match=r"over a single response \(after 35 tokens, the prompt's among"):
            seen.extend(stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu))
    finally:
        hook.remove()
    assert caches[0]() is None
    assert seen == list(stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu))[:4]


def test_the_callers_tensors_are_as_ever_between_tokens(model, prompt, on_cpu):
    for _ in stream_tokens(model, prompt, settings=GREEDY, seed=0, **on_cpu):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


def test_settings_that_are_refused_are_told_before_the_first_token(model, prompt, on_cpu):
    with pytest.raises(InputError, match=r"generation: transformers cannot generate with these settings"):
        stream_tokens(model, prompt, settings={**SAMPLED, "top_k": -1}, seed=0, **on_cpu)


def test_scores_that_are_not_finite_are_named(model, prompt, on_cpu):
    import copy

    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[:] = float("nan")
    with pytest.raises(BrimError, match="the probabilities of the next token are not finite"):
        list(stream_tokens(broken, prompt, settings=SAMPLED, seed=0, **on_cpu))
