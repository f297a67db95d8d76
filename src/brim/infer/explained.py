"""What transformers and torch say of settings and scores, as brim says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brim.errors import BrimError, InputError, Problem


@contextmanager
def explained() -> Iterator[None]:
    """Raises InputError for settings that transformers refuses, BrimError for scores that are not finite."""
    try:
        yield
    except ValueError as error:
        raise InputError(
            Problem(
                what=f"transformers cannot generate with these settings: {' '.join(str(error).split())}",
                where="generation",
                fix="change the keys that it names",
            )
        ) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise BrimError(
            Problem(
                what="the probabilities of the next token are not finite",
                where="generation",
                fix="raise generation.temperature, or check that the model's weights are whole",
            )
        ) from error
