"""A picture as a file: PNG, or HTML with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brim.errors import OutputError, Problem
from brim.files import write_text
from brim.report.matplotlib_import import require_matplotlib
from brim.report.page import PageTable, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".html")
_DOTS_PER_INCH = 160


def check_picture(path: Path) -> None:
    """Refuse, before any work is done, a picture that could not be drawn or written.

    Raises OutputError for another ending or an unwritable folder, InputError where matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise OutputError(
            Problem(
                what=f"the picture's ending {path.suffix!r} is not known"
                if path.suffix
                else "the picture has no ending",
                where=str(path),
                expected=" or ".join(_SUFFIXES),
                fix="name the file memory.html, say",
            )
        )
    require_matplotlib()
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            Problem(
                what=f"the picture cannot be written: {error.strerror}",
                where=str(path),
                fix="name a file in a folder of yours",
            )
        ) from error


def save_picture(
    figure: Figure, path: Path, *, title: str, tables: Sequence[PageTable], lines: Sequence[str] = ()
) -> None:
    """Write the figure; an HTML file gets the tables and lines, too. An earlier picture of the name is replaced."""
    if path.suffix.lower() == ".png":
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    else:
        write_text(path, page(figure, title=title, tables=tables, lines=lines))
