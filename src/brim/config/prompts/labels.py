"""Read a category's label in a text, by rules that cannot run for ever.

Regular expressions come from configurations and adapters, and only those that cannot run for ever are accepted.
Python's engine tries every way to divide a text among repeats and alternatives; where these stand inside a repeat, as
in `(a+)+$`, their number grows exponentially with the text.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from brim.config.schema import MatchRule, OutputFeature

# Steps of a regular expression on one text: some tenths of a second in Python's engine, in the worst case.
MAX_STEPS = 10_000_000


Fits: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Hold the label that was found in a text."""

    label: str
    is_fallback: bool = False  # no rule fits
    is_partial: bool = False  # a regular expression saw only the beginning of the text, and no rule before it fits


class LabelReader:
    """Find a category's label in the model's text: that of the first rule that fits, else the fallback label.

    As in Ludwig, upper and lower case count as equal, here also in the rules. A regular expression sees only the
    beginning of a text that is so long that matching could take for ever.
    """

    def __init__(self, feature: OutputFeature) -> None:
        """Prepare the rules of a category that has passed the configuration's checks."""
        fallback = feature.fallback_label
        assert feature.rules, "a text has no labels, and those of a category are known by now"
        assert fallback is not None, "checked with the configuration"
        self.labels, self.fallback = feature.labels, fallback
        self._rules = [(label, _fits(rule), _num_characters(rule)) for label, rule in feature.rules.items()]

    def read(self, text: str) -> Reading:
        """Return the label, and how it was found."""
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
    """Return how many characters of a text a rule looks at; None for all."""
    return None if rule.type == "contains" else characters_within(rule.value, MAX_STEPS)


MAX_CHARACTERS = 2_000


MAX_OPEN_REPEATS = 4  # one after the other: the time grows with the text's length to this power


MAX_WAYS = 10_000  # of choosing alternatives and optional parts


_FEW = 16  # times; a repeat of more counts as open


_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def pattern_fault(pattern: str) -> str | None:
    """Say why a regular expression is refused; None if it is accepted."""
    if len(pattern) > MAX_CHARACTERS:
        return f"it has {len(pattern):,} characters, more than {MAX_CHARACTERS:,}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that will mean something else one day
            cost = _sequence(_parser().parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is not a regular expression: {error}"
    if cost.nested:
        return "a repeat or a choice stands inside a repeat, which can take for ever"
    if cost.opens > MAX_OPEN_REPEATS:
        return f"{cost.opens} open repeats follow each other, which can take for ever; {MAX_OPEN_REPEATS} may"
    if cost.ways > MAX_WAYS:
        return f"it has {min(cost.ways, 10**12):,} ways to match, more than {MAX_WAYS:,}"
    return None


def characters_within(pattern: str, num_steps: int) -> int:
    """Return the characters of the longest text in which a search for the expression takes about so many steps.

    pattern: one without a fault. With k open repeats one after the other, a text of n characters can be divided among
    them and what stands before in n^(k+1) / (k+1)! ways.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = _sequence(_parser().parse(pattern))
    parts = cost.opens + 1
    return max(1, int((num_steps * math.factorial(parts) / cost.ways) ** (1 / parts)))


@dataclass(frozen=True, slots=True)
class _Cost:
    """Count an expression's open repeats and choices that can follow each other; nested: an open repeat holds any."""

    opens: int = 0
    ways: int = 1
    nested: bool = False

    @property
    def varies(self) -> bool:
        return self.opens > 0 or self.ways > 1


def _parser() -> Any:
    """Return Python's own parser, which has no public name."""
    try:
        from re import _parser as parser  # type: ignore[attr-defined, unused-ignore]
    except ImportError:  # Python 3.10
        import sre_parse as parser  # type: ignore[no-redef, unused-ignore]
    return parser


def _sequence(parsed: Iterable[Any]) -> _Cost:
    whole = _Cost()
    for operator, argument in parsed:
        part = _part(str(operator), argument)
        whole = _Cost(
            opens=whole.opens + part.opens,
            ways=min(whole.ways * part.ways, 10**18),
            nested=whole.nested or part.nested,
        )
    return whole


def _part(name: str, argument: Any) -> _Cost:
    if name in _REPEATS:
        least, most, inner = argument
        cost, times = _sequence(inner), int(most)
        if times > _FEW:
            return _Cost(opens=1, nested=cost.nested or cost.varies)
        return _Cost(
            opens=cost.opens * times,
            ways=min(cost.ways ** max(1, times) * (times - int(least) + 1), 10**18),
            nested=cost.nested or (times > 1 and cost.opens > 0),
        )
    if name == "BRANCH":
        ways = [_sequence(way) for way in argument[1]]
        return _Cost(
            opens=max(way.opens for way in ways),
            ways=sum(way.ways for way in ways),
            nested=any(way.nested for way in ways),
        )
    return _sequence(item for inner in _parts_of(argument) for item in inner)


def _parts_of(argument: Any) -> list[Any]:
    """Return the expressions inside a group, an assertion or a condition."""
    held = argument if isinstance(argument, tuple) else (argument,)
    return [part for part in held if type(part).__name__ == "SubPattern"]
