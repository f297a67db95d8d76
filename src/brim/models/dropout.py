"""Draw an adapter's dropout, so that it can be drawn again: from PyTorch's generator, or by row.

An adapter's dropout is drawn for each row by itself where that is asked for, so that it does not depend on the rows
beside it, nor on the layout of the batch.
Legend: B rows, T tokens of the longest, N tokens, D features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from brim.errors import ModelError
from brim.models.packing import PackedRows


class Mask(Protocol):
    """Find twice what is kept of an input [N, D]: 1 where it is, else 0, in uint8, which multiplies fastest."""

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mask [N, D], and what must be held for it to be found again; None: nothing."""

    def again(self, x: Tensor, held: Tensor | None) -> Tensor:
        """Return the same mask, in the backward pass."""


def mask_of(dropout: nn.Module, x: Tensor) -> tuple[Mask | None, float]:
    """Return what a layer's dropout keeps of its input, None for all of it, and what the rest is multiplied by."""
    if isinstance(dropout, RowDropoutLayer):
        return (dropout.mask_of(x), dropout.scale) if dropout.training else (None, 1.0)
    if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0:
        return _DrawnMask(p=dropout.p), 1 / (1 - dropout.p)
    return None, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnMask:
    """Draw a mask from PyTorch's generator, and hold it in bits: to draw it again takes a CPU as long as a product.

    On a CPU it is the one that nn.Dropout would draw, so that runs begun with that go on as they would have.
    """

    p: float

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.p).view(torch.uint8)
        return mask, _packed(mask)

    def again(self, x: Tensor, held: Tensor | None) -> Tensor:
        assert held is not None, "it was drawn"
        return _unpacked(held, x.numel()).view(x.shape)


# Eight bytes of 0 or 1 are a word. Times the first, its upper byte has them as bits, the lowest byte as the lowest one.
# The second repeats a byte, and of the third each byte has the bit of its place. With the fourth, a byte that is not 0
# gets its upper bit.
_GATHER, _REPEAT, _EACH_BIT, _CARRY = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201, 0x7F7F7F7F7F7F7F7F


def _packed(mask: Tensor) -> Tensor:
    """Return a mask's bits, eight in a byte."""
    flat, num_missing = mask.flatten(), -mask.numel() % 8
    words = (pad(flat, (0, num_missing)) if num_missing else flat).view(torch.int64)
    return (words * _GATHER).bitwise_right_shift_(56).to(torch.uint8)


def _unpacked(bits: Tensor, num_elements: int) -> Tensor:
    """Return the mask [num_elements] that was packed."""
    words = (bits.to(torch.int64) * _REPEAT).bitwise_and_(_signed(_EACH_BIT))
    words.add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_REPEAT)  # each byte 0 or 1
    return words.view(torch.uint8)[:num_elements]


_WORD = 1 << 64


_PARTS = 1 << 16  # of a probability: a random number has 16 bits, four of them in an int64


_LOWEST = -(1 << 15)


