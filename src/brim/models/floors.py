"""The oldest versions of libraries that brim trusts with foreign folders."""

from __future__ import annotations

import importlib.metadata
import re

from brim.errors import InputError, Problem

FLOORS = {
    "transformers": ((5, 3), "earlier ones could be made to run a model's code unasked"),
    "accelerate": ((1, 15), "earlier ones could lose parts of an adapter"),
}


def require_floors() -> None:
    """Raise InputError where an older version is installed: pip only warns when another package asks for one."""
    problems = []
    for name, (floor, why) in FLOORS.items():
        version = importlib.metadata.version(name)
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < floor:
            oldest = ".".join(map(str, floor))
            problems.append(
                Problem(
                    what=f"{name} {version} is too old",
                    where="this Python environment",
                    expected=f"{oldest} or later: {why}",
                    fix=f"pip install '{name}>={oldest}'",
                )
            )
    if problems:
        raise InputError(*problems)
