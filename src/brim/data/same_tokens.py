"""Whether a base model reads the tokens that an adapter was trained on: a base of the same shapes can have others."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from brim.data.tokenizer_faults import tokenizer_errors
from brim.errors import InputError, Problem
from brim.models.folder import ModelFolder


def require_same_tokens(trained: Path, base: ModelFolder) -> None:
    """Raise InputError when a token of the trained model's folder has another number in the base, or none.

    A base that has more tokens will do. Folders without tokenizer.json are not looked at.
    """
    ours, theirs = trained / "tokenizer.json", base.tokenizer_file
    if theirs is None or not ours.is_file() or ours.read_bytes() == theirs.read_bytes():
        return
    numbers = _numbers(theirs)
    for token, number in sorted(_numbers(ours).items(), key=lambda each: each[1]):
        if numbers.get(token) != number:
            there = f"is {numbers[token]:,}" if token in numbers else "is missing"
            raise InputError(
                Problem(
                    what=f"this base model has other tokens than the run: {token!r} {there} there and {number:,} here",
                    where=base.name,
                    expected="the base that the run was trained on",
                    fix="name that one with base_model=…",
                )
            )


def _numbers(file: Path) -> dict[str, int]:
    with tokenizer_errors(file):
        return Tokenizer.from_file(str(file)).get_vocab()
