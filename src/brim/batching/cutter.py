"""How a run cuts its effective batches, and how that changes when memory runs out after all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import ArrayLike

from brim.batching.microbatch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CapChange:
    """The limit on micro-batches was lowered or raised. `unit` says what it counts: bytes, or rows."""

    before: int
    after: int
    unit: str


class Cutter(Protocol):
    """Deterministic: the same calls give the same cuts. Its state goes into the checkpoint."""

    def cut(self, lengths: ArrayLike) -> list[MicroBatch]:
        """Every row of an effective batch once, none over the cap. lengths: tokens of each row.

        A row that is over the cap alone is a micro-batch by itself: such rows are refused before a run is launched,
        and one that is left over after the cap was lowered is tried.
        """

    def cut_in_order(self, lengths: ArrayLike, *, num_groups: int) -> list[MicroBatch]:
        """Every row once, in the order of the batch: about `num_groups` micro-batches, more where the cap wants it.

        Rows of a batch are in random order, so that these are random groups of them, which neighbours in length are
        not. As in `cut`, a row that is over the cap alone is a micro-batch by itself.
        """

    def lower(self, failed: MicroBatch) -> CapChange | None:
        """This micro-batch ran out of memory; cut smaller from now on. None where it is a single row."""

    def clean_step(self) -> CapChange | None:
        """A step went well; after enough of them in a row the limit is raised, up to its value at launch."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to cut the same, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Back to a saved state."""
