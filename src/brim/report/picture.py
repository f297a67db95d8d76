"""Write a picture as a file: PNG, or one HTML file that holds its numbers, too, and needs nothing else.

The page follows the reader's light or dark theme. matplotlib, where it is installed, draws without a screen.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from brim.errors import OutputError, require_extra
from brim.storage import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SUFFIXES = (".png", ".html")


_DOTS_PER_INCH = 160


def check_picture(path: Path) -> None:
    """Refuse, before any work is done, a picture that could not be drawn or written.

    Raises OutputError for another ending or an unwritable folder, InputError where matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise OutputError(
            what=f"the picture's ending {path.suffix!r} is not known" if path.suffix else "the picture has no ending",
            where=str(path),
            expected=" or ".join(_SUFFIXES),
            fix="name the file memory.html, for example",
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
            what=f"the picture cannot be written: {error.strerror}",
            where=str(path),
            fix="name a file in a folder that you can write to",
        ) from error


def save_picture(
    figure: Figure, path: Path, *, title: str, tables: Sequence[PageTable], lines: Sequence[str] = ()
) -> None:
    """Write the figure; an HTML file gets the tables and lines, too. An earlier picture of that name is replaced."""
    if path.suffix.lower() == ".png":
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    else:
        write_text(path, page(figure, title=title, tables=tables, lines=lines))


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1b; --paper: #fefefd; --faint: #8a8a8b; --line: #d8d8d8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --paper: #17181a; --faint: #9a9a9c; --line: #3a3b3d; }
}
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1.5rem 0; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
i { display: inline-block; width: .8em; height: .8em; margin-right: .5em; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Hold a table of the page."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    colours: Sequence[str] = ()  # one for each row, shown as a square before its first cell; empty: no squares
    num_texts: int = 1  # cells at the left of a row that are words; the others are numbers

    def markdown(self) -> str:
        """Write the table in GitHub's Markdown, with its caption above it."""
        rules = ["---:" if is_number else "---" for is_number in _numbers(self)]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (self.heads, rules, *self.rows)]
        return "\n".join([f"{self.caption}:", "", *(f"| {line} |" for line in lines)])


def page(figure: Figure, *, title: str, tables: Sequence[PageTable], lines: Sequence[str] = ()) -> str:
    """Return the text of the HTML file."""
    body = "\n".join([f'<div class="scroll">{svg(figure)}</div>', *(f"<p>{escape(line)}</p>" for line in lines)])
    below = "\n".join(_table(table) for table in tables)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n{below}\n</body>\n</html>\n"
    )


def svg(figure: Figure) -> str:
    """Return the figure as SVG, with ink and paper in the page's colours. Equal figures give equal texts."""
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "brim", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, name in ((INK, "ink"), (PAPER, "paper"), (FAINT, "faint")):
        text = re.sub(colour, f"var(--{name})", text, flags=re.IGNORECASE)
    return text


def _table(table: PageTable) -> str:
    heads = "".join(_cell("th", head, number) for number, head in zip(_numbers(table), table.heads, strict=True))
    rows = []
    for position, row in enumerate(table.rows):
        mark = f'<i style="background:{table.colours[position]}"></i>' if table.colours else ""
        cells = [_cell("td", cell, number) for number, cell in zip(_numbers(table), row, strict=True)]
        rows.append("<tr>" + "".join(cells).replace("<td>", f"<td>{mark}", 1) + "</tr>")
    return (
        f'<div class="scroll"><table>\n<caption>{escape(table.caption)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table></div>"
    )


def _numbers(table: PageTable) -> list[bool]:
    return [column >= table.num_texts for column in range(len(table.heads))]


def _cell(tag: str, text: str, is_number: bool) -> str:
    attribute = ' class="number"' if is_number else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


INK, PAPER, FAINT = "#1A1A1B", "#FEFEFD", "#8A8A8B"  # used for nothing else, so that a page can replace them by its own


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure whose texts can be measured. Raises InputError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Shown(Figure):
        """Show the picture in a notebook, whether or not pyplot was imported there."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    figure = Shown(figsize=(width_inches, height_inches), facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def frame(axes: Axes, *, below: str, text: Callable[[float], str]) -> None:
    """Give axes faint lines, a label below, and numbers that `text` writes."""
    axes.set_xlabel(below, color=INK)
    axes.tick_params(colors=INK, labelcolor=INK)
    axes.xaxis.set_major_formatter(lambda value, _: text(value))
    axes.grid(axis="y", color=FAINT, lw=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_color(FAINT)
        spine.set_visible(name in ("left", "bottom"))


def require_matplotlib() -> None:
    """Raise InputError, with the command to install it, where there is none."""
    require_extra("plots", "matplotlib", what="a picture", otherwise="do without the picture")
