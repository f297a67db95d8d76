"""What one way to train takes in memory, for every shape that a plan may ask for, from a few traces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numpy.typing import ArrayLike

from brim.batching.surface import Surface
from brim.planning.memory_samples import Sample, passing, region, sampled
from brim.planning.traced_shapes import TracedShapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Bytes that PyTorch has allocated, with weights, gradients and the optimizer's state at hand."""

    peak: Surface  # of a micro-batch's forward and backward pass
    static_bytes: int  # there whatever the shape
    state_bytes: int  # of them the optimizer's state, which the first step bears
    update_peak_bytes: int  # of the optimizer's own step, the first and the later ones
    load_peak_bytes: int  # of the load of the weights

    @property
    def least_bytes(self) -> int:
        """What a run takes even if its rows took nothing."""
        return max(self.static_bytes, self.update_peak_bytes, self.load_peak_bytes)


def memory_model(
    shapes: TracedShapes, lengths: ArrayLike, *, most_rows: int, cap_bytes: int, context_length: int | None
) -> MemoryModel:
    """The model of the shapes that these lengths give, best near the cap.

    lengths: tokens of each row. most_rows: of a micro-batch, the effective batch at most. cap_bytes: what may be
    allocated at most, as far as it is known. context_length: tokens that the model takes at most; None: no limit.
    """
    basics = shapes.basics
    where = region(
        lengths,
        most_rows=most_rows,
        cap_bytes=cap_bytes,
        context=context_length,
        chunk_positions=basics.chunk_positions,
    )
    found = MemoryModel(
        peak=sampled(shapes.peak_bytes, where),
        static_bytes=basics.static_bytes,
        state_bytes=basics.state_bytes,
        update_peak_bytes=max(basics.first_update_bytes, basics.update_bytes),
        load_peak_bytes=basics.load_bytes,
    )
    shapes.save()
    return found


def verified(model: MemoryModel, shapes: TracedShapes, *, rows: int, tokens: int) -> MemoryModel:
    """The model after one more trace, of the widest micro-batch of a plan: exact there."""
    sample = Sample(rows=rows, tokens=tokens, peak_bytes=shapes.peak_bytes(rows, tokens))
    shapes.save()
    return replace(model, peak=passing(model.peak, sample))
