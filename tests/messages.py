"""What a message must say: the class of its error, its place and the decisive words in their order, not its prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from brim.errors import BrimError

GAP = " … "  # stands for any text between two decisive words


def says(text: str, words: str) -> bool:
    """Tell whether a text begins with the words, of which ` … ` may stand for anything between them.

    Words that begin with `… ` may stand anywhere.
    """
    anywhere = words.startswith("… ")
    pattern = ".*?".join(re.escape(part) for part in words.removeprefix("… ").split(GAP))
    return (re.search if anywhere else re.match)(pattern, text, re.DOTALL) is not None


@contextmanager
def refused(*words: str, by: type[BrimError] = BrimError) -> Iterator[pytest.ExceptionInfo[BrimError]]:
    """Fail unless what is done is refused with a problem for each of the words, in their order.

    A problem reads as `PLACE: what is wrong`, then a line with what was expected and one with the fix.
    """
    with pytest.raises(by) as caught:
        yield caught
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == len(words), "\n".join(told)
    for text, expected in zip(told, words, strict=True):
        assert says(text, expected), f"{text}\n--- is to say\n{expected}"
