"""A cutter as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brim.batching.by_length import ByLength
from brim.batching.by_rows import ByRows
from brim.batching.costs import Costs
from brim.batching.cutter import Cutter


def cutter_of(state: Mapping[str, Any]) -> Cutter:
    """The cutter whose `state` this is, as it was then."""
    cutter: ByLength | ByRows
    if state["kind"] == "by_rows":
        cutter = ByRows(max_rows=1)
    else:
        cutter = ByLength(costs=Costs.from_dict(state["costs"]), cap_bytes=0)
    cutter.restore(state)
    return cutter
