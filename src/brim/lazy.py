"""Hand out a package's names when they are asked for, so that entering a package imports nothing (PEP 562).

The one table of the names is the package's stub, `__init__.pyi`, which type checkers read, too: lines such as
`from .finder import Found as Found`.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return what a package's `__init__` sets: `__getattr__`, `__dir__` and `__all__`.

    package, file: its `__name__` and `__file__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: f"{package}.{node.module}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with without_collector():
            return getattr(import_module(modules[name]), name)

    return get, lambda: sorted(modules), sorted(modules)


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector, which takes a seventh of the time of imports and finds nothing in them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
