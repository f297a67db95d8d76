"""What the suite does on any machine: it draws the same examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from tests.properties import FUZZED, USUAL


def test_the_profile_is_the_one_that_was_asked_for(request):
    profile, now = request.config.getoption("--hypothesis-profile") or "suite", settings()
    assert (now.derandomize, now.max_examples) == {"suite": (True, USUAL), "fuzz": (False, FUZZED)}[profile]
    assert (now.deadline, now.database, now.print_blob) == (None, None, True)


@pytest.mark.process
@pytest.mark.parametrize("asked", [[], ["--hypothesis-profile=fuzz"]], ids=["suite", "fuzz"])
def test_an_environment_of_ci_changes_no_profile(asked):
    """Hypothesis takes a profile of its own in CI."""
    root, name = Path(__file__).parents[1], test_the_profile_is_the_one_that_was_asked_for.__name__
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked, f"{__file__}::{name}"]
    subprocess.run(command, env={**os.environ, "CI": "true"}, cwd=root, capture_output=True, check=True)
