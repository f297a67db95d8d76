"""The numbers of a prediction as tables of a page."""

from __future__ import annotations

from brim.memory.prediction import MemoryPrediction
from brim.report.categories import LOOKS, total_by_part
from brim.report.memory_plot import spikes
from brim.report.memory_table import facts, gib
from brim.report.page import PageTable


def prediction_tables(prediction: MemoryPrediction) -> list[PageTable]:
    """By category at the peak; the highest point of each phase; all that was decided."""
    parts = {part: num_bytes for part, num_bytes in total_by_part(prediction).items() if num_bytes}
    return [
        PageTable(
            caption="At the peak",
            heads=("part", "what it is", "GiB", "bytes"),
            rows=[(LOOKS[part].label, LOOKS[part].meaning, gib(size), f"{size:,}") for part, size in parts.items()]
            + [("needed on the device", "", gib(prediction.total_bytes), f"{prediction.total_bytes:,}")],
            colours=[*(LOOKS[part].colour for part in parts), "transparent"],
            num_texts=2,
        ),
        PageTable(
            caption="The highest point of each phase",
            heads=("phase", "operator and module", "GiB"),
            rows=[(spike.during, spike.where, gib(spike.live_bytes)) for spike in spikes(prediction.timeline)],
            num_texts=2,
        ),
        PageTable(caption="What was found and chosen", heads=("",), rows=[(fact,) for fact in facts(prediction)]),
    ]
