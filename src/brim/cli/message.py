"""What stands on the terminal when a verb fails: the first problems, plain, short and without secrets."""

from __future__ import annotations

from brim.config.mask import mask_text
from brim.errors import BrimError

_SHOWN_PROBLEMS = 8  # of three lines each; the others are counted
_LONGEST_LINE = 1_000  # characters


def message(error: BrimError) -> str:
    """The error's problems as lines."""
    shown = [plain(str(problem)) for problem in error.problems[:_SHOWN_PROBLEMS]]
    num_more = len(error.problems) - len(shown)
    if num_more:
        shown.append(f"and {num_more:,} more {'problem' if num_more == 1 else 'problems'}")
    return "\n".join(shown)


def plain(text: str) -> str:
    """Without secrets, without characters that would steer the terminal, without endless lines."""
    return "\n".join(_shortened(printable(line)) for line in mask_text(text).split("\n"))


def printable(text: str, *, kept: str = "") -> str:
    """A text whose characters that would steer the terminal are spelled out, but for those in `kept`."""
    if text.isprintable():
        return text
    plain = ((each.isprintable() or each in kept, each) for each in text)
    return "".join(each if is_plain else each.encode("unicode_escape").decode() for is_plain, each in plain)


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"
