"""List the docstrings whose first line has no verb: `python -m tools.words [PATH …]`.

A docstring begins with what is done ("Return the rows that …", "Hold a finished run."), or is a sentence with a subject
and a verb ("Rows are padded to the longest."). A noun phrase ("The rows of a batch.") or a clause ("What a run takes.")
is neither. The verbs are those of tools/verbs.txt; a new one is added there. Exit status 1: more are found than `MOST`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "brim"
MOST = 20

VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text(encoding="utf-8").split())

# Forms of verbs that are no nouns, which make a sentence unless a clause came before.
_FINITE = re.compile(
    r"\b(is|are|was|were|be|has|have|had|does|do|did|can|could|may|might|must|will|would|should|cannot|needs?|takes?"
    r"|comes?|goes|gives?|makes?|stands?|holds?|says?|becomes?|stays?|ends?|begins?|follows?|depends?|lies?|fits?"
    r"|grows?|falls?|reads?|writes?|keeps?|knows?|shows?|tells?|asks?|uses?|adds?)\b"
)  # fmt: skip
_CLAUSE = re.compile(r"\b(that|which|who|whose|whom|what|where|whether|how|why|when|as|whatever|than)\b", re.IGNORECASE)


def has_verb(docstring: str) -> bool:
    """Return whether the first line of a docstring does: an imperative at its beginning, or a sentence."""
    line = docstring.strip().split("\n")[0]
    first = re.match(r"[A-Za-z]+", line)
    if first is not None and first[0].lower() in VERBS:
        return True
    finite, clause = _FINITE.search(line), _CLAUSE.search(line)
    return finite is not None and (clause is None or finite.start() < clause.start())


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a module with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def main(arguments: Sequence[str] | None = None) -> int:
    paths = [Path(each) for each in (sys.argv[1:] if arguments is None else arguments)] or [SOURCE]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    num_all = num_without = 0
    for file in files:
        for line, text in docstrings(file):
            num_all += 1
            if not has_verb(text):
                num_without += 1
                print(f"{file}:{line}: {text.splitlines()[0]}")
    print(f"{num_without:,} of {num_all:,} docstrings have no verb in their first line")
    return int(num_without > MOST)


if __name__ == "__main__":
    sys.exit(main())
