"""From the model's texts to a category's labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brim.config.labels import MAX_STEPS, LabelReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """The label of each text, in the order of the texts."""

    labels: list[str]
    num_fallback: int  # texts in which no rule finds a label
    num_partial: int  # texts of which a regular expression saw the beginning alone, with no rule before it that fits

    def notes(self) -> list[str]:
        """What a person should know of the labels."""
        said = []
        if self.num_fallback:
            said.append(
                f"{self.num_fallback:,} of {len(self.labels):,} responses name no label and got the fallback label"
            )
        if self.num_partial:
            said.append(
                f"{self.num_partial:,} of {len(self.labels):,} responses are so long that a regular expression would "
                f"take over {MAX_STEPS:,} steps; only their beginning was looked at"
            )
        return said


def extract(texts: Sequence[str], reader: LabelReader) -> Extracted:
    """The labels that the texts stand for. A pure function of each text."""
    readings = [reader.read(text) for text in texts]
    return Extracted(
        labels=[reading.label for reading in readings],
        num_fallback=sum(reading.is_fallback for reading in readings),
        num_partial=sum(reading.is_partial for reading in readings),
    )
