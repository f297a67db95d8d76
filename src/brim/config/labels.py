"""Which label of a category a text stands for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from brim.config.pattern import characters_within
from brim.config.schema.features import MatchRule, OutputFeature

# Of a regular expression on one text: some tenths of a second in Python's engine, in the worst case.
MAX_STEPS = 10_000_000

Fits: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was found in a text."""

    label: str
    is_fallback: bool = False  # no rule fits
    is_partial: bool = False  # a regular expression saw the beginning of the text alone, and no rule before it fits


class LabelReader:
    """Finds a category's label in the model's text: that of the first rule that fits, else the fallback label.

    As in Ludwig, upper and lower case count as equal; here also where a rule has upper case. A regular expression is
    matched with the beginning of a text that is so long that it could take for ever.
    """

    def __init__(self, feature: OutputFeature) -> None:
        """feature: a category that broke no rule of the configuration."""
        fallback = feature.fallback_label
        assert feature.rules, "a text has no labels, and those of a category are known by now"
        assert fallback is not None, "checked with the configuration"
        self.labels, self.fallback = feature.labels, fallback
        self._rules = [(label, _fits(rule), _num_characters(rule)) for label, rule in feature.rules.items()]

    def read(self, text: str) -> Reading:
        """The label, and how it was come by."""
        is_partial = False
        for label, fits, num_characters in self._rules:
            is_partial |= num_characters is not None and len(text) > num_characters
            if fits(text if num_characters is None else text[:num_characters]):
                return Reading(label=label, is_partial=is_partial)
        return Reading(label=self.fallback, is_fallback=True, is_partial=is_partial)


def _fits(rule: MatchRule) -> Fits:
    if rule.type == "contains":
        value = rule.value.lower()
        return lambda text: value in text.lower()
    expression = re.compile(rule.value, re.IGNORECASE)
    return lambda text: expression.search(text) is not None


def _num_characters(rule: MatchRule) -> int | None:
    """Of a text that a rule looks at; None for all."""
    return None if rule.type == "contains" else characters_within(rule.value, MAX_STEPS)
