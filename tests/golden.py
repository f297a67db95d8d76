"""Golden files: a whole table or screen as people read it, kept in tests/golden and written anew by one command.

    python -m pytest --write-golden

Read the difference before it is committed: a golden file asserts what stands in it, nothing more.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


class Golden:
    """Compares a text with a file of tests/golden, or writes it there."""

    def __init__(self, *, write: bool, folder: Path = FOLDER) -> None:
        self._write, self._folder = write, folder

    def __call__(self, name: str, text: str) -> None:
        """Fail unless the file holds the text; trailing blanks of a line do not count."""
        path = self._folder / name
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if self._write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"{name}: no such golden file; pytest --write-golden makes it"
        assert text.splitlines() == path.read_text(encoding="utf-8").splitlines(), f"differs from tests/golden/{name}"
