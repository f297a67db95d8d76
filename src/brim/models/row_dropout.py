"""Adapters' dropout, drawn for each row by itself: what is dropped does not depend on the rows that go along with it.

Legend: B rows, T tokens of the longest, D features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from brim.errors import ModelError, Problem

_WORD = 1 << 64
_PARTS = 1 << 16  # of a probability: a random number has 16 bits, four of them in an int64
_LOWEST = -(1 << 15)


class RowDropout:
    """The dropout of all of a model's adapter layers. Which rows it is for is told by `of_rows`."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._rows: _Rows | None = None
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def of_rows(self, keys: Sequence[int], lengths: Sequence[int], *, step: int) -> Iterator[None]:
        """The rows of a micro-batch, for its forward and its backward pass, which may compute activations once more.

        keys: what each row is known by, whatever goes along with it. lengths: tokens without padding.
        """
        start = _mixed(_mixed(self._seed) ^ step)
        self._rows = _Rows(seeds=[_mixed(start ^ int(key)) for key in keys], lengths=[int(each) for each in lengths])
        try:
            yield
        finally:
            self._rows = None

    def kept(self, x: Tensor, layer: _LayerDropout) -> Tensor:
        """[B, T, D] bool: what a layer keeps of its input. Padding is kept or dropped, always the same."""
        rows = self._rows
        assert rows is not None, "the rows are told before the forward pass (RowDropout.of_rows)"
        if x.ndim != 3 or x.shape[:2] != (len(rows.lengths), max(rows.lengths)):
            raise ModelError(_not_by_row(layer.name, x, rows))
        num_features = x.shape[2]
        random = torch.zeros((*x.shape[:2], -(-num_features // 4)), dtype=torch.int64, device=x.device)
        generator = self._generator(x.device)
        for row, seed, length in zip(random, rows.seeds, rows.lengths, strict=True):
            generator.manual_seed(_mixed(seed ^ layer.seed))
            row[:length].random_(-(1 << 63), None, generator=generator)  # as many for a row as it has tokens
        return random.view(torch.int16)[..., :num_features] >= _LOWEST + layer.num_dropped

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device]


def drop_by_row(model: nn.Module, *, seed: int) -> RowDropout | None:
    """Let a model's LoRA layers draw their dropout by row; None where they have none. The base's own stays as it is."""
    from peft.tuners.lora import LoraLayer

    dropout = RowDropout(seed=seed)
    found = False
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for adapter, each in layer.lora_dropout.items():
            if isinstance(each, nn.Dropout) and each.p > 0:
                by_row = _LayerDropout(each.p, name=f"{name}.{adapter}", dropout=dropout)
                layer.lora_dropout[adapter] = by_row.train(each.training)
                found = True
    return dropout if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    seeds: list[int]
    lengths: list[int]


class _LayerDropout(nn.Module):
    """nn.Dropout, with masks by row."""

    def __init__(self, p: float, *, name: str, dropout: RowDropout) -> None:
        super().__init__()
        self.name = name
        self.num_dropped = min(round(p * _PARTS), _PARTS - 1)  # of _PARTS
        self.seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        self._scale = _PARTS / (_PARTS - self.num_dropped)
        self._dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return (x * self._dropout.kept(x, self)).mul_(self._scale)


def _mixed(number: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): 64 bits that look random, the same on every machine."""
    number = (number + 0x9E3779B97F4A7C15) % _WORD
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % _WORD
    return number ^ (number >> 31)


def _not_by_row(name: str, x: Tensor, rows: _Rows) -> Problem:
    return Problem(
        what=f"trainer.dropout_by_row: the adapter's layer {name} sees {list(x.shape)}, not rows of tokens",
        expected=f"{len(rows.lengths)} × {max(rows.lengths)} × features: rows × tokens × features",
        fix="set trainer.dropout_by_row: false or adapter.dropout: 0, or leave the layer out of adapter.target_modules",
    )
