"""Hold what is decided before a run starts: the candidates, the one that was chosen, and why.

The lengths of a data set's rows are summarised. The plans of scoring and of a generation are beside that of a
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from pydantic import TypeAdapter

from brim.batching import ByLength, Costs, by_costs
from brim.infer.engines import CacheCosts, CacheShape, FixedRoom, MemoryRoom, Room
from brim.memory import Offload
from brim.memory.devices import Budget
from brim.planning.costs import BoundBy, Shape
from brim.units import format_bytes, format_count, format_seconds

Source: TypeAlias = Literal["traced", "closed form", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """Hold rows that run together from some point of the job on, the longest prompts first."""

    first_row: int  # by length
    rows: int
    columns: int  # that the cache has for each: the longest prompt, and the response but for its last token
    peak_bytes: int  # allocated

    def cache_shape(self, costs: CacheCosts) -> CacheShape:
        """Return the shape of the cache, with as many prompts as pass together."""
        tokens = max(self.columns - costs.response_columns, 1)
        return CacheShape(
            rows=self.rows,
            columns=self.columns,
            prompts=int(costs.prompts_of_pass(self.rows, tokens)),
            prompt_tokens=tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """Hold the plan of one job of generation."""

    budget: Budget
    prompts: LengthSummary
    max_new_tokens: int
    num_beams: int
    costs: CacheCosts | None  # None: the architecture cannot be traced
    source: Source  # of the costs
    cap_bytes: int  # that may be allocated
    fixed_rows: int | None  # where the configuration or the caller says so
    most_rows: int  # more are no faster, or are not there
    memory_rows: int | None  # as many of the longest as fit; None: not known
    rows_reason: str
    prefill_tokens: int
    prefill_reason: str
    shapes: tuple[PlannedRows, ...]  # at the start, and as prompts become shorter
    total_bytes: int | None  # at the peak, with what lies outside PyTorch and what its allocator holds beyond
    fits: bool  # the longest prompt alone, at least; with fixed_rows, so many of them
    seconds: float | None  # estimated for the passes alone, if every response is as long as it may be
    engine: str
    engine_reason: str
    num_members: int = 1  # processes that generate at once; the plan is of one of them
    proof: str = ""  # what was tried of it
    would_take: int | None = None  # rows, if their number were not given
    would_take_reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Return the rows at the start."""
        return self.shapes[0].rows

    @property
    def rows_at_most(self) -> int:
        """Return the most rows of the whole job."""
        return max(shape.rows for shape in self.shapes)

    @property
    def uncorrected_bytes(self) -> int:
        """Return the bytes allocated at the first rows' peak, as predicted before anything was measured."""
        assert self.costs is not None, "without costs nothing is predicted"
        first = self.shapes[0]
        return round(float(replace(self.costs, scale=1.0).peak_bytes(first.rows, first.columns)))

    @property
    def is_ample(self) -> bool:
        """Return whether there is so much more than it needs that no prediction is off by enough to matter."""
        return _is_ample(self.total_bytes, self.budget)

    def room(self) -> Room:
        """Return a new room, for one run of an engine."""
        if self.fixed_rows is not None or self.costs is None:
            return FixedRoom(self.rows, prefill_tokens=self.prefill_tokens)
        return MemoryRoom(self.costs, cap_bytes=self.cap_bytes, most_rows=self.most_rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON, without the costs."""
        return {name: value for name, value in asdict(self).items() if name != "costs"}


TimeSource: TypeAlias = Literal["measured", "estimated"]


AMPLE_SHARE = 0.5  # of the budget


def _is_ample(total_bytes: int | None, budget: Budget) -> bool:
    return total_bytes is not None and total_bytes <= AMPLE_SHARE * budget.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """Stand for the plan of an architecture that cannot be traced."""

    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; so batches are tried out: the longest row alone, then twice as many tokens each time"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """Describe batches for rows that are scored, and the reason for them."""

    budget: Budget
    costs: Costs
    source: Source  # of the costs
    cap_bytes: int  # allocated by a batch, lower where larger ones are no faster; some rows may exceed it alone
    widest: Shape  # rows, tokens
    widest_bytes: int  # allocated
    total_bytes: int  # at the peak, with what lies outside PyTorch and what its allocator holds beyond
    num_batches: int
    padding: float  # padded tokens by real ones
    seconds: float
    num_too_long: int  # rows that do not fit even alone, by the prediction; they are tried
    reason: str
    largest: bool = False  # the fewest batches, then least padding; else least predicted time

    @property
    def is_ample(self) -> bool:
        """Return whether there is so much more than it needs that no prediction is off by enough to matter."""
        return _is_ample(self.total_bytes, self.budget)

    def cutter(self) -> ByLength:
        """Return what divides the rows into batches."""
        return by_costs(self.costs, cap_bytes=self.cap_bytes, largest=self.largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Hold what a candidate sets."""

    gradient_checkpointing: bool | int  # a number: of so many first layers
    chunked_loss: bool
    is_sharded: bool = False  # over the ranks (FSDP); else each rank has the whole model
    offload: Offload = "none"  # to the host; weights, with gradients and states: by FSDP, of one rank, too

    @property
    def recomputes_some(self) -> bool:
        """Return whether some layers alone are recomputed."""
        return not isinstance(self.gradient_checkpointing, bool)

    def __str__(self) -> str:
        loss = "loss in chunks" if self.chunked_loss else "whole logits"
        checkpointing = "checkpointing" if self.gradient_checkpointing else "no checkpointing"
        if self.recomputes_some:
            checkpointing += f" of {self.gradient_checkpointing} layers"
        held = f"{self.offload} on the host, " if self.offload != "none" else "sharded, " if self.is_sharded else ""
        return f"{held}{checkpointing}, {loss}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Hold what each of several ranks sends the others in a strategy, and how fast."""

    num_ranks: int
    link: str  # "NVLink"
    source: str  # of its speed, for people
    bytes_per_s: float
    update_bytes: int  # once a step, when all micro-batches are done: sums of gradients
    round_bytes: int  # beside the passes of each micro-batch: weights gathered, gradients reduced

    @property
    def update_s(self) -> float:
        """Return what the sums of a step take."""
        return self.update_bytes / self.bytes_per_s

    @property
    def round_s(self) -> float:
        """Return the least that a micro-batch takes, since what is sent beside its passes takes so long."""
        return self.round_bytes / self.bytes_per_s

    def bytes_per_step(self, micro_batches: float) -> int:
        """Return what each rank sends in a step of so many micro-batches of all ranks."""
        return self.update_bytes + round(self.round_bytes * micro_batches / self.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Hold what each process keeps in its machine's memory in a strategy, and copies to the device and back."""

    num_bytes: int  # weights and gradients, in blocks that PyTorch pins, and the optimizer's state
    copied_bytes: int  # beside the passes of each micro-batch
    update_bytes: int = 0  # once a step, beside the optimizer's own
    link: str  # "PCIe"
    source: str  # of its speed, for people
    bytes_per_s: float

    @property
    def copied_s(self) -> float:
        """Return what the copies of a micro-batch take, behind which nothing is hidden."""
        return self.copied_bytes / self.bytes_per_s

    @property
    def update_s(self) -> float:
        """Return what the copies of a step take."""
        return self.update_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Hold one strategy, and what it would cost."""

    way: Way
    fits: bool
    reason: str  # why it does not fit, or what it costs, in one line with numbers
    single_row_bytes: int  # total (reserved and outside) for the longest row alone
    total_bytes: int | None = None  # for the largest micro-batch of the plan; None here and below: it does not fit
    cap_bytes: int  # allocated bytes that a micro-batch may reach
    cap_binds: bool  # with more memory the partition would be another
    widest: Shape | None = None  # (rows, tokens) of the micro-batch that takes the most
    micro_batches_per_step: float | None = None  # on average
    padding: float | None = None  # padded over real tokens
    seconds_per_epoch: float | None = None  # forward and backward passes and updates
    bound_by: BoundBy | None = None
    time_source: TimeSource = "estimated"
    too_long: tuple[int, ...] = ()  # positions of the rows that do not fit alone
    longest_that_fits: int | None  # tokens of a row that fits alone; None: no row does
    advice: tuple[str, ...] = ()  # what would make it faster, by what it is bound by
    update_s: float = 0.0  # of seconds_per_epoch, what a step takes beside its passes: sums over ranks, the optimizer
    wire: Wire | None = None  # None: of one process
    host: Host | None = None  # None: all is on the device
    busy_share: float | None = None  # of several ranks: their mean work over the longest, in the passes of a step
    seconds_per_epoch_alone: float | None = None  # of one of these ranks, if it did all of the same work

    @property
    def padding_in_words(self) -> str:
        """Return what padding adds to the real tokens: 1.031 -> "3.1%"; empty where the candidate does not fit."""
        return "" if self.padding is None else f"{100 * (self.padding - 1):.1f}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRow:
    """Hold a row that does not fit alone in any strategy."""

    key: int  # 0-based row number in the source
    num_tokens: int
    total_bytes: int  # reserved and outside, alone, in the strategy that takes the least


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Hold a stretch of the run with one effective batch, and what its steps take.

    Where the batch follows what is measured, it is a size that the batch may have; when is not known.
    """

    size: int  # rows of a step
    micro_batches_per_step: float  # on average
    total_bytes: int  # reserved and outside, for its largest micro-batch, and at least for the longest row alone
    seconds_per_step: float  # forward and backward passes and the update
    number: int | None = None  # from 1; None here and below: as measured while training
    first_sample: int | None = None  # consumed before its first step
    num_samples: int | None = None
    num_tokens: int | None = None  # real ones, by the mean length of the rows; exact at the ends of epochs
    num_steps: int | None = None
    learning_rates: tuple[float, float] | None = None  # of its first and its last step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Hold the plan of one training run."""

    budget: Budget
    lengths: LengthSummary
    effective_batch_size: int  # rows of an update; the most where that moves, for which the candidates are made
    total_steps: int | None  # None: as measured while training, see steps_between
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None  # None: none fits
    reason: str  # why it is this one, or why it is none
    costs: Costs | None  # of the chosen candidate
    seconds: float | None  # the whole run without evaluation; None: nothing fits, or see seconds_between
    advice: tuple[str, ...]  # what would help, and promises that do not hold (dropout)
    from_cache: bool
    state_bytes: int = 0  # of the optimizer, from its first step on; there in every micro-batch after it
    saved_bytes: int = 0  # of a checkpoint: the trained weights and the optimizer's state; 0: not known
    helps: tuple[str, ...] = ()  # where none fits: what would take less, each with its prediction
    too_long: tuple[LongRow, ...] = ()  # where none fits: the rows that are why, in the order of the source
    strategy_reason: str = ""  # why each of several ranks has the whole model, or a part of it
    total_samples: int = 0  # rows that the run consumes, counted with repetition
    smallest_batch_size: int | None = None  # of its updates; None: in plans of older versions, whose batch stands still
    num_phases: int = 1  # stretches of steps of one size, as far as that is known before
    phases: tuple[PhasePlan, ...] = ()  # at most 16 of them, evenly chosen; of what is chosen alone
    steps_between: tuple[int, int] | None = None  # the fewest and the most, where the batch follows what is measured
    seconds_between: tuple[float, float] | None = None  # without evaluation

    def __repr__(self) -> str:
        """Return what is chosen, and what that takes; all else is in the attributes."""
        least = f"{self.smallest_batch_size:,} to " if self.batch_moves else ""
        steps = "steps as measured" if self.total_steps is None else format_count(self.total_steps, "step")
        rows = format_count(self.effective_batch_size, "row")
        head = f"TrainingPlan: {steps}, updates of {least}{rows}, on {self.devices_in_words()}"
        if self.chosen is None or self.chosen.total_bytes is None:
            return "\n  ".join([head, f"nothing fits: {self.reason}", *self.helps])
        taken = f"{format_bytes(self.chosen.total_bytes)} of {format_bytes(self.budget.limit_bytes)}"
        between = self.seconds_between or (self.seconds or 0.0, self.seconds or 0.0)
        time_taken = " to ".join(dict.fromkeys(map(format_seconds, between)))
        num_fit = sum(each.fits for each in self.candidates)
        return "\n  ".join(
            [
                head,
                f"{self.chosen.way}: {taken}, about {time_taken} without evaluation ({self.reason})",
                f"{len(self.candidates)} strategies were looked at (.candidates), {num_fit} fit",
            ]
        )

    @property
    def batch_moves(self) -> bool:
        """Return whether updates have several sizes, apart from the last one of an epoch."""
        return self.smallest_batch_size not in (None, self.effective_batch_size)

    @property
    def is_packed(self) -> bool:
        """Return whether the rows of a micro-batch are one sequence, without padding."""
        return self.costs is not None and self.costs.is_packed

    @property
    def num_ranks(self) -> int:
        """Return how many processes are to train together."""
        wire = self.candidates[0].wire
        return 1 if wire is None else wire.num_ranks

    def devices_in_words(self) -> str:
        """Name the devices: "4 × t4"."""
        return f"{self.num_ranks} × {self.budget.device}" if self.num_ranks > 1 else self.budget.device

    @property
    def steps_per_epoch(self) -> int:
        """Return the updates in one pass over the rows, of the most rows they have; the last takes what is left."""
        return -(-self.lengths.num_rows // self.effective_batch_size)

    @property
    def step_seconds(self) -> float:
        """Return the mean seconds of a step of the most rows; 0 where nothing fits."""
        return ((self.chosen and self.chosen.seconds_per_epoch) or 0.0) / self.steps_per_epoch

    @property
    def step_seconds_alone(self) -> float:
        """Return them for one rank that does all the work, as if it had the memory; 0 for what one process plans."""
        return ((self.chosen and self.chosen.seconds_per_epoch_alone) or 0.0) / self.steps_per_epoch

    @property
    def least_seconds(self) -> float:
        """Return the least seconds that the run takes; 0 where nothing is known."""
        return self.seconds_between[0] if self.seconds_between is not None else self.seconds or 0.0

    @property
    def is_ample(self) -> bool:
        """Return whether there is so much more than it needs that no prediction is off by enough to matter."""
        return self.chosen is not None and _is_ample(self.chosen.total_bytes, self.budget)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return asdict(self)

    @property
    def left_bytes(self) -> int:
        """Return what the run leaves of the budget, beside the margin; 0 where nothing fits."""
        taken_bytes = None if self.chosen is None else self.chosen.total_bytes
        return 0 if taken_bytes is None else self.budget.limit_bytes - self.budget.margin_bytes - taken_bytes

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainingPlan:
        """Read back from JSON what `as_dict` gave; anything else raises ValueError."""
        if not saved.keys() <= {each.name for each in fields(cls)}:
            raise ValueError("the plan was written by another version")
        return _adapter().validate_python(saved)


def shape_in_words(rows: int, tokens: int, *, is_packed: bool) -> str:
    """Describe a micro-batch: rows × tokens, or the tokens of packed rows."""
    return f"{rows * tokens:,} packed tokens" if is_packed else f"{rows:,} × {tokens:,} tokens"


@cache
def _adapter() -> TypeAdapter[TrainingPlan]:
    return TypeAdapter(TrainingPlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Hold a summary of the tokens of rows."""

    num_rows: int
    num_tokens: int
    shortest: int
    median: int
    p90: int
    p99: int
    longest: int
    histogram: tuple[tuple[int, int], ...]  # (longest length of the bin, rows), bins doubling in length


def summarize_lengths(lengths: ArrayLike) -> LengthSummary:
    """Return the summary of at least one row. lengths: tokens of each."""
    tokens = np.asarray(lengths, dtype=np.int64)
    assert len(tokens), "there is no summary of no rows"
    p50, p90, p99 = (int(np.percentile(tokens, share, method="inverted_cdf")) for share in (50, 90, 99))
    bins = np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    return LengthSummary(
        num_rows=len(tokens),
        num_tokens=int(tokens.sum()),
        shortest=int(tokens.min()),
        median=p50,
        p90=p90,
        p99=p99,
        longest=int(tokens.max()),
        histogram=tuple((int(2**number), int(np.sum(bins == number))) for number in range(bins.min(), bins.max() + 1)),
    )
