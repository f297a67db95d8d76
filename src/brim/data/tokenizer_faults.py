"""What is wrong with a tokenizer, or between it and the model: told as the folder's fault, with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brim.errors import ModelError, Problem

COPY = "copy tokenizer.json from the original model again"


@contextmanager
def tokenizer_errors(file: Path) -> Iterator[None]:
    """Turn whatever `tokenizers` raises into a ModelError: it raises bare exceptions, and panics over some files."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = " ".join(str(error).split())
        raise ModelError(Problem(what=f"the tokenizer cannot be read: {words}", where=str(file), fix=COPY)) from None


def vocabulary_of(config: dict[str, Any]) -> int | None:
    """Tokens that the model has embeddings for, from its config.json; None where it does not say."""
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        if isinstance(section.get("vocab_size"), int):
            return int(section["vocab_size"])
    return None


def require_within(encoded: Sequence[Sequence[int]], vocabulary: int | None, file: Path) -> None:
    """Raise ModelError for token ids that the model has no embedding for."""
    if vocabulary is None:
        return
    highest = max((max(ids) for ids in encoded if ids), default=0)
    if highest >= vocabulary:
        raise ModelError(beyond(f"the tokenizer makes the token {highest:,}", vocabulary, file))


def beyond(what: str, vocabulary: int, file: Path) -> Problem:
    """A token that the model does not have."""
    return Problem(
        what=f"{what}, and the base model has only tokens 0 to {vocabulary - 1:,}",
        where=str(file),
        expected="tokens below vocab_size in config.json",
        fix="use the tokenizer that came with the model, or give the model room (resize_token_embeddings)",
    )
