"""The base model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stdlib_code import tokenizer
from stdlib_code.dataset import TRAIN, Module, pretraining_rows

TEXTS = [f"def f{n}(self):\n    for x in y:\n        return self.x[{n}]\n\n\n" for n in range(50)]
LEARNED = tokenizer.train(TEXTS, vocabulary_size=300)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert LEARNED.decode(LEARNED.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("piece", ["\n    ", "\n        ", "\n\n\n"])
def test_a_line_end_with_its_indentation_is_one_token(piece: str) -> None:
    assert len(tokenizer.train(TEXTS, vocabulary_size=400).encode(f"x{piece}y").tokens) == 3


def test_a_digit_is_one_token() -> None:
    assert LEARNED.encode("20252025").tokens == list("20252025")


def test_the_same_texts_give_the_same_tokenizer() -> None:
    assert tokenizer.train(TEXTS, vocabulary_size=300).to_str() == LEARNED.to_str()


def test_end_of_text_and_padding_are_different_tokens() -> None:
    assert [LEARNED.token_to_id(token) for token in (tokenizer.END_OF_TEXT, tokenizer.PADDING)] == [0, 1]


def test_transformers_reads_what_was_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(LEARNED, tmp_path, context_length=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.pad_token) == (tokenizer.END_OF_TEXT, tokenizer.PADDING)
    assert (loaded.bos_token, loaded.unk_token, loaded.model_max_length) == (None, None, 64)
    assert loaded("def f1(self):").input_ids == LEARNED.encode("def f1(self):").ids


def test_held_out_modules_take_few_tokens(modules: list[Module]) -> None:
    learned = tokenizer.train(str(row["completion"]) for row in pretraining_rows(modules))
    held_out = [module.text for module in modules if module.split != TRAIN]
    assert learned.get_vocab_size() == 4096
    assert tokenizer.bytes_per_token(learned, held_out) > 3.3
