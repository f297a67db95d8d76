"""Answer the keys of other tools: Axolotl, TRL, transformers, LLaMA-Factory, Composer and torchtune.

The table is `keys.json`, by topic. Each entry names brim's key (`to`) and how a value is converted, or says in `words`
why there is nothing to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from brim.config.foreign import values as form
from brim.config.foreign.values import Convert, Help


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """Hold names that mean the same. `*` at a name's end stands for any ending; `a.b` is b in a section a."""

    names: tuple[str, ...]
    target: str = ""  # brim's key; empty where there is none
    example: Any = None  # a value that other tools' users write
    convert: Convert | None = None  # gives brim's value, or a Help where that is not simply another value
    words: str = ""
    off_counts: bool = False  # where there is no target: false, 0 and the like ask for something, too

    def answer(self, value: Any) -> Help:
        """Return what to write, or do, in place of this value."""
        if not self.target:
            return Help(words=self.words, is_idle=form.is_off(value) and not self.off_counts)
        made = value if self.convert is None else self.convert(value)
        return made if isinstance(made, Help) else Help(lines=((self.target, made),), words=self.words)


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    """Return the keys that brim does not have."""
    return tuple(_entry(given) for topic in form.table()["keys"].values() for given in topic)


@cache
def foreign_values() -> tuple[ForeignKey, ...]:
    """Return brim's own keys, and sections, for whose values other tools have other words."""
    return tuple(map(_entry, form.table()["values"]))


def _entry(given: Mapping[str, Any]) -> ForeignKey:
    return ForeignKey(
        names=tuple(given["names"]),
        target=given.get("to", ""),
        example=given.get("example"),
        convert=_convert(given.get("convert")),
        words=given.get("words", ""),
        off_counts=given.get("off_counts", False),
    )


def _convert(given: Any) -> Convert | None:
    """Return a function of `values`, a choice by its tables there, or a switch with the line that it stands for."""
    if given is None:
        return None
    if isinstance(given, str):
        convert: Convert = getattr(form, given)
        return convert
    if "switch" in given:
        key, value = given["switch"]
        return form.switch((key, value), words=given.get("words", ""))
    return form.choice(given["choice"], given.get("also", ()))
