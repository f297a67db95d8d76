"""What the suite does on any machine: it draws the same examples, and fails by warnings, but not a GPU's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.properties import FUZZED, USUAL, examples

TESTS = """
import warnings
import pytest
from tests.test_suite import test_the_profile_is_the_one_that_was_asked_for, profile

def warn(module):
    warnings.warn_explicit("not aligned", UserWarning, "ops.py", 1, module)

@pytest.mark.gpu
def test_of_a_library_on_a_gpu():
    warn("bitsandbytes.backends.cuda.ops")

@pytest.mark.gpu
def test_of_brim_on_a_gpu():
    warn("brim.train.loop")

def test_of_a_library():
    warn("bitsandbytes.backends.cpu.ops")
"""


@pytest.fixture
def profile(request):
    return request.config.getoption("--hypothesis-profile") or "suite"


def test_the_profile_is_the_one_that_was_asked_for(profile):
    now = settings()
    assert (now.derandomize, now.max_examples) == {"suite": (True, USUAL), "fuzz": (False, FUZZED)}[profile]
    assert (now.deadline, now.database, now.print_blob) == (None, None, True)


@pytest.mark.process
@pytest.mark.parametrize("asked", [[], ["--hypothesis-profile=fuzz"]], ids=["suite", "fuzz"])
def test_an_environment_of_ci_changes_no_profile_and_what_a_gpus_libraries_warn_of_fails_nothing(tmp_path, asked):
    """Hypothesis takes a profile of its own in CI."""
    (tmp_path / "test_suite_of_its_own.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", "pyproject.toml"]
    command += ["-rA", *asked, str(tmp_path / "test_suite_of_its_own.py")]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "CI": "true"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    told = re.findall(r"^(PASSED|FAILED) \S*::(\w+)", done.stdout, flags=re.MULTILINE)
    assert {name: how for how, name in told} == {
        "test_the_profile_is_the_one_that_was_asked_for": "PASSED",
        "test_of_a_library_on_a_gpu": "PASSED",
        "test_of_brim_on_a_gpu": "FAILED",
        "test_of_a_library": "FAILED",
    }
    assert "1 warning" in done.stdout


def test_an_own_number_grows_with_the_usual_one(profile):
    own = examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    assert own.max_examples == 30 * (FUZZED // USUAL if profile == "fuzz" else 1)
    assert {HealthCheck.too_slow, HealthCheck.function_scoped_fixture} <= set(own.suppress_health_check)
