"""matplotlib, where it is installed, drawing without a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.errors import InputError, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float, *, paper: str) -> Figure:
    """An empty figure whose texts can be measured. Raises InputError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), facecolor=paper)
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
                where="--plot",
                fix="pip install 'brim[plots]', or leave --plot out",
            )
        ) from error
