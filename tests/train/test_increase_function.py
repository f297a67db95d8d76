"""Functions of the user's that move the batch from epoch to epoch."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from brim.batching import Phase, num_steps as steps_of
from brim.errors import InputError
from brim.train.increase_function import MAX_EPOCHS, RefusedIncrease, expand, load_increase_function

KEY = "trainer.batch_increase_function"
SIGNATURE = "  expected: a Python function of (epoch, current_batch_size) that returns how many rows to add"


def doubled(epoch, current_batch_size):
    return current_batch_size


class Growing:
    """An object that can be called."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, epoch, current_batch_size):
        return self.rows

    def method(self, epoch, current_batch_size):
        return self.rows


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the working directory, under a name that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(text, name="brim_test_increase"):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refused(function):
    with pytest.raises(InputError) as caught:
        load_increase_function(function)
    (problem,) = caught.value.problems
    return str(problem)


def test_a_function_of_a_module_in_the_working_directory(module):
    name = module("def increase(epoch, current_batch_size):\n    return 10 * epoch + current_batch_size\n")
    before = list(sys.path)
    assert load_increase_function(f"{name}:increase")(2, 8) == 28
    assert sys.path == before


def test_a_function_in_a_package_and_one_of_an_object(module, tmp_path):
    (tmp_path / "brim_test_package").mkdir()
    module("class Given:\n    @staticmethod\n    def more(epoch, size):\n        return 3\n", "brim_test_package/inner")
    assert load_increase_function("brim_test_package.inner:Given.more")(1, 1) == 3


