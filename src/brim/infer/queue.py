"""Prompts that wait for their response, the longest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brim.data import TokenRows
from brim.infer.next_token import Writing
from brim.infer.room import Room
from brim.infer.rows_at_once import longest_first

_LOOKED_AT = (0.0, 0.25, 0.5, 0.75)  # of the prompts, in their order: where the cache may hold the most


class Queue:
    """Rows by the columns that they need, and how long responses have been so far."""

    def __init__(self, prompts: TokenRows, *, max_new_tokens: int) -> None:
        self._prompts, self._max_new_tokens = prompts, max_new_tokens
        self._order, self._lengths = longest_first(prompts), prompts.lengths
        self._next = 0  # in the order
        self._returned: list[Writing] = []  # the longest prompt first
        self._num_finished = self._sum_tokens = 0

    def __len__(self) -> int:
        return len(self._order) - self._next + len(self._returned)

    @property
    def response_tokens(self) -> float:
        """Of a response, in the mean; before any has ended, as many as there may be."""
        return (self._sum_tokens + self._max_new_tokens) / (self._num_finished + 1)

    def take(self, count: int) -> list[Writing]:
        """The longest `count` rows that wait, or all."""
        return [self._pop() for _ in range(min(count, len(self)))]

    def give_back(self, rows: Sequence[Writing]) -> None:
        """Rows that go on later, with what they have."""
        self._returned = sorted([*self._returned, *rows], key=lambda row: -len(row.prompt))

    def finish(self, row: Writing) -> None:
        """The row has its response."""
        self._num_finished += 1
        self._sum_tokens += len(row.generated)

    def columns(self, active: Sequence[Writing] = ()) -> int:
        """That a cache must have for these rows and for the next one that waits."""
        waiting = [self._longest_waiting()] if len(self) else []
        return self._needed(max([*waiting, *(len(row.prompt) for row in active)]))

    def first_shape(self, room: Room) -> tuple[int, int, int]:
        """Rows, columns and cells of a cache to begin with.

        cells: the most that rows × columns will be: where prompts become shorter, more of them fit.
        """
        columns = self.columns()
        rows = min(room.rows(columns), len(self))
        cells = rows * columns
        for share in _LOOKED_AT:
            position = self._next + int(share * (len(self._order) - self._next))
            if position < len(self._order):
                shorter = self._needed(int(self._lengths[self._order[position]]))
                cells = max(cells, min(room.rows(shorter), len(self._order) - position) * shorter)
        if room.rows(columns, cells=cells) < rows:  # beside so many cells, the longest prompts would not find room
            cells = rows * columns
        return min(room.rows(columns, cells=cells), cells // columns), columns, cells

    def _needed(self, prompt_tokens: int) -> int:
        """The last token of a response is not read."""
        return prompt_tokens + self._max_new_tokens - 1

    def _longest_waiting(self) -> int:
        fresh = int(self._lengths[self._order[self._next]]) if self._next < len(self._order) else 0
        return max(fresh, len(self._returned[0].prompt) if self._returned else 0)

    def _pop(self) -> Writing:
        if self._returned and len(self._returned[0].prompt) >= self._longest_waiting():
            return self._returned.pop(0)
        position = int(self._order[self._next])
        self._next += 1
        row = self._prompts[position]
        ids = np.asarray(row.input_ids)[: row.num_prompt_tokens]
        return Writing(position=position, key=int(row.key), prompt=ids.tolist())
