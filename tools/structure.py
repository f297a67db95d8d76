"""Read the structure of src/brim from its text: modules, what they import, the names that packages hand out, sizes.

Nothing of brim is imported, so that a house that does not start can be looked at. The architecture test and
`make sizes` read from here. An import of a name from a package is one of the module that defines it, as the package's
stub says.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

# From the lowest to the highest: a module imports from its own layer and from those before it.
LAYERS = (
    "lazy",
    "errors",
    "units",
    "notes",
    "storage",
    "config",
    "batching",
    "models",
    "data",
    "session",
    "distributed",
    "train",
    "infer",
    "memory",
    "planning",
    "report",
    "workflows",
    "model",
    "cli",
    "__main__",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Describe a name that is imported when the module, or a function of it, runs."""

    source: str  # the module or package that the statement names
    module: str  # the module that defines the name
    name: str | None  # None: the module itself
    line: int
    is_relative: bool = False


@dataclass(frozen=True, kw_only=True)
class Module:
    """Describe a file of the package that is not an `__init__`."""

    name: str  # dotted: brim.batching.memory.finder
    path: Path

    @property
    def package(self) -> str:
        """Return the package that it lies in; a module at the root is a package of its own."""
        above, _, _ = self.name.rpartition(".")
        return self.name if above == "brim" else above

    @property
    def layer(self) -> str:
        return self.name.split(".")[1]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def num_code_lines(self) -> int:
        """Count the lines that are neither blank, comment nor docstring."""
        return len(_code_lines(self.text, self.tree))

    @cached_property
    def num_import_lines(self) -> int:
        """Count the lines of import statements, those for type checkers included."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom))
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)

    @cached_property
    def function_lines(self) -> tuple[int, ...]:
        """Lines of each function and method, from `def` to its end."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return tuple((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


@dataclass(frozen=True, kw_only=True)
class House:
    """Hold all modules, and what each package hands out."""

    modules: tuple[Module, ...]
    faces: dict[str, dict[str, str]]  # of each package: a name, and the module that defines it

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(module.name for module in self.modules)

    def packages(self) -> dict[str, list[Module]]:
        """The modules of each package; those at the root are packages of one module."""
        found: dict[str, list[Module]] = {}
        for module in self.modules:
            found.setdefault(module.package, []).append(module)
        return found

    def imports(self, module: Module) -> Iterator[Import]:
        """Yield what a module imports of brim at run time, within functions, too; not what only type checkers read."""
        for node in _at_run_time(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("brim."):
                        yield Import(source=alias.name, module=alias.name, name=None, line=node.lineno)
            elif node.level:
                yield Import(source="", module="", name=None, line=node.lineno, is_relative=True)
            elif node.module is not None and node.module.split(".")[0] == "brim":
                for alias in node.names:
                    yield self._of_name(node.module, alias.name, node.lineno)

    def _of_name(self, source: str, name: str, line: int) -> Import:
        inner = f"{source}.{name}"
        if inner in self.names:
            return Import(source=inner, module=inner, name=None, line=line)
        return Import(source=source, module=self.faces.get(source, {}).get(name, source), name=name, line=line)


def read_house(source: Path = SOURCE) -> House:
    """Read the package that lies in the folder."""
    modules, faces = [], {}
    for path in sorted((source / "brim").rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts)
        if path.name == "__init__.py":
            faces[name.removesuffix(".__init__")] = _face(path)
        else:
            modules.append(Module(name=name, path=path))
    return House(modules=tuple(modules), faces=faces)


def _face(path: Path) -> dict[str, str]:
    """Return the names of a package's stub, which is the one table of what it hands out."""
    stub = path.with_suffix(".pyi")
    if not stub.exists():
        return {}
    package = ".".join(path.parent.parts[path.parent.parts.index("brim") :])
    found = (node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom))
    return {
        alias.asname or alias.name: f"{package}.{node.module or alias.name}" for node in found for alias in node.names
    }


def _at_run_time(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from _at_run_time(node)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found
