"""Instruction rows from the Python standard library: a docstring and a signature ask for the function's source.

    python examples/stdlib_code/dataset.py stdlib_code.jsonl

The library is read from this machine, so rows differ a little between Python versions. The split does not: it is a
hash of the module's name, so that a module is held out on every machine and in every version, or nowhere.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

TRAIN, VALIDATION, TEST = 0, 1, 2

# Of 100 hash buckets. Packages differ in size: these give 80%, 8% and 12% of the rows under Python 3.11. They were set
# by these shares alone, before anything was trained, and must stay: the shipped base model has read the training part.
_TRAIN_BUCKETS, _VALIDATION_BUCKETS = 66, 10
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_PRETRAINING_VALIDATION_ONE_IN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One source file of the standard library."""

    name: str  # dotted: "asyncio.tasks"
    text: str
    tree: ast.Module
    split: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One function: what it does, how it is called, how it is written."""

    module: str
    qualname: str
    instruction: str
    input: str
    output: str
    split: int


def instruction_rows(modules: Iterable[Module]) -> list[Row]:
    """One row for each function and method that has a docstring and a body, in the order of the modules.

    A row that was there before is left out, and so is a held-out function that stands, word for word, in a training
    module: the base model has read that one.
    """
    rows = [row for module in modules for row in _rows_of(module)]
    seen_in_training = {row.output for row in rows if row.split == TRAIN}
    unique: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if row.split == TRAIN or row.output not in seen_in_training:
            unique.setdefault((row.instruction, row.input, row.output), row)
    return list(unique.values())


def pretraining_rows(modules: Iterable[Module], *, max_characters: int = 1600) -> list[dict[str, str | int]]:
    """The text of the training modules as rows {prompt: "", completion, split}.

    Every fiftieth piece is for validation. Held-out modules are not in it.
    """
    texts = [piece for module in modules if module.split == TRAIN for piece in pieces(module, max_characters)]
    return [
        {
            "prompt": "",
            "completion": text,
            "split": VALIDATION if number % _PRETRAINING_VALIDATION_ONE_IN == 0 else TRAIN,
        }
        for number, text in enumerate(texts, start=1)
    ]


def pieces(module: Module, max_characters: int) -> Iterator[str]:
    """A module's text in pieces of about max_characters.

    They end where a statement of the module or of a class ends; a longer statement is cut between lines, and a table
    (an assignment that is longer than a piece) is left out.
    """
    lines = [f"{line}\n" for line in module.text.split("\n")]
    starts = {_start(statement, lines): statement for statement in _statements(module.tree)}
    blocks: list[str] = []
    for begin, end in pairwise(sorted({0, *starts, len(lines)})):
        block = lines[begin:end]
        is_table = isinstance(starts.get(begin), ast.Assign | ast.AnnAssign) and sum(map(len, block)) > max_characters
        if not is_table:
            blocks += _packed(block, max_characters)
    for piece in _packed(blocks, max_characters):
        if piece.strip():
            yield piece.strip("\n")


def stdlib_modules(folder: Path | None = None) -> list[Module]:
    """Every module of the standard library that is UTF-8 and parses, sorted by name; no tests, nothing installed."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    modules = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or _SKIPPED_FOLDERS.intersection(parts):
            continue
        name = ".".join(parts).removesuffix(".__init__")
        parsed = _parse(path)
        if parsed is not None:
            text, tree = parsed
            modules.append(Module(name=name, text=text, tree=tree, split=split_of(name)))
    return sorted(modules, key=lambda module: module.name)


def split_of(module: str) -> int:
    """The split of a module, by a hash of its top-level name: TRAIN, VALIDATION or TEST.

    `_pydecimal` is `decimal` in Python, `_pyio` is `io`: each belongs with its twin, or one would give the other away.
    """
    top_level = module.split(".")[0]
    family = top_level.removeprefix("_py").lstrip("_") or top_level
    bucket = int.from_bytes(hashlib.sha256(family.encode()).digest()[:8], "big") % 100
    if bucket < _TRAIN_BUCKETS:
        return TRAIN
    return VALIDATION if bucket < _TRAIN_BUCKETS + _VALIDATION_BUCKETS else TEST


def write_jsonl(rows: Iterable[Row | dict[str, str | int]], path: Path) -> None:
    """One JSON object a line, in UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            fields = asdict(row) if isinstance(row, Row) else row
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _parse(path: Path) -> tuple[str, ast.Module] | None:
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            return text, ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None


def _rows_of(module: Module) -> Iterator[Row]:
    lines = module.text.split("\n")
    for qualname, function in _functions(module.tree, prefix=""):
        docstring = ast.get_docstring(function, clean=False)
        if docstring is None or not docstring.strip():
            continue
        source = _without_docstring(function, lines)
        if source is not None:
            header, output = source
            yield Row(
                module=module.name,
                qualname=qualname,
                instruction=inspect.cleandoc(docstring).strip(),
                input=header,
                output=output,
                split=module.split,
            )


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of a module and methods of its classes, also those under an `if` or `try`; none inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _without_docstring(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]
) -> tuple[str, str] | None:
    """(header, header and body), dedented; None where nothing but the docstring is there, or lines are shared."""
    docstring, *body = function.body
    assert docstring.end_lineno is not None
    assert function.end_lineno is not None
    if not body or body[0].lineno <= docstring.end_lineno:
        return None
    first_line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    header = _dedent(lines[first_line - 1 : docstring.lineno - 1], function.col_offset)
    rest = _dedent(lines[docstring.end_lineno : function.end_lineno], function.col_offset)
    return header, header + "\n" + rest.lstrip("\n")


def _dedent(lines: Sequence[str], columns: int) -> str:
    """The lines without their common indentation. Text in long strings may have less and loses what it has."""
    return "\n".join(line[columns:] if not line[:columns].strip() else line for line in lines).rstrip()


def _packed(parts: Iterable[str], max_characters: int) -> Iterator[str]:
    """Neighbours joined as long as they stay within max_characters. One part that is longer stays alone."""
    joined = ""
    for part in parts:
        if joined and len(joined) + len(part) > max_characters:
            yield joined
            joined = ""
        joined += part
    if joined:
        yield joined


def _statements(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for statement in node.body:
        yield statement
        if isinstance(statement, ast.ClassDef):
            yield from _statements(statement)


def _start(statement: ast.stmt, lines: Sequence[str]) -> int:
    """The index of a statement's first line: of its decorators, and of the comments directly above."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    start = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return start


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "stdlib_code.jsonl")
    rows = instruction_rows(stdlib_modules())
    write_jsonl(rows, path)
    counts = [sum(row.split == split for row in rows) for split in (TRAIN, VALIDATION, TEST)]
    print(f"{path}: {len(rows)} rows ({counts[0]} training, {counts[1]} validation, {counts[2]} test)")


if __name__ == "__main__":
    main()
