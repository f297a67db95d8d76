"""Keys and values of one row, kept from one response to the next: what a prompt has in common with it is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from torch import Tensor

from brim.infer.passes import Passes

_HEADROOM = 2  # so that a conversation is read anew only each time that it has become twice as long


class KeptCache:
    """Reads prompts and writes tokens, for one row. Not for several responses at the same time.

    most_columns: that the model's context allows; None: no limit. Its memory is given back by `clear`, and when a pass
    raises.
    """

    def __init__(self, *, most_columns: int | None = None) -> None:
        self._most_columns = most_columns
        self._passes: Passes | None = None
        self._tokens: list[int] = []  # whose keys and values are there

    def read(self, prompt: Sequence[int], *, columns: int, begin: Callable[[int], Passes]) -> Tensor:
        """Logits [1, V] of what follows the prompt. columns: that it and its response need; begin: makes so many."""
        num_known = min(_num_in_common(self._tokens, prompt), len(prompt) - 1)  # the last token has to be read
        if self._passes is not None and num_known and columns <= self._passes.cache.columns:
            with self._pass() as passes:
                passes.skip_to(num_known)
                logits = passes.extend(prompt[num_known:])
        else:
            self.clear()
            roomy = _HEADROOM * columns if self._most_columns is None else min(_HEADROOM * columns, self._most_columns)
            self._passes = begin(max(roomy, columns))
            with self._pass() as passes:
                passes.lay_out(columns=passes.cache.columns, end=len(prompt))
                logits = passes.prefill([prompt])
        self._tokens = list(prompt)
        return logits

    def write(self, token: int) -> Tensor:
        """Logits [1, V] of what follows this token, which follows the others."""
        with self._pass() as passes:
            logits = passes.decode([token])
        self._tokens.append(token)
        return logits

    def clear(self) -> None:
        """Give the memory back."""
        if self._passes is not None:
            self._passes.cache.layers.clear()  # at once, even where a traceback still holds the passes
        self._passes, self._tokens = None, []

    @contextmanager
    def _pass(self) -> Iterator[Passes]:
        assert self._passes is not None, "a prompt has been read"
        try:
            yield self._passes
        except BaseException:  # Ctrl-C, too: what is half written is no use
            self.clear()
            raise


def _num_in_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