# SplitMix64 (Steele, Lea, Flood 2014): the step between two numbers, and the factors that mix one.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def keep_mask(seeds: Tensor, positions: Tensor, *, layer: int, num_features: int, num_dropped: int) -> Tensor:
    """Return what a layer keeps of tokens: [N, num_features] bool.

    It depends on nothing but the arguments, whatever the device and the layout: padded, packed, recomputed.

    seeds: of each token's row, [N] int64. positions: of each token in its row, [N] int64. layer: its seed.
    num_dropped: how many of 65,536 are dropped.
    """
    start = _mix_(_mix_(seeds ^ _signed(layer)) + positions)
    steps = torch.arange(1, -(-num_features // 4) + 1, device=seeds.device) * _signed(_STEP)
    random = _mix_(start[:, None] + steps)
    return random.view(torch.int16)[:, :num_features] >= _LOWEST + num_dropped


def _mix_(numbers: Tensor) -> Tensor:
    """Mix int64 numbers in place as `_mixed` does after its step."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        # A shift of int64 repeats the sign, which is taken off.
        numbers ^= (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            numbers *= _signed(factor)
    return numbers


def _mixed(number: int) -> int:
    """Run one step of SplitMix64: 64 bits that look random, the same on every machine."""
    number = (number + _STEP) % _WORD
    number = (number ^ (number >> 30)) * _FIRST % _WORD
    number = (number ^ (number >> 27)) * _SECOND % _WORD
    return number ^ (number >> 31)


def _signed(number: int) -> int:
    """Return the int64 of the same 64 bits."""
    return number - _WORD if number >= _WORD // 2 else number


class RowDropout:
    """Hold the rows that the dropout of all of a model's adapter layers is drawn for; `of_rows` sets them."""

    masks = "splitmix64"  # how they are drawn, by `keep_mask`: a run that was begun otherwise cannot go on

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._rows: _Rows | None = None

    @contextmanager
    def of_rows(
        self, keys: Sequence[int], lengths: Sequence[int], *, step: int, packed: PackedRows | None = None
    ) -> Iterator[None]:
        """Set the rows of a micro-batch, for its forward and its backward pass, which may recompute activations.

        keys: identify each row, whatever is beside it in a batch. lengths: tokens without padding. packed: where the
        rows lie in one sequence; None: they are padded.
        """
        start = _mixed(_mixed(self._seed) ^ step)
        seeds = [_signed(_mixed(start ^ int(key))) for key in keys]
        self._rows = _Rows(seeds=seeds, longest=max(map(int, lengths)), packed=packed)
        try:
            yield
        finally:
            self._rows = None

    def tokens_of(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        """Return the seeds and the positions of a layer's input [B, T, D], padding's too: [B · T] each.

        Packed rows are one of T tokens.
        """
        rows = self._rows
        assert rows is not None, "the rows are set before the forward pass (RowDropout.of_rows)"
        if x.ndim != 3 or x.shape[:2] != rows.shape:
            raise _not_by_row(layer, x, rows)
        if rows.tokens is None or rows.tokens[0].device != x.device:
            rows.tokens = rows.on(x.device)
        return rows.tokens


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
                by_row = RowDropoutLayer(each.p, name=f"{name}.{adapter}", dropout=dropout)
                layer.lora_dropout[adapter] = by_row.train(each.training)
                found = True
    return dropout if found else None


@dataclass(slots=True, kw_only=True)
class _Rows:
    seeds: list[int]
    longest: int  # tokens
    packed: PackedRows | None = None
    tokens: tuple[Tensor, Tensor] | None = None  # seeds and positions, where a layer has asked for them

    @property
    def shape(self) -> tuple[int, int]:
        """Return B and T of the layers' inputs."""
        return (len(self.seeds), self.longest) if self.packed is None else (1, sum(self.packed.lengths))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.packed is not None:
            of_rows = self.seeds + [0] * (len(self.packed.lengths) - len(self.seeds))  # what fills up is never learned
            of_tokens = torch.tensor(np.repeat(of_rows, self.packed.lengths), pin_memory=device.type == "cuda")
            return of_tokens.to(device, non_blocking=True), self.packed.position_ids[0]
        seeds = torch.tensor(self.seeds, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        positions = torch.arange(self.longest, device=device).repeat(len(self.seeds))
        return seeds.repeat_interleave(self.longest, output_size=len(positions)), positions


class RowDropoutLayer(nn.Module):
    """Replace a layer's nn.Dropout, with masks by row."""

    def __init__(self, p: float, *, name: str, dropout: RowDropout) -> None:
        super().__init__()
        num_dropped = min(round(p * _PARTS), _PARTS - 1)
        self.scale = _PARTS / (_PARTS - num_dropped)
        self._name, self._dropout, self._num_dropped = name, dropout, num_dropped
        self._seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

    def mask_of(self, x: Tensor) -> Mask:
        """Return the mask of an input [B, T, D]."""
        seeds, positions = self._dropout.tokens_of(x, self._name)
        return _RowMask(seeds=seeds, positions=positions, layer=self._seed, num_dropped=self._num_dropped)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask, _ = self.mask_of(x).draw(x.flatten(0, 1))
        return (x * mask.view(x.shape)).mul_(self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowMask:
    """Compute a mask from counters, and once more afterwards."""

    seeds: Tensor
    positions: Tensor
    layer: int
    num_dropped: int

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.again(x, None), None

    def again(self, x: Tensor, held: Tensor | None) -> Tensor:
        kept = keep_mask(
            self.seeds, self.positions, layer=self.layer, num_features=x.shape[-1], num_dropped=self.num_dropped
        )
        return kept.view(torch.uint8)


def _not_by_row(name: str, x: Tensor, rows: _Rows) -> ModelError:
    return ModelError(
        what=f"trainer.dropout_by_row: the adapter's layer {name} sees {list(x.shape)}, not rows of tokens",
        expected=f"{rows.shape[0]} × {rows.shape[1]} × features: rows × tokens × features",
        fix="set trainer.dropout_by_row: false or adapter.dropout: 0, or leave the layer out of adapter.target_modules",
    )
