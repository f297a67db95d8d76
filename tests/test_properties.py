"""Property tests draw the same examples in every run of the suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties import FUZZED, USUAL, examples

DRAWN: list[int] = []


@pytest.fixture
def profile(request):
    return request.config.getoption("--hypothesis-profile") or "suite"


def test_the_profile_is_the_one_that_was_asked_for(profile):
    now = settings()
    assert (now.derandomize, now.max_examples) == {"suite": (True, USUAL), "fuzz": (False, FUZZED)}[profile]
    assert (now.deadline, now.database, now.print_blob) == (None, None, True)


@pytest.mark.parametrize("asked", [[], ["--hypothesis-profile=fuzz"]], ids=["suite", "fuzz"])
def test_an_environment_of_ci_changes_nothing(asked):
    """Hypothesis takes a profile of its own there."""
    test = f"{__file__}::{test_the_profile_is_the_one_that_was_asked_for.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked, test],
        env=os.environ | {"CI": "true"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@given(number=st.integers())
@examples(30)
def _draw(number):
    DRAWN.append(number)


def test_an_own_number_grows_with_the_usual_one(profile):
    DRAWN.clear()
    _draw()
    assert len(DRAWN) >= 30 * (FUZZED // USUAL if profile == "fuzz" else 1)
    slow = {HealthCheck.too_slow}
    assert set(examples(suppress_health_check=[HealthCheck.function_scoped_fixture]).suppress_health_check) > slow


def test_the_same_are_drawn_again():
    """In `make fuzz`, too: it gives a seed."""
    drawn = []
    for _ in range(2):
        DRAWN.clear()
        _draw()
        drawn.append(tuple(DRAWN))
    assert drawn[0] == drawn[1]
