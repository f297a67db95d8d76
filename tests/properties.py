"""How many examples a property test draws: the same ones in `make test`, fresh ones and more of them in `make fuzz`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, settings

USUAL, FUZZED = 100, 1000  # examples of a property that asks for no other number


def register_profiles() -> None:
    """Name the profiles for pytest's `--hypothesis-profile`.

    Nothing in them rests on a clock (no deadline) or on an earlier run (no database). Their parent is named, since
    hypothesis takes another one where the environment has CI.
    """
    fixed: dict[str, Any] = {"deadline": None, "database": None, "print_blob": True}
    fixed["suppress_health_check"] = [HealthCheck.too_slow]
    base = settings.get_profile("default")
    settings.register_profile("suite", base, derandomize=True, max_examples=USUAL, **fixed)
    settings.register_profile("fuzz", base, derandomize=False, max_examples=FUZZED, **fixed)


def examples(number: int = USUAL, *, suppress_health_check: Iterable[HealthCheck] = ()) -> settings:
    """Draw another number of examples than usual, multiplied in `make fuzz` as the usual number is."""
    profile = settings()
    return settings(
        max_examples=number * profile.max_examples // USUAL,
        suppress_health_check=[*profile.suppress_health_check, *suppress_health_check],
    )
