"""Masks from counters: against the published generator, in any layout."""

import pytest
import torch
from torch import nn

from brim.models.dropout import keep_mask, mask_of

WORD = 1 << 64


def splitmix64(state):
    """Yield numbers as Steele, Lea and Flood's reference does (java.util.SplittableRandom, 2014)."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % WORD
        number = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        number = (number ^ (number >> 27)) * 0x94D049BB133111EB % WORD
        yield number ^ (number >> 31)


def finalized(number):
    """What SplitMix64 makes of a state."""
    return next(splitmix64((number - 0x9E3779B97F4A7C15) % WORD))


@pytest.mark.parametrize("num_features", [1, 4, 11])
def test_a_token_has_splitmixs_numbers_from_its_row_its_layer_and_its_position(num_features):
    layer, num_dropped = 2**64 - 12345, 20_000
    seeds, positions = [0, -1, 2**62 + 7, -(2**63)], [0, 5, 6, 2**20]
    for seed, position in zip(seeds, positions, strict=True):
        mask = keep_mask(
            torch.tensor([seed]),
            torch.tensor([position]),
            layer=layer,
            num_features=num_features,
            num_dropped=num_dropped,
        )
        numbers = splitmix64(finalized((finalized((seed % WORD) ^ layer) + position) % WORD))
        parts = [part for _, number in zip(range(3), numbers, strict=False) for part in number.to_bytes(8, "little")]
        words = [low + 256 * (high ^ 0x80) for low, high in zip(parts[::2], parts[1::2], strict=True)]  # from the least
        assert mask.tolist() == [[word >= num_dropped for word in words[:num_features]]]


def test_a_tokens_mask_is_the_same_padded_packed_or_alone():
    seeds, lengths = torch.tensor([7, -(2**60), 3]), [4, 9, 1]
    of_tokens = torch.cat([seed.repeat(length) for seed, length in zip(seeds, lengths, strict=True)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    settings = {"layer": 99, "num_features": 33, "num_dropped": 2**15}
    packed = keep_mask(of_tokens, positions, **settings)
    padded = keep_mask(seeds.repeat_interleave(9), torch.arange(9).repeat(3), **settings).view(3, 9, 33)
    assert torch.equal(packed, torch.cat([padded[row, :length] for row, length in enumerate(lengths)]))
    alone = [keep_mask(seed[None], at[None], **settings) for seed, at in zip(of_tokens, positions, strict=True)]
    assert torch.equal(packed, torch.cat(alone))


@pytest.mark.parametrize("shape", [(3, 64), (5, 7), (1, 1)])
def test_a_drawn_mask_comes_back_from_its_bits(shape):
    mask, _ = mask_of(nn.Dropout(0.5), torch.empty(shape))
    drawn, held = mask.draw(torch.empty(shape, dtype=torch.bfloat16))
    assert held.nbytes == -(-drawn.numel() // 8)
    assert torch.equal(mask.again(torch.empty(shape), held), drawn)
