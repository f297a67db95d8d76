"""What is decided before a run starts: the candidates, the one that was chosen, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from brim.batching.costs import Costs
from brim.planning.budget import Budget
from brim.planning.lengths import LengthSummary

BoundBy: TypeAlias = Literal["arithmetic", "memory traffic", "launches"]
TimeSource: TypeAlias = Literal["measured", "estimated"]
AMPLE_SHARE = 0.5  # of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a candidate sets."""

    gradient_checkpointing: bool
    chunked_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run, and what it would cost."""

    way: Way
    fits: bool
    reason: str  # why it does not fit, or what it costs, in one line with numbers
    single_row_bytes: int  # total (reserved and outside) for the longest row alone
    total_bytes: int | None  # for the largest micro-batch of the plan; None: it does not fit
    cap_bytes: int  # allocated bytes that a micro-batch may reach
    cap_binds: bool  # with more memory the cut would be another
    widest: tuple[int, int] | None  # (rows, tokens) of the micro-batch that takes the most
    micro_batches_per_step: float | None  # on average
    padding: float | None  # padded over real tokens
    seconds_per_epoch: float | None  # forward and backward passes and updates
    bound_by: BoundBy | None
    time_source: TimeSource
    too_long: tuple[int, ...]  # positions of the rows that do not fit alone
    longest_that_fits: int | None  # tokens of a row that fits alone; None: no row does
    advice: tuple[str, ...] = ()  # what would make it faster, by what it is bound by


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRow:
    """A row that does not fit alone, whichever way the run goes."""

    key: int  # 0-based row number in the source
    num_tokens: int
    total_bytes: int  # reserved and outside, alone, in the way that takes the least


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The plan of one training run."""

    budget: Budget
    lengths: LengthSummary
    effective_batch_size: int
    total_steps: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None  # None: none fits
    reason: str  # why it is this one, or why it is none
    costs: Costs | None  # of the chosen candidate
    seconds: float | None  # the whole run without evaluation
    advice: tuple[str, ...]  # what would help, and promises that do not hold (dropout)
    from_cache: bool
    state_bytes: int = 0  # of the optimizer, from its first step on; there in every micro-batch after it
    helps: tuple[str, ...] = ()  # where none fits: what would take less, each with its prediction
    too_long: tuple[LongRow, ...] = ()  # where none fits: the rows that are why, in the order of the source

    @property
    def is_ample(self) -> bool:
        """Whether there is so much more than it needs that no prediction is off by enough to matter."""
        if self.chosen is None or self.chosen.total_bytes is None:
            return False
        return self.chosen.total_bytes <= AMPLE_SHARE * self.budget.limit_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainingPlan:
        """What `as_dict` gave, read back from JSON; of anything else a KeyError, TypeError or ValueError."""
        chosen, costs = saved["chosen"], saved["costs"]
        lengths = saved["lengths"]
        return cls(
            **{
                **saved,
                "budget": Budget(**saved["budget"]),
                "lengths": LengthSummary(**{**lengths, "histogram": tuple(map(tuple, lengths["histogram"]))}),
                "candidates": tuple(map(_candidate, saved["candidates"])),
                "chosen": None if chosen is None else _candidate(chosen),
                "costs": None if costs is None else Costs.from_dict(costs),
                "advice": tuple(saved["advice"]),
                "helps": tuple(saved["helps"]),
                "too_long": tuple(LongRow(**row) for row in saved["too_long"]),
            }
        )


def _candidate(saved: Mapping[str, Any]) -> Candidate:
    rows_and_tokens = saved["widest"]
    return Candidate(
        **{
            **saved,
            "way": Way(**saved["way"]),
            "widest": None if rows_and_tokens is None else (rows_and_tokens[0], rows_and_tokens[1]),
            "too_long": tuple(saved["too_long"]),
            "advice": tuple(saved["advice"]),
        }
    )
