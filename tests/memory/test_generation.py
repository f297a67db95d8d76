"""Generation put together from a few traced tokens, against all tokens traced."""

import pytest
from tests.memory.expansion import workload_of
from tests.memory.tiny_architectures import write_folder

import brim.memory.trace.generation as generation
from brim.memory import static_stream
from brim.memory.trace import compose_parts, record

ROWS, TOKENS = 2, 8
LAYERS, HEADS_KV, HEAD, WIDTH_BYTES = 6, 2, 8, 2


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", "llama", num_hidden_layers=LAYERS)


def config_of(folder, new_tokens, **settings):
    return {
        "base_model": str(folder),
        "trainer": {"type": "none"},
        "generation": {"max_new_tokens": new_tokens, "do_sample": False, **settings},
    }


def composed(config, new_tokens):
    return static_stream(workload_of(config, "generate"), ROWS, TOKENS, new_tokens=new_tokens)[0]


def traced(config, new_tokens, monkeypatch):
    """Every token traced."""
    monkeypatch.setattr(generation, "TRACED_TOKENS", new_tokens)
    recording = record(workload_of(config, "generate").generation(), rows=ROWS, tokens=TOKENS)
    monkeypatch.undo()
    parts = ["load", "prefill", *(f"decode {step}" for step in range(1, new_tokens))]
    assert list(recording.parts)[: len(parts)] == parts
    return compose_parts(recording, parts)


def steps(stream):
    """The events of each part: sizes, operators and whether it is a birth."""
    ends = [position for position, _ in stream.marks[1:]]
    found = {}
    for (start, label), end in zip(stream.marks, ends, strict=False):
        found[label] = [
            (storage >= 0, stream.sizes[storage if storage >= 0 else ~storage], place)
            for storage, place in zip(stream.storages[start:end], stream.places[start:end], strict=True)
        ]
    return found


def without_padding(events):
    """Without masks that are padded to a multiple of 8 tokens: between the traced lengths these lie on a line, too."""
    return [each for each in events if each[1] >= 256]  # keys and values of 8 tokens have 512 bytes


def live_bytes(stream, category):
    """At each mark."""
    live, by_mark, marks = 0, [], [position for position, _ in stream.marks]
    for position, storage in enumerate([*stream.storages, None]):
        by_mark += [live] * marks.count(position)
        if storage is not None and stream.categories[storage if storage >= 0 else ~storage] == category:
            live += stream.sizes[storage] if storage >= 0 else -stream.sizes[~storage]
    return by_mark


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4])
def test_few_tokens_are_all_traced(llama, new_tokens, monkeypatch):
    config = config_of(llama, new_tokens)
    stream, full = composed(config, new_tokens), traced(config, new_tokens, monkeypatch)
    assert (stream.sizes, stream.storages, stream.places) == (full.sizes, full.storages, full.places)


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_many_tokens_are_as_if_all_were_traced(llama, settings, monkeypatch):
    new_tokens = 12
    config = config_of(llama, new_tokens, **settings)
    monkeypatch.setattr(generation, "_LEAST_BYTES", 0)  # nothing is left out
    stream = composed(config, new_tokens)
    full = traced(config, new_tokens, monkeypatch)
    mine, theirs = steps(stream), steps(full)
    assert list(mine) == ["load", "prefill", *(f"token {token}" for token in range(2, new_tokens + 1))]
    for (label, events), other in zip(mine.items(), theirs.values(), strict=True):
        assert without_padding(events) == without_padding(other), label
    assert mine["token 12"] == theirs["decode 11"]
    assert live_bytes(stream, "kv_cache") == live_bytes(full, "kv_cache")


def test_what_is_small_and_passes_is_left_out_but_in_the_last_step(llama, monkeypatch):
    config = config_of(llama, 8)
    stream = composed(config, 8)
    full = traced(config, 8, monkeypatch)
    mine, theirs = list(steps(stream).values()), list(steps(full).values())
    assert mine[-1] == theirs[-1]
    assert mine[:5] == theirs[:5]  # load, prompts and what was traced
    assert all(len(some) < len(every) for some, every in zip(mine[5:-1], theirs[5:-1], strict=True))


@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_prompts_after_which_a_mask_needs_no_padding_are_traced_a_little_longer(llama, tokens):
    stream, _ = static_stream(workload_of(config_of(llama, 7), "generate"), 1, tokens, new_tokens=7)
    assert list(steps(stream))[-1] == "token 7"
    exact = 2 * LAYERS * HEADS_KV * HEAD * WIDTH_BYTES
    assert exact * (tokens + 6) <= live_bytes(stream, "kv_cache")[-1] <= exact * (tokens + 6 + 4)


@pytest.mark.parametrize("new_tokens", [2, 3, 5, 8])
def test_the_cache_holds_keys_and_values_of_all_but_the_last_token(llama, new_tokens):
    stream = composed(config_of(llama, new_tokens), new_tokens)
    token_bytes = 2 * LAYERS * ROWS * HEADS_KV * HEAD * WIDTH_BYTES
    assert live_bytes(stream, "kv_cache")[-1] == token_bytes * (TOKENS + new_tokens - 1)
