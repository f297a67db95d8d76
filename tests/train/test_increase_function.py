"""Functions of the user's that move the batch from epoch to epoch."""

import functools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from brim.batching import Phase
from brim.errors import InputError
from brim.train.increase_function import MAX_EPOCHS, RefusedIncrease, expand, load_increase_function

KEY = "trainer.batch_increase_function"


def doubled(epoch, current_batch_size):
    return current_batch_size


class Growing:
    """An object that can be called."""

    def __call__(self, epoch, current_batch_size):
        return 3


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


def more(text):
    return f"def increase(epoch, current_batch_size):\n    return {text}\n"


def test_functions_of_modules_in_the_working_directory(module, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "brim_test_increase.py").write_text(more("1"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # the working directory comes first
    name = module(more("10 * epoch + current_batch_size"))
    before = list(sys.path)
    assert load_increase_function(f"{name}:increase")(2, 8) == 28
    assert sys.path == before
    (tmp_path / "brim_test_package").mkdir()
    module("class Given:\n    @staticmethod\n    def more(epoch, size):\n        return 3\n", "brim_test_package/inner")
    assert load_increase_function("brim_test_package.inner:Given.more")(1, 1) == 3


def test_what_is_a_function():
    anonymous, partial = lambda *given: 1, functools.partial(lambda rows, epoch, size: rows, 4)
    for function in (doubled, anonymous, Growing(), Growing().__call__, partial, functools.cache(doubled)):
        assert load_increase_function(function) is function


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import brim_no_such_module", "ModuleNotFoundError: No module named 'brim_no_such_module'"),
        ("def increase(:", "SyntaxError: invalid syntax (brim_test_increase.py, line 1)"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("increase = 3", "increase is of type int, not a function"),
        ("from os import kill as increase", "increase is not a function that is written in Python"),
        ("class increase:\n    def __init__(self, e, b): ...", "increase is not a function that is written in Python"),
        ("def increase(epoch): ...", "increase cannot be called with (epoch, current_batch_size): too many positional"),
        ("", "increase: {path}.py has no increase"),
    ],
)
def test_a_module_that_cannot_be_imported_and_what_is_not_a_function_of_two_numbers(module, tmp_path, text, told):
    name, is_found = module(text + "\n"), told.startswith("increase")
    found, told = refused(f"{name}:increase"), told.format(path=tmp_path / name)
    assert found.startswith(f"{KEY}: {name}:{told}" if is_found else f"{KEY}: importing {name} raised {told}")
    assert ("expected: a Python function of (epoch, current_batch_size)" in found) == is_found


def test_modules_that_are_not_there_or_pythons_own_which_are_not_imported_and_what_is_not_a_name(module, tmp_path):
    sys.modules.pop("antigravity", None)
    for name, told in {
        **dict.fromkeys(["os", "antigravity", "os.path"], "is a module of Python's standard library"),
        **dict.fromkeys(["scripts/increase.py", ".increase"], "is not the name of a module"),
    }.items():
        assert refused(f"{name}:f").startswith(f"{KEY}: {name} {told}")
    there_is_none = f"there is no module brim_no_such_module, neither in {tmp_path} nor among"
    assert refused("brim_no_such_module:f").startswith(f"{KEY}: {there_is_none}")
    assert "antigravity" not in sys.modules
    anonymous = refused(f"{module(more('0'))}:<lambda>")
    assert anonymous.endswith("  fix: pass the function itself again, from Python")


# What it comes to


def expanded(function, *, num_samples=40, bound=None, **others):
    """The sizes of its phases, from 8 rows over epochs of ten; and what the bound refused."""
    found = expand(function, first_size=8, num_rows=10, num_samples=num_samples, bound=bound, **others)
    return [phase.size for phase in found.schedule.phases], found.refused


def test_it_is_called_before_each_epoch_and_not_again_for_what_it_answered(module, capsys):
    calls = []

    def increase(epoch, current_batch_size):
        calls.append((epoch, current_batch_size))
        return 8 if epoch == 2 else 0

    first = expand(increase, first_size=8, num_rows=100, num_samples=400)
    assert calls == [(0, 8), (1, 8), (2, 8), (3, 16)]
    assert first.schedule.phases == (Phase(first_sample=0, size=8), Phase(first_sample=200, size=16))
    again = expand(increase, first_size=8, num_rows=100, num_samples=400, bound=10, known=first.answers)
    assert calls[4:] == [(3, 8)], "only where the bound led to another size"
    assert again.schedule == expand(increase, first_size=8, num_rows=100, num_samples=400, bound=10).schedule
    # What a function prints leaves standard output alone.
    name = module("print('imported')\ndef increase(epoch, size):\n    print('called')\n    return 1\n")
    expand(load_increase_function(f"{name}:increase"), first_size=8, num_rows=10, num_samples=10)
    assert tuple(capsys.readouterr()) == ("", "imported\ncalled\n")


def test_shrinking_bounds_and_whole_numbers_of_other_libraries():
    assert expanded(lambda epoch, size: -size // 2 if epoch else 0) == ([8, 4, 2, 1], ())  # to one row
    sizes, refusals = expanded(doubled, num_samples=50, bound=20)
    assert sizes == [16]
    assert refusals == tuple(RefusedIncrease(num_epochs=done, size=32) for done in (1, 2, 3, 4))
    assert expanded(doubled, num_samples=30, bound=64) == ([16, 32, 64], ())  # the bound itself is allowed
    assert expanded(lambda epoch, size: -1, num_samples=30, bound=4) == ([7, 6, 5], ())  # one below the first size
    for rows in (np.int64(3), torch.tensor(3)):
        sizes, _ = expanded(lambda epoch, size, rows=rows: rows, num_samples=20)
        assert [(size, type(size)) for size in sizes] == [(11, int), (14, int)]


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
    num_steps = by_samples.num_steps(num_rows=num_rows, total_samples=num_samples)
    by_steps = expand(increase, first_size=sizes[-1], num_rows=num_rows, num_steps=num_steps).schedule
    assert by_steps == by_samples


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "nothing"),
        (True, "True, a bool"),
        (0.5, "0.5, a float"),
        ("8", "a str"),
        (torch.tensor(2.0), "a Tensor"),
        (-8, "-8, which leaves 0 rows"),
    ],
)
def test_anything_but_a_whole_number_and_a_batch_without_a_row_are_refused(returned, shown):
    def increase(epoch, size):
        return returned if epoch == 2 else 0

    with pytest.raises(InputError) as caught:
        expanded(increase)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{KEY}: {increase.__qualname__}(epoch=2, current_batch_size=8) returned {shown}"
    assert ("a whole number of rows to add" in lines[1]) == (returned != -8)
    assert lines[2:] == (["  fix: round it: int(…)"] if isinstance(returned, float) else [])


def test_a_function_that_raises_ctrl_c_in_it_and_epochs_without_end():
    def raising(error):
        def increase(epoch, size):
            raise error

        return increase

    with pytest.raises(InputError, match=r"increase\(epoch=0, current_batch_size=8\) raised KeyError: 'rows'$"):
        expanded(raising(KeyError("rows")))
    with pytest.raises(InputError, match="raised GeneratorExit: odd"):  # not an ordinary exception
        expanded(raising(GeneratorExit("odd")))
    with pytest.raises(KeyboardInterrupt):
        expanded(raising(KeyboardInterrupt()))
    with pytest.raises(InputError, match=rf"the run has more than {MAX_EPOCHS:,} epochs\n  fix: use trainer.batch_"):
        expand(lambda epoch, size: 0, first_size=8, num_rows=1, num_samples=10**12)
