"""From the model's texts to a category's labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from brim.config import Config, OutputFeature
from brim.config.labels import MAX_STEPS, LabelReader, Reading

_CONSTRAIN = "output_features.0.decoder.constrain_to_vocabulary"


@dataclass(slots=True, kw_only=True)
class LabelCounts:
    """How the labels of texts were come by."""

    labels: Counter[str] = field(default_factory=Counter)
    num_fallback: int = 0  # texts in which no rule finds a label
    num_partial: int = 0  # texts of which a regular expression saw the beginning alone, and no rule before it fits

    def add(self, reading: Reading) -> None:
        """One more text."""
        self.labels[reading.label] += 1
        self.num_fallback += reading.is_fallback
        self.num_partial += reading.is_partial

    def record(self) -> dict[str, Any]:
        """For a summary: the labels by their number."""
        return {
            "labels": dict(self.labels.most_common()),
            "num_fallback": self.num_fallback,
            "num_looked_at_in_part": self.num_partial,
        }

    def notes(self, feature: OutputFeature) -> list[str]:
        """What a person should know of the labels, and, where responses name none, the setting that leads to one."""
        num_texts = self.labels.total()
        decoder = feature.categories
        said = []
        if self.num_fallback:
            told = f"{self.num_fallback:,} of {num_texts:,} responses name no label and got the fallback label"
            if decoder is None or not decoder.constrain_to_vocabulary:
                told += f"; with {_CONSTRAIN}=true the model can write nothing but labels"
            said.append(told)
        if self.num_partial:
            said.append(
                f"{self.num_partial:,} of {num_texts:,} responses are so long that a regular expression could take "
                f"over {MAX_STEPS:,} steps; it looked at their beginning alone"
            )
        return said


def extract(texts: Sequence[str], reader: LabelReader, counts: LabelCounts) -> list[str]:
    """The label that each text stands for, which depends on the text alone; `counts` grows by them."""
    labels = []
    for text in texts:
        reading = reader.read(text)
        counts.add(reading)
        labels.append(reading.label)
    return labels


def label_reader(config: Config) -> LabelReader | None:
    """What finds labels in the model's texts; None where these are the answers themselves."""
    is_category = config.chat is None and config.output_features[0].categories is not None
    return LabelReader(config.output_features[0]) if is_category else None


def label_column(config: Config) -> str:
    """The column of predicted labels, called as in Ludwig."""
    return f"{config.answer_name}_predictions"
