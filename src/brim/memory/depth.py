"""How a model's layers repeat, and which of them are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Which layers stand for which: `head` first ones, blocks of `period` layers, `tail` last ones."""

    num_layers: int  # of the model
    head: int
    period: int
    tail: int

    @property
    def num_recorded(self) -> int:
        """Layers to record: head, two blocks and tail; all where that is no saving."""
        return min(self.num_layers, self.head + 2 * self.period + self.tail)

    @property
    def recorded(self) -> list[int]:
        """The model's layers that are recorded, in order."""
        if self.num_recorded == self.num_layers:
            return list(range(self.num_layers))
        front = self.head + 2 * self.period
        return [*range(front), *range(self.num_layers - self.tail, self.num_layers)]

    def whole(self) -> Depth:
        """The same model, all of whose layers are recorded."""
        return Depth(num_layers=self.num_layers, head=self.num_layers, period=1, tail=0)

    def is_middle(self, layer: int) -> bool:
        """Whether a layer of the model is like one of either recorded block."""
        return self.num_recorded < self.num_layers and self.head <= layer < self.num_layers - self.tail

    def template(self, layer: int) -> int:
        """The recorded layer that a layer of the model is like."""
        if self.num_recorded == self.num_layers or layer < self.head:
            return layer
        if layer >= self.num_layers - self.tail:
            return self.num_recorded - (self.num_layers - layer)
        return self.head + self.period + (layer - self.head) % self.period


def depth_of(kinds: Sequence[Any]) -> Depth:
    """How the layers repeat. kinds: one value a layer; layers of equal value are alike.

    The first layer follows the embeddings and the last precedes the head, so neither is ever a middle one. Nor is the
    first one of its kind: what all layers of a kind share is let go of there by the backward pass.
    """
    num_layers = len(kinds)
    first_ones = max((kinds.index(kind) for kind in kinds), default=0) + 1
    for period in range(1, num_layers + 1):
        breaks = [i for i in range(num_layers - period) if kinds[i] != kinds[i + period]]
        head = max(first_ones, breaks[-1] + 1 if breaks else 0)
        tail = (num_layers - head - 1) % period + 1
        if head + 2 * period + tail < num_layers:
            return Depth(num_layers=num_layers, head=head, period=period, tail=tail)
    return Depth(num_layers=num_layers, head=num_layers, period=1, tail=0)
