"""What is decided before texts are generated: how many rows run together, what that takes, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from brim.infer.cache_costs import CacheCosts
from brim.infer.cache_shape import CacheShape
from brim.infer.room import FixedRoom, MemoryRoom, Room
from brim.planning.budget import Budget
from brim.planning.lengths import LengthSummary
from brim.planning.plan import AMPLE_SHARE

Source: TypeAlias = Literal["traced", "closed form", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """Rows that run together from some point of the job on, the longest prompts first."""

    first_row: int  # by length
    rows: int
    columns: int  # that the cache has for each: the longest prompt, and the response but for its last token
    peak_bytes: int  # allocated

    def cache_shape(self, costs: CacheCosts) -> CacheShape:
        """The cache, and as many prompts as pass together."""
        tokens = max(self.columns - costs.response_columns, 1)
        return CacheShape(
            rows=self.rows,
            columns=self.columns,
            prompts=int(costs.prompts_of_pass(self.rows, tokens)),
            prompt_tokens=tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """Of one job."""

    budget: Budget
    prompts: LengthSummary
    max_new_tokens: int
    num_beams: int
    costs: CacheCosts | None  # None: the architecture cannot be traced
    source: Source  # of the costs
    cap_bytes: int  # that may be allocated
    fixed_rows: int | None  # where the configuration or the caller says so
    most_rows: int  # more bring nothing, or are not there
    memory_rows: int | None  # as many of the longest as there is memory for; None: not known
    rows_reason: str
    prefill_tokens: int
    prefill_reason: str
    shapes: tuple[PlannedRows, ...]  # at the start, and as prompts become shorter
    total_bytes: int | None  # at the peak, with what lies outside PyTorch and what its allocator holds beyond
    fits: bool  # the longest prompt alone, at least; a number by hand: so many of them
    seconds: float | None  # estimated of the passes alone, were every response as long as it may be
    engine: str
    engine_reason: str
    proof: str = ""  # what was tried of it
    would_take: int | None = None  # rows, were their number not given
    would_take_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """At the start."""
        return self.shapes[0].rows

    @property
    def rows_at_most(self) -> int:
        """Over the whole job."""
        return max(shape.rows for shape in self.shapes)

    @property
    def uncorrected_bytes(self) -> int:
        """Allocated at the peak of the first rows, as it was predicted before anything was measured."""
        assert self.costs is not None, "without costs nothing is predicted"
        first = self.shapes[0]
        return round(float(replace(self.costs, scale=1.0).peak_bytes(first.rows, first.columns)))

    @property
    def is_ample(self) -> bool:
        """Whether there is so much more than it needs that no prediction is off by enough to matter."""
        return self.total_bytes is not None and self.total_bytes <= AMPLE_SHARE * self.budget.limit_bytes

    def room(self) -> Room:
        """A new one, for one run of an engine."""
        if self.fixed_rows is not None or self.costs is None:
            return FixedRoom(self.rows, prefill_tokens=self.prefill_tokens)
        return MemoryRoom(self.costs, cap_bytes=self.cap_bytes, most_rows=self.most_rows)

    def with_engine(self, name: str, reason: str) -> GenerationPlan:
        """The plan, run by that engine."""
        return replace(self, engine=name, engine_reason=reason)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, but for the costs."""
        return {name: value for name, value in asdict(self).items() if name != "costs"}
