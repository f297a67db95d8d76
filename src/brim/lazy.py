"""Hand out a package's names when they are asked for, so that entering a package imports nothing (PEP 562).

The one table of the names is the package's stub, `__init__.pyi`, which type checkers read, too: lines such as
`from .finder import Found as Found`. `from . import errors as errors` hands out a module, in which a name that the
package lacks is looked for, so that the error says where it is.
"""

from __future__ import annotations

import ast
import gc
import sys
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
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level]
    modules = {alias.name: f"{package}.{node.module}" for node in imports if node.module for alias in node.names}
    inner = {alias.name: f"{package}.{alias.name}" for node in imports if not node.module for alias in node.names}

    def get(name: str) -> Any:
        if name in inner:
            return import_module(inner[name])
        if name not in modules:
            hints = (f": it is {place}.{name}" for place in inner.values() if hasattr(import_module(place), name))
            raise AttributeError(f"module {package!r} has no attribute {name!r}{''.join(hints)}")
        module = sys.modules.get(modules[name])
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        with importing():
            return getattr(import_module(modules[name]), name)

    return get, lambda: sorted(modules | inner), sorted(modules | inner)


@contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector, which takes a seventh of the time of imports and finds nothing in them.

    While the command starts, later collections leave out what was imported, too. Elsewhere, and once there are tensors,
    that would keep circles which hold some.
    """
    with without_collector():
        yield
        if freezes_imports:
            gc.freeze()


freezes_imports = False  # True while the command starts, until a model is loaded


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
