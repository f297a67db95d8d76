"""matplotlib, where it is installed, drawing without a screen."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from brim.errors import InputError, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float, *, paper: str) -> Figure:
    """An empty figure whose texts can be measured. Raises InputError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Shown(Figure):
        """In a notebook its picture is shown, whether or not pyplot was imported there."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    figure = Shown(figsize=(width_inches, height_inches), facecolor=paper)
    FigureCanvasAgg(figure)
    return figure


def require_matplotlib() -> None:
    """Raise InputError, with the command to install it, where there is none."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            Problem(
                what=f"a picture needs matplotlib, which cannot be imported: {error}",
                fix="pip install 'brim[plots]', or do without the picture",
            )
        ) from error
