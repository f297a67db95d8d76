"""Pieces of text, against the text of all tokens at once."""

import pytest
from hypothesis import given, strategies as st
from tests.properties import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from brim.data.tokens.encoder import FolderEncoder
from brim.infer import GrowingText

SIZE = 300


def encoder_of(tokenizer, folder):
    return FolderEncoder(
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


@pytest.fixture(scope="module", params=["strip", "metaspace"])
def sentencepiece(request, tiny_base):
    return like_sentencepiece(tiny_base, request.param)


TEXT = "The sum is 12 — naïve? 你好, 世界! 👩‍👩‍👧 \n\n  two  spaces, ﷽ end "


@pytest.fixture(scope="module", params=["byte level", "strip", "metaspace"])
def encoder(request, tiny_base, byte_level):
    return byte_level if request.param == "byte level" else like_sentencepiece(tiny_base, request.param)


def test_pieces_of_a_text_join_up_and_hold_no_half_characters(encoder):
    (tokens,) = encoder.encode([TEXT], special_tokens=False)
    pieces, rest = pieces_of(encoder, tokens)
    assert "".join(pieces) + rest == encoder.decode(tokens, skip_special_tokens=True)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(rest) <= 1  # a byte at the end may have been held back
    assert sum(map(bool, pieces)) > len(TEXT) / 3


def test_a_character_of_several_tokens_comes_with_its_last_one(byte_level):
    (tokens,) = byte_level.encode(["a你b"], special_tokens=False)
    assert len(tokens) == 5
    assert pieces_of(byte_level, tokens) == (["a", "", "", "你", "b"], "")
    assert pieces_of(byte_level, tokens[:3]) == (["a", "", ""], "\N{REPLACEMENT CHARACTER}")


def test_bytes_wait_until_the_run_of_them_is_over(sentencepiece):
    """Whole characters become ���� when a byte that is none follows them in the same run."""
    heart = [3 + byte for byte in "❤".encode()]
    a = 262
    pieces, rest = pieces_of(sentencepiece, [a, *heart, a, *heart, 3 + 0xE4])
    assert (pieces, rest) == (["a", "", "", "", "❤a", "", "", "", ""], "\N{REPLACEMENT CHARACTER}" * 4)
    assert "".join(pieces) + rest == sentencepiece.decode([a, *heart, a, *heart, 3 + 0xE4], skip_special_tokens=True)


def test_special_tokens_have_no_text_and_swallow_no_space(sentencepiece):
    the = 261
    assert pieces_of(sentencepiece, [1, the, 2, the, 1, 1, the]) == (["", "the", "", " the", "", "", " the"], "")


@given(tokens=st.lists(st.integers(0, SIZE - 1), max_size=40))
@examples(300)
def test_any_tokens_of_bytes_join_up(byte_level, tokens):
    pieces, rest = pieces_of(byte_level, tokens)
    assert "".join(pieces) + rest == byte_level.decode(tokens, skip_special_tokens=True)


# Words more often than bytes, or there would hardly be a run that ends.
@given(tokens=st.lists(st.integers(0, 2) | st.integers(3, 258) | st.integers(259, 269), max_size=40))
@examples(300)
def test_any_tokens_with_bytes_to_fall_back_to_join_up(sentencepiece, tokens):
    pieces, rest = pieces_of(sentencepiece, tokens)
    assert "".join(pieces) + rest == sentencepiece.decode(tokens, skip_special_tokens=True)


def test_a_vocabulary_without_bytes_holds_nothing_back(tiny_base):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = encoder_of(tokenizer, tiny_base)
    assert pieces_of(encoder, [1, 2, 1]) == (["one", " two", " one"], "")


def test_the_work_of_a_token_does_not_grow_with_the_text(byte_level):
    longest = 0

    class Watched:
        def encode(self, texts, *, special_tokens):
            return byte_level.encode(texts, special_tokens=special_tokens)

        def decode(self, ids, skip_special_tokens):
            nonlocal longest
            longest = max(longest, len(ids))
            return byte_level.decode(ids, skip_special_tokens=skip_special_tokens)

    (tokens,) = byte_level.encode([TEXT * 20], special_tokens=False)
    pieces_of(Watched(), tokens)
    assert len(tokens) > 1000
    assert longest <= 16
