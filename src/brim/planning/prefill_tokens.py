"""How many tokens of prompts pass together: as many as pay, and few enough that memory is left for rows."""

from __future__ import annotations

from dataclasses import dataclass

from brim.infer.cache_costs import CacheCosts
from brim.planning.pass_times import PassTimes
from brim.units import format_bytes

_SHARE = 0.1  # of what there is beside the weights: what prompts' passes take, no cache can have
_LEAST = 64  # tokens; below it a pass takes as long as one of so many on any device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTokens:
    """A number and its reason."""

    tokens: int
    reason: str


def prefill_tokens(costs: CacheCosts, times: PassTimes, *, cap_bytes: int, longest: int, usual: int) -> PrefillTokens:
    """longest, usual: tokens of a prompt. A prompt that is longer than the number passes alone."""
    pays = times.tokens_that_pay(usual)
    room_bytes = _SHARE * max(cap_bytes - costs.static_bytes, 0)
    tokens = pays
    while tokens > max(_LEAST, longest) and _bytes(costs, tokens, longest) > room_bytes:
        tokens //= 2
    if tokens < pays:
        taken = f"passes over prompts take no more than {_SHARE:.0%} of the memory beside the weights"
        return PrefillTokens(tokens=tokens, reason=f"{taken}, {format_bytes(round(room_bytes))}")
    return PrefillTokens(tokens=tokens, reason="larger passes read prompts hardly faster")


def _bytes(costs: CacheCosts, tokens: int, longest: int) -> float:
    length = min(tokens, longest)
    return costs.scale * float(costs.prefill(max(tokens // length, 1), length))
