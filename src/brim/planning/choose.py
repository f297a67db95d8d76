"""Which of the ways that fit is taken, and why."""

from __future__ import annotations

from collections.abc import Sequence

from brim.planning.plan import Candidate, Way
from brim.units import format_seconds

# As they are preferred: recomputing costs time and saves memory, whole logits take memory and save none.
WAYS = (
    Way(gradient_checkpointing=False, chunked_loss=True),
    Way(gradient_checkpointing=False, chunked_loss=False),
    Way(gradient_checkpointing=True, chunked_loss=True),
    Way(gradient_checkpointing=True, chunked_loss=False),
)
_WORTH = 0.02  # a later way must be faster by this share: times are not known better


def ways(*, checkpointing: bool | None, chunked: bool | None) -> list[Way]:
    """The ways that the configuration leaves open, best first. None: it says `auto`."""
    return [
        way
        for way in WAYS
        if checkpointing in (None, way.gradient_checkpointing) and chunked in (None, way.chunked_loss)
    ]


def choose(candidates: Sequence[Candidate], *, has_more: bool = False) -> tuple[Candidate | None, str]:
    """The fastest that fits, and why; of ways as fast as each other the one that is preferred.

    candidates: in the order of preference. None where none fits. has_more: there are further ways, which are not
    looked at, since the last of these would not be faster with more memory.
    """
    best: Candidate | None = None
    for each in candidates:
        if each.fits and (best is None or _is_faster(each, best)):
            best = each
    if best is None:
        return None, "; ".join(f"{describe(each.way)}: {each.reason}" for each in candidates)
    return best, _why(best, candidates, has_more=has_more)


def describe(way: Way) -> str:
    """The way in words."""
    loss = "loss in chunks" if way.chunked_loss else "whole logits"
    return f"{'checkpointing' if way.gradient_checkpointing else 'no checkpointing'}, {loss}"


def _is_faster(one: Candidate, other: Candidate) -> bool:
    assert one.seconds_per_epoch is not None, "it fits"
    assert other.seconds_per_epoch is not None, "it fits"
    return one.seconds_per_epoch < other.seconds_per_epoch * (1 - _WORTH)


def _why(best: Candidate, candidates: Sequence[Candidate], *, has_more: bool) -> str:
    others = [each for each in candidates if each is not best]
    fitting = [each for each in others if each.seconds_per_epoch is not None]
    if not others:
        return "it fits, and more memory would not make it faster" if has_more else "the only way that is left open"
    if not fitting:
        return f"the only way that fits: {others[0].reason}"
    assert best.seconds_per_epoch is not None, "it fits"
    second = min(fitting, key=lambda each: each.seconds_per_epoch or 0.0)
    assert second.seconds_per_epoch is not None, "filtered above"
    told = (
        f"an epoch takes {format_seconds(best.seconds_per_epoch)}, {describe(second.way)} "
        f"{format_seconds(second.seconds_per_epoch)}"
    )
    is_tie = second.seconds_per_epoch < best.seconds_per_epoch
    return f"{told}, which is no difference that is known" if is_tie else told