def test_the_working_directory_comes_first(module, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "brim_test_increase.py").write_text("def increase(e, b):\n    return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(other))
    name = module("def increase(e, b):\n    return 2\n")
    assert load_increase_function(f"{name}:increase")(1, 1) == 2


@pytest.mark.parametrize(
    "function",
    [
        doubled,
        lambda epoch, current_batch_size: 1,
        Growing(3),
        Growing(3).method,
        functools.partial(lambda rows, epoch, size: rows, 4),
        functools.cache(doubled),
        lambda *given: 1,
    ],
)
def test_what_is_a_function(function):
    assert load_increase_function(function) is function


def test_a_module_that_is_not_there(module, tmp_path):
    assert refused("brim_no_such_module:increase") == (
        f"{KEY}: there is no module brim_no_such_module, neither in {tmp_path} nor among what is installed\n"
        "  fix: run brim in the folder of brim_no_such_module.py, or add that folder to PYTHONPATH"
    )


def test_a_module_that_imports_what_is_not_there(module):
    name = module("import brim_no_such_module\n")
    assert refused(f"{name}:increase") == (
        f"{KEY}: importing {name} raised ModuleNotFoundError: No module named 'brim_no_such_module'"
    )


@pytest.mark.parametrize(
    ("text", "raised"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def increase(:\n", "SyntaxError: invalid syntax (brim_test_increase.py, line 1)"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_module_that_cannot_be_imported(module, text, raised):
    name = module(text)
    assert refused(f"{name}:increase") == f"{KEY}: importing {name} raised {raised}"


def test_a_name_that_the_module_does_not_have(module, tmp_path):
    name = module("def increase(e, b):\n    return 0\n")
    assert refused(f"{name}:grow") == f"{KEY}: {name}:grow: {tmp_path / name}.py has no grow\n{SIGNATURE}"
    assert refused(f"{name}:<lambda>") == (
        f"{KEY}: {name}:<lambda>: {tmp_path / name}.py has no <lambda>\n{SIGNATURE}\n"
        "  fix: give the function itself again, from Python"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("increase = 3", "is of type int, and no function"),
        ("from os import kill as increase", "is no function that is written in Python"),
        ("class increase:\n    def __init__(self, e, b):\n        pass", "is no function that is written in Python"),
        ("from math import gcd as increase", "is no function that is written in Python"),
        (
            "def increase(epoch):\n    return 1",
            "cannot be called with (epoch, current_batch_size): too many positional arguments",
        ),
        (
            "def increase(epoch, size, other):\n    return 1",
            "cannot be called with (epoch, current_batch_size): missing a required argument: 'other'",
        ),
    ],
)
def test_what_is_no_function_of_two_numbers(module, text, what):
    name = module(text + "\n")
    assert refused(f"{name}:increase") == f"{KEY}: {name}:increase {what}\n{SIGNATURE}"


@pytest.mark.parametrize("given", ["os:kill", "shutil:rmtree", "antigravity:geohash", "os.path:join"])
def test_modules_of_pythons_own_are_refused_unread(given):
    sys.modules.pop("antigravity", None)
    assert refused(given) == (
        f"{KEY}: {given.split(':')[0]} is a module of Python's own\n"
        "  expected: a module of yours\n  fix: if yours has that name, rename it"
    )
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("given", ["scripts/increase.py:f", ".increase:f", "my-module:f"])
def test_a_path_is_no_modules_name(given):
    assert refused(given).startswith(f"{KEY}: {given.split(':')[0]} is no module's name\n  expected: module:function")


def test_it_is_called_before_each_epoch():
    calls = []

    def increase(epoch, current_batch_size):
        calls.append((epoch, current_batch_size))
        return 8 if epoch == 2 else 0

    schedule = expand(increase, first_size=8, num_rows=100, num_samples=400).schedule
    assert calls == [(0, 8), (1, 8), (2, 8), (3, 16)]
    assert schedule.phases == (Phase(first_sample=0, size=8), Phase(first_sample=200, size=16))


def test_a_batch_may_shrink_to_one_row():
    schedule = expand(
        lambda epoch, size: -size // 2 if epoch else 0, first_size=8, num_rows=10, num_samples=40
    ).schedule
    assert [phase.size for phase in schedule.phases] == [8, 4, 2, 1]


def test_what_the_bound_does_not_allow_is_left_out_and_told():
    found = expand(doubled, first_size=8, num_rows=10, num_samples=50, bound=20)
    assert [phase.size for phase in found.schedule.phases] == [16]
    assert found.refused == tuple(RefusedIncrease(num_epochs=done, size=32) for done in (1, 2, 3, 4))


def test_the_bound_itself_is_allowed():
    found = expand(doubled, first_size=8, num_rows=10, num_samples=30, bound=64)
    assert ([phase.size for phase in found.schedule.phases], found.refused) == ([16, 32, 64], ())


def test_a_bound_below_the_first_size_lets_it_shrink():
    found = expand(lambda epoch, size: -1, first_size=8, num_rows=10, num_samples=30, bound=4)
    assert ([phase.size for phase in found.schedule.phases], found.refused) == ([7, 6, 5], ())


@given(
    sizes=st.lists(st.integers(1, 40), min_size=8, max_size=8),
    num_rows=st.integers(1, 30),
    num_samples=st.integers(1, 200),
)
def test_it_is_called_for_the_epochs_that_the_run_begins(sizes, num_rows, num_samples):
    calls = []

    def increase(epoch, size):
        calls.append(epoch)
        return sizes[epoch % 8] - size

    by_samples = expand(increase, first_size=sizes[-1], num_rows=num_rows, num_samples=num_samples).schedule
    num_epochs = -(-num_samples // num_rows)
    assert calls == list(range(num_epochs))
    assert [by_samples.size_at(epoch * num_rows) for epoch in range(num_epochs)] == [
        sizes[epoch % 8] for epoch in range(num_epochs)
    ]
    num_steps = steps_of(by_samples, num_rows=num_rows, total_samples=num_samples)
    by_steps = expand(increase, first_size=sizes[-1], num_rows=num_rows, num_steps=num_steps).schedule
    assert by_steps == by_samples


@pytest.mark.parametrize("rows", [np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_other_libraries_count(rows):
    schedule = expand(lambda epoch, size: rows, first_size=8, num_rows=10, num_samples=20).schedule
    assert [(phase.size, type(phase.size)) for phase in schedule.phases] == [(11, int), (14, int)]


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "nothing"),
        (True, "True, a bool"),
        (0.5, "0.5, a float"),
        ("8", "a str"),
        (np.float32(2), "a float32"),
        (torch.tensor(2.0), "a Tensor"),
    ],
)
def test_anything_but_a_whole_number_is_refused(returned, shown):
    def increase(epoch, size):
        return returned if epoch == 2 else 0

    with pytest.raises(InputError) as caught:
        expand(increase, first_size=8, num_rows=10, num_samples=40)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{KEY}: {increase.__qualname__}(epoch=2, current_batch_size=8) returned {shown}"
    assert lines[1] == "  expected: a whole number of rows to add; 0 for none, negative to take some away"
    assert lines[2:] == (["  fix: round it: int(…)"] if isinstance(returned, float) else [])


def test_a_batch_without_a_row_is_refused():
    with pytest.raises(InputError) as caught:
        expand(Growing(-8), first_size=8, num_rows=10, num_samples=40)
    assert str(caught.value) == (
        f"{KEY}: Growing(epoch=0, current_batch_size=8) returned -8, which leaves 0 rows\n  expected: at least 1 row"
    )


def test_a_function_that_raises():
    def increase(epoch, size):
        return {}["rows"]

    with pytest.raises(InputError) as caught:
        expand(increase, first_size=8, num_rows=10, num_samples=40)
    assert str(caught.value) == (
        f"{KEY}: {increase.__qualname__}(epoch=0, current_batch_size=8) raised KeyError: 'rows'"
    )


def test_what_is_no_ordinary_exception_is_told_as_well():
    def increase(epoch, size):
        raise GeneratorExit("odd")

    with pytest.raises(InputError, match="raised GeneratorExit: odd"):
        expand(increase, first_size=8, num_rows=10, num_samples=40)


def test_ctrl_c_in_a_function_interrupts():
    def increase(epoch, size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        expand(increase, first_size=8, num_rows=10, num_samples=40)


def test_what_is_printed_leaves_standard_output_alone(module, capsys):
    name = module("print('imported')\ndef increase(epoch, size):\n    print('called')\n    return 1\n")
    expand(load_increase_function(f"{name}:increase"), first_size=8, num_rows=10, num_samples=10)
    assert tuple(capsys.readouterr()) == ("", "imported\ncalled\n")


def test_epochs_without_end_are_refused():
    with pytest.raises(InputError, match=rf"the run has more than {MAX_EPOCHS:,} epochs\n  fix: use trainer.batch_"):
        expand(lambda epoch, size: 0, first_size=8, num_rows=1, num_samples=10**12)


def test_what_it_answered_is_not_asked_again():
    asked = []

    def increase(epoch, current_batch_size):
        asked.append((epoch, current_batch_size))
        return current_batch_size

    first = expand(increase, first_size=8, num_rows=10, num_samples=30)
    assert asked == [(0, 8), (1, 16), (2, 32)]
    again = expand(increase, first_size=8, num_rows=10, num_samples=30, bound=16, known=first.answers)
    assert asked == [(0, 8), (1, 16), (2, 32), (2, 16)], "only where the bound led to another size"
    assert again.schedule == expand(increase, first_size=8, num_rows=10, num_samples=30, bound=16).schedule
