"""Bad configurations, data and folders, drawn by hypothesis and given to every verb: refused, with place and fix.

python -m faults --only inputs
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from faults import Settings, Trial
from faults.bad_configs import bad_configs
from faults.bad_data import bad_data
from faults.bad_input import BadInput, Verb, fault_of, state_of, touched
from faults.bad_models import bad_models, bad_runs
from faults.forked import Brim
from faults.workshop import build

NUM_INPUTS = {"configurations": 200, "data": 110, "models": 100, "runs": 50}
NUM_SHORT = {"configurations": 6, "data": 5, "models": 6, "runs": 4}

Drawn = TypeVar("Drawn")


def run(campaign: Settings) -> Iterator[Trial]:
    """Every input with every verb that it is for."""
    project = campaign.folder / "project"
    project.mkdir()
    build(project, campaign.brim)
    trials = [
        (bad, verb)
        for number, bad in enumerate(inputs(short=campaign.short, from_seed=campaign.seed))
        # In short, each input with one verb, another one from input to input.
        for verb in (bad.verbs if not campaign.short else bad.verbs[number % len(bad.verbs) :][:1])
    ]
    for number, (bad, verb) in enumerate(trials):
        if campaign.is_mine(number):
            yield trial(bad, verb, campaign.brim, project, campaign.folder / "copy")


def inputs(*, short: bool, from_seed: int) -> list[BadInput]:
    """The same for the same seed."""
    numbers = NUM_SHORT if short else NUM_INPUTS
    kinds: dict[str, Callable[[], st.SearchStrategy[BadInput]]] = {
        "configurations": bad_configs,
        "data": bad_data,
        "models": bad_models,
        "runs": bad_runs,
    }
    return [bad for kind, number in numbers.items() for bad in draw(kinds[kind](), number, from_seed)]


def draw(strategy: st.SearchStrategy[Drawn], number: int, from_seed: int) -> list[Drawn]:
    """So many different ones; fewer where the strategy has no more."""
    found: dict[Drawn, None] = {}
    for attempt in range(20):
        if len(found) >= number:
            break

        @seed(from_seed + attempt)
        @settings(
            max_examples=2 * number,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def collect(drawn: Drawn) -> None:
            found.setdefault(drawn)

        collect()
    return list(found)[:number]


def trial(bad: BadInput, verb: Verb, brim: Brim, project: Path, copy: Path) -> Trial:
    """Spoil a copy of the project and run the verb in it."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(project, copy, symlinks=True)
    for edit in bad.edits:
        edit.apply(copy)
    before = state_of(copy)
    done = brim(*bad.command(verb), folder=copy, limit_s=60)
    # A run that goes on writes into its folder; what passes may write.
    left = set() if verb == "resume" or done.code == 0 else touched(before, state_of(copy))
    why = fault_of(bad, verb, done, left)
    case = bad.name if bad.arguments else f"{verb}: {bad.name}"
    return Trial(row=bad.row, case=case, outcome="failed" if why else "passed", why=why)
