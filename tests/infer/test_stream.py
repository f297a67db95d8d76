"""Tokens as they are made, over a cache that may be kept, and the text that grows with them."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, strategies as st
from tests.infer.families import GREEDY, ON_CPU, build, runs_out
from tests.properties import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from brim.data.tokens.encoder import folder_encoder
from brim.errors import InputError, OutOfMemoryError
from brim.infer import GrowingText, KeptCache, stream_tokens
from brim.infer.engines import FixedRoom, SlotsEngine, respond_to

SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_k": 50}


def streamed(model, prompt, *, settings=GREEDY, seed=0, **how):
    return stream_tokens(model, prompt, settings=settings, seed=seed, **ON_CPU, **how)


def respond(model, prompt, kept=None):
    return list(streamed(model, prompt, settings={**GREEDY, "max_new_tokens": 6}, kept=kept))


@pytest.fixture
def prompt(prompts):
    return prompts[4].input_ids.tolist()


@pytest.fixture
def read(model):
    """How many tokens each pass has read."""
    lengths = []

    def note(module, positional, keywords, output):
        lengths.append(keywords["input_ids"].shape[1])

    with model.register_forward_hook(note, with_kwargs=True):
        yield lengths


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3}])
def test_the_tokens_are_those_of_the_engine(model, prompts, settings):
    engine = SlotsEngine(model, settings=settings, room=FixedRoom(4, prefill_tokens=200), seed=3, **ON_CPU)
    for row, response in zip(prompts, respond_to(engine, prompts), strict=True):
        tokens = streamed(model, row.input_ids.tolist(), settings=settings, seed=3, key=row.key)
        assert list(tokens) == response.token_ids


def test_a_token_comes_before_the_next_one_is_made_and_the_callers_tensors_are_as_ever(model, prompt, read):
    num_passes = []
    for _ in streamed(model, prompt):
        num_passes.append(len(read))
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    assert num_passes == list(range(1, 9))
    assert len(read) == 8
    free = list(streamed(model, prompt))
    settings = {**GREEDY, "eos_token_id": [0, free[3]]}  # the end is not among the tokens
    assert list(streamed(model, prompt, settings=settings)) == free[: free.index(free[3])]


def test_an_iterator_that_is_closed_or_dropped_frees_its_cache(model, prompt, caches):
    closed, dropped = streamed(model, prompt), streamed(model, prompt)
    next(closed), next(dropped)
    assert all(cache() is not None for cache in caches)
    closed.close()
    del dropped
    assert [cache() for cache in caches] == [None, None]


def test_a_lack_of_memory_is_named_and_leaves_no_cache(model, prompt, caches):
    seen = []
    with (
        runs_out(model, lambda rows, tokens, number: number > 4),
        pytest.raises(OutOfMemoryError, match=r"over a single response \(after 35 tokens, the prompt's among"),
    ):
        seen.extend(streamed(model, prompt))
    assert caches[0]() is None
    assert seen == list(streamed(model, prompt))[:4]


def test_settings_that_are_refused_are_told_before_the_first_token(model, prompt):
    with pytest.raises(InputError, match=r"generation: transformers cannot generate with these settings"):
        streamed(model, prompt, settings={**SAMPLED, "top_k": -1})


def test_what_prompts_have_in_common_is_read_once(model, prompts, prompt, read):
    more = prompts[2].input_ids.tolist()
    kept = KeptCache()
    first = respond(model, prompt, kept)
    assert read == [31, 1, 1, 1, 1, 1]
    longer = [*prompt, *first, *more]
    cases = [
        (longer, len(more) + 1),  # the last token of the response had not been read
        (longer, 1),  # nothing is new, and its last token is read again
        ([*longer[:33], 5, 6], 2),  # another way from the 34th token on
        (longer[:20], 1),  # a beginning
        ([7, *prompt], 32),  # nothing in common
    ]
    for tokens, num_read in cases:
        read.clear()
        found = respond(model, tokens, kept)
        assert read[0] == num_read
        assert found == respond(model, tokens)
    for most, columns in ((None, 72), (50, 50)):  # twice what is needed, and not beyond the context
        kept = KeptCache(most_columns=most)
        respond(model, prompt, kept)
        assert kept._passes.cache.columns == columns


@pytest.mark.parametrize("family", ["mistral", "bloom", "gpt_neo", "opt"])
def test_windows_slopes_and_positions_go_on_where_they_were(family):
    other, kept, tokens = build(family), KeptCache(), [5, 9, 3, 44, 17, 60, 2, 80]
    for turn in range(3):
        found = respond(other, tokens, kept)
        assert found == respond(other, tokens)
        tokens = [*tokens, *found, 7 + turn, 11, 90]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_interrupted_within_a_pass_is_not_gone_on_from(model, prompt, read, error):
    kept = KeptCache()

    def strike(module, inputs, output):
        if len(read) == 2:
            raise error

    with model.model.layers[1].register_forward_hook(strike), pytest.raises(error):
        respond(model, prompt, kept)
    assert kept._passes is None
    assert respond(model, prompt, kept) == respond(model, prompt)


def test_a_closed_response_can_be_gone_on_from_and_clearing_frees_the_memory(model, prompt, caches):
    kept = KeptCache()
    tokens = streamed(model, prompt, kept=kept)
    first = next(tokens)
    tokens.close()
    assert respond(model, [*prompt, first, 5], kept) == respond(model, [*prompt, first, 5])
    assert caches[0]() is not None
    kept.clear()
    assert caches[0]() is None
    assert torch.is_grad_enabled()


def encoder_of(tokenizer, folder):
    return folder_encoder(
        tokenizer, eos_id=0, pad_id=0, bos_id=None, begin=[], folder=folder, special_tokens={}, vocabulary=None
    )


def pieces_of(encoder, tokens):
    text = GrowingText(encoder)
    return [text.add(token) for token in tokens], text.rest()


@pytest.fixture(scope="module")
def byte_level(tiny_base):
    """Every token is one byte or several, whole characters or not."""
    tokenizer = Tokenizer.from_file(str(tiny_base / "tokenizer.json"))
    return encoder_of(tokenizer, tiny_base)


def like_sentencepiece(folder, kind):
    """As Llama 2 and Gemma have it: words with ▁ in front, and bytes for what the vocabulary lacks."""
    words = ["▁", "▁a", "▁the", "a", "b", "é", "你", "\n", "▁▁", ".", "▁,"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: at for at, word in enumerate(vocabulary)}, merges=[], byte_fallback=True,
                   unk_token="<unk>", fuse_unk=True)
    )  # fmt: skip
    if kind == "strip":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return encoder_of(tokenizer, folder)


@pytest.fixture(scope="module", params=["byte level", "strip", "metaspace"])
def encoder(request, tiny_base, byte_level):
    return byte_level if request.param == "byte level" else like_sentencepiece(tiny_base, request.param)


TEXT = "The sum is 12 — naïve? 你好, 世界! 👩‍👩‍👧 \n\n  two  spaces, ﷽ end "


def test_a_character_of_several_tokens_comes_with_its_last_one_and_without_bytes_nothing_is_held(byte_level, tiny_base):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert pieces_of(encoder_of(words, tiny_base), [1, 2, 1]) == (["one", " two", " one"], "")
    (tokens,) = byte_level.encode(["a你b"], special_tokens=False)
    assert len(tokens) == 5
    assert pieces_of(byte_level, tokens) == (["a", "", "", "你", "b"], "")
    assert pieces_of(byte_level, tokens[:3]) == (["a", "", ""], "\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("kind", ["strip", "metaspace"])
def test_bytes_wait_until_the_run_of_them_is_over_and_special_tokens_have_no_text(tiny_base, kind):
    """Whole characters become ���� when a byte that is none follows them in the same run."""
    sentencepiece = like_sentencepiece(tiny_base, kind)
    the = 261
    assert pieces_of(sentencepiece, [1, the, 2, the, 1, 1, the]) == (["", "the", "", " the", "", "", " the"], "")
    heart = [3 + byte for byte in "❤".encode()]
    a = 262
    pieces, rest = pieces_of(sentencepiece, [a, *heart, a, *heart, 3 + 0xE4])
    assert (pieces, rest) == (["a", "", "", "", "❤a", "", "", "", ""], "\N{REPLACEMENT CHARACTER}" * 4)
    assert "".join(pieces) + rest == sentencepiece.decode([a, *heart, a, *heart, 3 + 0xE4], skip_special_tokens=True)


# Words more often than bytes, or there would hardly be a run that ends.
@given(tokens=st.lists(st.integers(0, 2) | st.integers(3, 258) | st.integers(259, 269), max_size=40))
@examples(300)
def test_any_tokens_join_up(encoder, tokens):
    pieces, rest = pieces_of(encoder, tokens)
    assert "".join(pieces) + rest == encoder.decode(tokens, skip_special_tokens=True)


def test_pieces_of_a_text_join_up_hold_no_half_characters_and_their_work_does_not_grow_with_the_text(
    encoder, byte_level
):
    (tokens,) = encoder.encode([TEXT * 20], special_tokens=False)
    watched = Mock(wraps=encoder)
    pieces, rest = pieces_of(watched, tokens)
    assert "".join(pieces) + rest == encoder.decode(tokens, skip_special_tokens=True)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(rest) <= 1  # a byte at the end may have been held back
    assert sum(map(bool, pieces)) > 20 * len(TEXT) / 3
    assert max(len(call.args[0]) for call in watched.decode.call_args_list) <= (16 if encoder is byte_level else 32)
