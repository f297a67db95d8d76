"""Call `trainer.batch_increase_function`, the user's own, for every epoch before training begins."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.batching import BatchSchedule
from brim.errors import InputError

_KEY = "trainer.batch_increase_function"


_SIGNATURE = "a Python function of (epoch, current_batch_size) that returns how many rows to add"


# Each epoch is a call, and may be a phase that every checkpoint holds.
MAX_EPOCHS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedIncrease:
    """Hold what the function asked for and the bound did not allow."""

    num_epochs: int  # done by then
    size: int  # rows that there would have been


@dataclass(frozen=True, slots=True, kw_only=True)
class Increases:
    """Hold the schedule that a function leads to, and its answers."""

    schedule: BatchSchedule
    refused: tuple[RefusedIncrease, ...]
    num_epochs: int  # for which it was asked
    answers: Mapping[tuple[int, int], int]  # rows to add, by epochs done and present size


def load_increase_function(function: str | Callable[..., Any]) -> Callable[[int, int], object]:
    """Return the function that the key names as `module:function`, or is.

    The module is looked for as by `python -m`: in the working directory, and among the installed packages.
    Raises InputError where it cannot be imported, has no such name, or where that is not a Python function of two
    numbers. The standard library's functions and compiled ones are refused, so that a configuration alone cannot act on
    the machine.
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
        found = _attribute(_imported(module.strip()), name.strip(), function)
    else:
        found = function
    return _checked(found, function if isinstance(function, str) else _described(function))


def expand(
    function: Callable[[int, int], object],
    *,
    first_size: int,
    num_rows: int,
    num_samples: int | None = None,
    num_steps: int | None = None,
    bound: int | None = None,
    known: Mapping[tuple[int, int], int] | None = None,
) -> Increases:
    """Call the function at the start of each epoch, the first included, as f(epochs done, present size), in order.

    What it returns is added where the sum is at most `bound` (None: always) or no increase; else the size stays.
    num_samples, num_steps: the end of the run, given as one of them. known: what it answered, and is not asked again.
    Raises InputError where it raises, returns something other than a whole number, or would leave no row.
    What it prints goes to standard error, since standard output may be JSON.
    """
    assert (num_samples is None) != (num_steps is None), "a run has one end"
    answers = dict(known or {})
    sizes: list[int] = []
    refused: list[RefusedIncrease] = []
    size, steps = first_size, 0
    while steps < num_steps if num_steps is not None else len(sizes) * num_rows < (num_samples or 0):
        done = len(sizes)
        if done >= MAX_EPOCHS:
            raise _error(f"the run has more than {MAX_EPOCHS:,} epochs", fix="use trainer.batch_schedule instead")
        if (done, size) not in answers:
            answers[done, size] = _increase(function, done, size)
        wanted = size + answers[done, size]
        if bound is not None and wanted > max(bound, size):
            refused.append(RefusedIncrease(num_epochs=done, size=wanted))
            wanted = size
        size = wanted
        sizes.append(size)
        steps += -(-num_rows // size)
    schedule = BatchSchedule.of((epoch * num_rows, size) for epoch, size in enumerate(sizes))
    return Increases(schedule=schedule, refused=tuple(refused), num_epochs=len(sizes), answers=answers)


def _increase(function: Callable[[int, int], object], epoch: int, size: int) -> int:
    """Ask for the rows to add, which leave at least one."""
    call = f"{_described(function)}(epoch={epoch}, current_batch_size={size})"
    try:
        with redirect_stdout(sys.stderr):
            returned = function(epoch, size)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever the user's code raises ends the run before it begins, as their mistake and with its name.
        raise _error(f"{call} raised {_raised(error)}") from error
    try:
        rows = None if isinstance(returned, bool) else operator.index(returned)  # type: ignore[arg-type]
    except TypeError:
        rows = None
    if rows is None:
        raise _no_whole_number(call, returned)
    if size + rows < 1:
        raise _error(f"{call} returned {rows}, which leaves {size + rows} rows", expected="at least 1 row")
    return rows


def _no_whole_number(call: str, returned: object) -> InputError:
    shown = f"{returned!r}, a " if isinstance(returned, (bool, float)) else "a "
    return _error(
        f"{call} returned " + ("nothing" if returned is None else f"{shown}{type(returned).__name__}"),
        expected="a whole number of rows to add; 0 for none, negative to take some away",
        fix="round it: int(…)" if isinstance(returned, float) else "",
    )


def _imported(name: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise _error(
            f"{name} is not the name of a module",
            expected="module:function, such as mymodule:increase for the function increase of mymodule.py",
        )
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise _error(
            f"{name} is a module of Python's standard library",
            expected="a module of yours",
            fix="if yours has that name, rename it",
        )
    try:
        with _working_directory_first(), redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _error(f"importing {name} raised {_raised(error)}") from error
        raise _error(
            f"there is no module {name}, neither in {Path.cwd()} nor among the installed packages",
            fix=f"run brim in the folder of {name.replace('.', '/')}.py, or add that folder to PYTHONPATH",
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Importing runs whatever stands in the module.
        raise _error(f"importing {name} raised {_raised(error)}") from error


@contextmanager
def _working_directory_first() -> Iterator[None]:
    """Search the working directory first, as `python -m` does, unless Python was started with -P."""
    before = list(sys.path)
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()  # the file may be younger than this process
    try:
        yield
    finally:
        sys.path[:] = before


def _attribute(module: types.ModuleType, name: str, given: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            place = getattr(module, "__file__", None) or module.__name__
            nameless = "pass the function itself again, from Python" if "<" in name else ""
            raise _error(f"{given}: {place} has no {name}", expected=_SIGNATURE, fix=nameless) from None
    return found


def _checked(function: Any, given: str) -> Callable[[int, int], object]:
    if not callable(function):
        raise _error(f"{given} is of type {type(function).__name__}, not a function", expected=_SIGNATURE)
    if not _is_written_in_python(function):
        raise _error(f"{given} is not a function that is written in Python", expected=_SIGNATURE)
    try:
        inspect.signature(function).bind(1, 1)
    except (TypeError, ValueError) as error:
        raise _error(
            f"{given} cannot be called with (epoch, current_batch_size): {error}", expected=_SIGNATURE
        ) from None
    checked: Callable[[int, int], object] = function
    return checked


def _is_written_in_python(function: Any) -> bool:
    """Accept functions, methods and objects that can be called; not classes, whose instances are not numbers."""
    function = inspect.unwrap(function)  # as functools.cache wraps one
    if isinstance(function, functools.partial):
        return _is_written_in_python(function.func)
    if isinstance(function, types.MethodType):
        return isinstance(function.__func__, types.FunctionType)
    if isinstance(function, types.FunctionType):
        return True
    return not isinstance(function, type) and isinstance(type(function).__call__, types.FunctionType)


def _described(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _raised(error: BaseException) -> str:
    message = " ".join(str(error).split())
    shown = message if len(message) <= _LONGEST_SHOWN else message[: _LONGEST_SHOWN - 1] + "…"
    return f"{type(error).__name__}: {shown}" if message else type(error).__name__


_LONGEST_SHOWN = 200  # characters


def _error(what: str, *, expected: str = "", fix: str = "") -> InputError:
    return InputError(what=what, where=_KEY, expected=expected, fix=fix)
