"""What scoring costs for every shape that rows can make, from a few traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.batching.costs import Costs
from brim.memory.device_speed import DeviceSpeed
from brim.planning.forward_plan import useful_tokens
from brim.planning.forward_shapes import ForwardShapes
from brim.planning.memory_samples import Region, Sample, passing, region, sampled
from brim.planning.roofline import roofline
from brim.planning.time_estimate import TimeEstimate, estimate
from brim.planning.work_law import shapes_to_count

# No batch is looked at that has more tokens; any model that is worth a GPU is bound by arithmetic long before.
MOST_TOKENS = 2**18
_LEAST_TOKENS = 8  # below it a batch's time does not depend on them
# Tokens of a batch with which a GPU is busy whatever the model: an A100 reaches 90% of its speed at about 1,000, with
# weights in 4 bits at 4,000. The law of the kernels' work does not know that small products are slower.
_BUSY_TOKENS = 16_384
_STEPS_OF_TWO = 4  # to which a cap is rounded up, so that one that is a little different meets the same samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardModel:
    """Costs, and beyond which batches nothing gets better."""

    costs: Costs
    useful_tokens: int
    load_bytes: int  # peak of the load of the weights


def forward_model(
    shapes: ForwardShapes, lengths: ArrayLike, *, cap_bytes: int, context_length: int | None, speed: DeviceSpeed
) -> ForwardModel:
    """The model of the shapes that these lengths give, best near the cap.

    lengths: tokens of each row. cap_bytes: what may be allocated at most. context_length: tokens that the model takes
    at most; None: no limit.
    """
    tokens = np.asarray(lengths, dtype=np.int64)

    def where(most_rows: int) -> Region:
        return region(
            tokens,
            most_rows=most_rows,
            cap_bytes=_rounded_up(cap_bytes),
            context=context_length,
            chunk_positions=shapes.basics.chunk_positions,
        )

    time = _time(shapes, tokens, longest=where(len(tokens)).longest, speed=speed)
    useful = min(_useful(time, int(np.median(tokens)), speed), max(int(tokens.sum()), _LEAST_TOKENS))
    found = ForwardModel(
        costs=Costs(
            peak=sampled(shapes.peak_bytes, where(max(1, -(-useful // int(tokens.max()))))),
            static_bytes=shapes.basics.static_bytes,
            time=time.surface,
        ),
        useful_tokens=useful,
        load_bytes=shapes.basics.load_bytes,
    )
    shapes.save()
    return found


def verified(model: ForwardModel, shapes: ForwardShapes, *, rows: int, tokens: int) -> ForwardModel:
    """The model after one more trace: exact there."""
    sample = Sample(rows=rows, tokens=tokens, peak_bytes=shapes.peak_bytes(rows, tokens))
    shapes.save()
    return replace(model, costs=replace(model.costs, peak=passing(model.costs.peak, sample)))


def beside(costs: Costs, num_bytes: int) -> Costs:
    """The costs where so much is there beside the model, such as an optimizer's state."""
    peak = costs.peak
    values = tuple(tuple(value + num_bytes for value in line) for line in peak.values)
    raised = replace(peak, base=peak.base + num_bytes, values=values)
    return replace(costs, peak=raised, static_bytes=costs.static_bytes + num_bytes)


def enough_tokens(seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]], speed: DeviceSpeed) -> int:
    """Of a batch: with more of them nothing gets better. seconds: of batches of so many tokens, of usual rows."""
    found = useful_tokens(seconds, least=_LEAST_TOKENS, most=MOST_TOKENS)
    return max(found, _BUSY_TOKENS) if speed.is_asynchronous else found


def _time(shapes: ForwardShapes, lengths: NDArray[np.int64], *, longest: int, speed: DeviceSpeed) -> TimeEstimate:
    short = int(np.percentile(lengths, 10, method="inverted_cdf"))
    # Of these shapes alone, so that what else has been traced meanwhile changes no plan.
    wanted = shapes_to_count((), longest=longest, short=short, most_rows=max(2, 2 * longest // short))
    return estimate(
        {shape: shapes.work(*shape) for shape in wanted},
        speed,
        longest=int(lengths.max()),
        shortest=int(lengths.min()),
        most_rows=-(-MOST_TOKENS // int(lengths.max())),
    )


def _useful(time: TimeEstimate, length: int, speed: DeviceSpeed) -> int:
    def seconds(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        return roofline(time.law, speed, tokens, length).total_s

    return enough_tokens(seconds, speed)


def _rounded_up(num_bytes: int) -> int:
    step = math.ceil(_STEPS_OF_TWO * math.log2(max(num_bytes, 2)))
    return int(2 ** (step / _STEPS_OF_TWO))
