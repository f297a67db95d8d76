"""Responses over a cache that is kept, against those that read everything anew; and what is read."""

import gc
import weakref

import pytest
import torch

from brim.infer import KeptCache, stream_tokens

from .families import build

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": [0]}


@pytest.fixture
def read(model):
    """How many tokens each pass has read."""
    lengths = []

    def note(module, positional, keywords, output):
        lengths.append(keywords["input_ids"].shape[1])

    hook = model.register_forward_hook(note, with_kwargs=True)
    yield lengths
    hook.remove()


def respond(model, prompt, kept=None, **on_cpu):
    return list(stream_tokens(model, prompt, settings=GREEDY, seed=0, kept=kept, **on_cpu))


def test_what_prompts_have_in_common_is_read_once(model, prompts, on_cpu, read):
    prompt, more = prompts[4].input_ids.tolist(), prompts[2].input_ids.tolist()
    kept = KeptCache()
    first = respond(model, prompt, kept, **on_cpu)
    assert read == [31, 1, 1, 1, 1, 1]
    longer = [*prompt, *first, *more]
    cases = [
        (longer, len(more) + 1),  # the last token of the response had not been read
        (longer, 1),  # nothing is new, and its last token is read again
        ([*longer[:33], 5, 6], 2),  # another way from the 34th token on
        (longer[:20], 1),  # a beginning
    ]
    for tokens, num_read in cases:
        read.clear()
        found = respond(model, tokens, kept, **on_cpu)
        assert read[0] == num_read
        assert found == respond(model, tokens, **on_cpu)


def test_a_prompt_of_its_own_is_read_as_a_whole(model, prompts, on_cpu, read):
    kept = KeptCache()
    respond(model, prompts[4].input_ids.tolist(), kept, **on_cpu)
    read.clear()
    tokens = [7, *prompts[4].input_ids.tolist()]
    assert respond(model, tokens, kept, **on_cpu) == respond(model, tokens, **on_cpu)
    assert read[0] == 32


def test_it_becomes_larger_by_doubling_and_not_beyond_the_context(model, prompts, on_cpu, read):
    kept, tokens, num_whole = KeptCache(most_columns=128), prompts[0].input_ids.tolist(), 0
    for turn in range(11):
        read.clear()
        found = respond(model, tokens, kept, **on_cpu)
        assert found == respond(model, tokens, **on_cpu)
        num_whole += read[0] == len(tokens)
        assert kept._passes.cache.columns <= 128
        tokens = [*tokens, *found, 5 + turn, 9, 12, 3, 4]
    assert len(tokens) > 100
    assert 2 <= num_whole <= 5


@pytest.mark.parametrize("family", ["mistral", "bloom", "gpt_neo", "opt"])
def test_windows_slopes_and_positions_go_on_where_they_were(family, on_cpu):
    other, kept, tokens = build(family).eval(), KeptCache(), [5, 9, 3, 44, 17, 60, 2, 80]
    for turn in range(3):
        found = respond(other, tokens, kept, **on_cpu)
        assert found == respond(other, tokens, **on_cpu)
        tokens = [*tokens, *found, 7 + turn, 11, 90]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_interrupted_within_a_pass_is_not_gone_on_from(model, prompts, on_cpu, error):
    prompt, kept, num_passes = prompts[4].input_ids.tolist(), KeptCache(), 0

    def strike(module, inputs, output):
        nonlocal num_passes
        num_passes += 1
        if num_passes == 3:
            raise error

    hook = model.model.layers[1].register_forward_hook(strike)
    try:
        with pytest.raises(error):
            respond(model, prompt, kept, **on_cpu)
    finally:
        hook.remove()
    assert kept._passes is None
    assert respond(model, prompt, kept, **on_cpu) == respond(model, prompt, **on_cpu)


def test_a_closed_response_can_be_gone_on_from_and_clearing_frees_the_memory(model, prompts, on_cpu):
    prompt, kept = prompts[4].input_ids.tolist(), KeptCache()
    tokens = stream_tokens(model, prompt, settings=GREEDY, seed=0, kept=kept, **on_cpu)
    first = next(tokens)
    tokens.close()
    assert respond(model, [*prompt, first, 5], kept, **on_cpu) == respond(model, [*prompt, first, 5], **on_cpu)
    cache = weakref.ref(kept._passes.cache)
    gc.disable()
    try:
        kept.clear()
        assert cache() is None
    finally:
        gc.enable()
    assert torch.is_grad_enabled()
