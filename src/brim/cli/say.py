"""Results go to stdout; everything else that a person should read goes here, to stderr."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Show a note, at once."""
    print(line, file=sys.stderr, flush=True)
