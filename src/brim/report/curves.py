"""Plot losses over tokens: of several configurations, each as a mean over seeds with a band, or of one run.

With several seeds, each point shows the mean, the lowest and the highest loss. Where a seed is harder, or easier, for
all configurations alike, that effect is removed from their curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brim.report.comparison import Runs
from brim.report.picture import INK, PAPER, frame, new_figure
from brim.train import Curve, RunFigures

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, as in report/memory.py; the colours that are easiest to tell apart as lines come first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # of the first six, the next six, and so on


_MOST_BINS = 50  # of a training curve; with more, noise hides the curve


_LEAST_BINS = 2


_SEEN_FROM = 0.1  # of the tokens; higher losses than those from there on belong to the fall of the first steps


_MARGIN = 0.06


_LEGEND_LINE = 0.042  # of the figure's height


_LEGEND_CHARACTERS = 125  # that fit on one line


def curves_plot(runs: Mapping[str, Runs], *, title: str, subtitle: str) -> Figure:
    """Plot the training losses, and the validation losses if every run has several."""
    shown = {name: found for name, found in runs.items() if found}
    figure = new_figure(12, 6.2)
    figure.text(0.065, 0.965, title, size=14, weight="bold", color=INK, va="top", parse_math=False)
    figure.text(0.065, 0.91, subtitle, size=10, color=INK, va="top", parse_math=False)
    num_lines = _legend(figure, list(shown))
    panels = _panels(shown)
    most_tokens = max((run.num_tokens for found in shown.values() for run in found.values()), default=1)
    width = (0.90 - 0.07 * (len(panels) - 1)) / max(len(panels), 1)
    height = 0.70 - num_lines * _LEGEND_LINE
    for number, (label, curves) in enumerate(panels):
        axes = figure.add_axes((0.065 + number * (width + 0.07), 0.105, width, height), facecolor=PAPER)
        axes.set_xlim(0, 1.01 * most_tokens)
        is_cut = _draw(axes, curves, with_points=label.startswith("validation"))
        _frame(axes, f"{label} (the first steps lie above)" if is_cut else label)
    return figure


def history_plot(history: pd.DataFrame, *, title: str) -> Figure:
    """Plot the losses of one run over its steps, and below them its learning rate and a changing effective batch.

    history: as `brim.train.figures.history` gives it.
    """
    is_step = (history["split"] == "train") & history["learning_rate"].notna()
    steps = history[is_step & history["loss"].notna()]
    figure = new_figure(9, 6)
    figure.text(0.09, 0.965, title, size=14, weight="bold", color=INK, va="top", parse_math=False)
    losses = figure.add_axes((0.09, 0.40, 0.86, 0.42), facecolor=PAPER)
    _draw_losses(losses, steps, history[~is_step & history["loss"].notna()])
    _frame(losses, "loss, nats a supervised token", over="")
    figure.legend(
        loc="upper left",
        bbox_to_anchor=(0.08, 0.925),
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderpad=0.1,
    )
    panels = [("learning rate", steps["learning_rate"])]
    sizes = _without_ends_of_epochs(steps["effective_batch_size"])
    if sizes.nunique() > 1:
        panels.append(("effective batch, rows", sizes))
    width = 0.86 if len(panels) == 1 else 0.39
    for number, (label, figures) in enumerate(panels):
        axes = figure.add_axes((0.09 + 0.47 * number, 0.09, width, 0.19), facecolor=PAPER, sharex=losses)
        axes.plot(steps["step"][figures.index], figures, color=INK, lw=1.4, drawstyle="steps-post")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _frame(axes, label, over="step")
    return figure


def _without_ends_of_epochs(sizes: pd.Series) -> pd.Series:
    """Drop the batches that take what is left of an epoch: those smaller than both of their neighbours."""
    after = sizes.shift(-1)
    return sizes[~((sizes < sizes.shift(1)) & ((sizes < after) | after.isna()))]


def _draw_losses(axes: Axes, steps: pd.DataFrame, evaluations: pd.DataFrame) -> None:
    """Draw the steps faintly, the means of `_MOST_BINS` stretches over them, and each evaluation as a point."""
    if len(steps) > 2 * _MOST_BINS:
        axes.plot(steps["step"], steps["loss"], color=COLOURS[0], lw=0.7, alpha=0.35)
        points = Curve(
            tokens=tuple(steps["step"]), loss=tuple(steps["loss"]), weights=tuple(steps["effective_batch_size"])
        )
        mean = points.binned(_MOST_BINS)
        middles = [(start + end) / 2 for start, end in zip((0, *mean.tokens), mean.tokens, strict=False)]
        axes.plot(middles, mean.loss, color=COLOURS[0], lw=1.8, label=f"training, in {_MOST_BINS} stretches")
    else:
        axes.plot(steps["step"], steps["loss"], color=COLOURS[0], lw=1.4, marker=".", label="training")
    for number, (split, found) in enumerate(evaluations.groupby("split", sort=False), start=1):
        label = "training rows, evaluated" if split == "train" else str(split)
        axes.plot(found["step"], found["loss"], color=COLOURS[number], lw=1.4, marker="o", ms=5, label=label)


def look(number: int) -> tuple[str, object]:
    """Return the colour and line style of a configuration. number: from 0."""
    return COLOURS[number % len(COLOURS)], _STYLES[number // len(COLOURS) % len(_STYLES)]


def _panels(shown: Mapping[str, Runs]) -> list[tuple[str, list[MeanCurve]]]:
    every = [run for found in shown.values() for run in found.values()]
    panels = []
    if all(len(run.validation_curve.tokens) > 1 for run in every):
        curves = [of_evaluations(found) for found in _demeaned(shown, lambda run: run.validation_curve)]
        panels.append(("validation loss", curves))
    if all(run.train_curve.tokens for run in every):
        # As many stretches as the run with the fewest steps can fill, so that all are averaged alike.
        fewest = min(len(run.train_curve.tokens) for run in every)
        num_bins = min(max(fewest, _LEAST_BINS), _MOST_BINS)
        curves = [of_training(found, num_bins=num_bins) for found in _demeaned(shown, lambda run: run.train_curve)]
        panels.append((f"training loss, in {num_bins} equal stretches", curves))
    return panels


def _demeaned(shown: Mapping[str, Runs], curve_of: Callable[[RunFigures], Curve]) -> Iterable[list[Curve]]:
    by_seed = {name: {seed: curve_of(run) for seed, run in found.items()} for name, found in shown.items()}
    return demeaned(by_seed).values()


def _draw(axes: Axes, curves: Sequence[MeanCurve], *, with_points: bool) -> bool:
    """Draw curves with their bands; return whether part of a curve lies above the axes."""
    for number, curve in enumerate(curves):
        colour, style = look(number)
        axes.fill_between(curve.tokens, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if with_points or len(curve.tokens) == 1 else ""
        axes.plot(curve.tokens, curve.mean, color=colour, lw=1.8, ls=style, marker=marker, ms=3.5)
    return _limit(axes, curves)


def _limit(axes: Axes, curves: Sequence[MeanCurve]) -> bool:
    """Fit the axes to the losses after the first fall; return whether part of a curve lies above them."""
    ends = max(curve.tokens[-1] for curve in curves)
    late = [curve.tokens >= _SEEN_FROM * ends for curve in curves]
    low = min(float(curve.low[kept].min()) for curve, kept in zip(curves, late, strict=True) if kept.any())
    high = max(float(curve.high[kept].max()) for curve, kept in zip(curves, late, strict=True) if kept.any())
    margin = _MARGIN * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - margin, high + margin)
    return any(bool(np.any(curve.mean > high + margin)) for curve in curves)


def _frame(axes: Axes, label: str, *, over: str = "tokens") -> None:
    axes.set_title(label, loc="left", size=10, color=INK)
    axes.tick_params(labelsize=9)
    frame(axes, below=over, text=_short)


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def _legend(figure: Figure, names: Sequence[str]) -> int:
    """Draw the legend; return how many lines it takes."""
    from matplotlib.lines import Line2D

    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), _LEGEND_CHARACTERS // (longest + 8)))
    lines = []
    for number, name in enumerate(names):
        colour, style = look(number)
        lines.append(Line2D([], [], color=colour, lw=2.2, ls=style, label=name))
    legend = figure.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(0.056, 0.885),
        ncols=columns,
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        handlelength=1.8,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return -(-len(names) // columns)


def demeaned(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, list[Curve]]:
    """Move all curves of a seed by the same amount, to the mean level of the seeds. curves: by configuration and seed.

    A seed's split and sample can differ more from those of another seed than any two configurations do. Differences are
    paired by seed, and so are bands around curves that have been moved: the differences between configurations stay as
    they are (Cousineau 2005, Tutorials in Quantitative Methods for Psychology 1(1)). Seeds that not all configurations
    have, or in which a loss is not a number, are left where they are.
    """
    common = set.intersection(*(set(of_seeds) for of_seeds in curves.values())) if curves else set()
    levels = {seed: float(np.mean([_level(of_seeds[seed]) for of_seeds in curves.values()])) for seed in common}
    levels = {seed: level for seed, level in levels.items() if math.isfinite(level)}
    middle = float(np.mean(list(levels.values()))) if levels else 0.0
    return {
        name: [_moved(curve, middle - levels.get(seed, middle)) for seed, curve in of_seeds.items()]
        for name, of_seeds in curves.items()
    }


def _level(curve: Curve) -> float:
    return float(np.average(curve.loss, weights=curve.weights))


def _moved(curve: Curve, by: float) -> Curve:
    return replace(curve, loss=tuple(loss + by for loss in curve.loss))


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanCurve:
    """Hold a mean curve with its band, in the order of tokens; each array is [P]."""

    tokens: Floats
    mean: Floats
    low: Floats
    high: Floats


def of_training(curves: Sequence[Curve], *, num_bins: int) -> MeanCurve:
    """Average training losses over supervised tokens in stretches of equally many tokens, each placed at its middle.

    A stretch in which a run has no point (its steps are longer) takes the mean of the others.
    """
    by_run = np.full((len(curves), num_bins), np.nan)
    for row, curve in enumerate(curves):
        by_run[row] = _in_bins(curve, num_bins)
    ends = np.array([curve.tokens[-1] for curve in curves], dtype=np.float64)
    middles = (np.arange(num_bins) + 0.5) / num_bins * ends.mean()
    return _of(middles, by_run)


def of_evaluations(curves: Sequence[Curve]) -> MeanCurve:
    """Average evaluation losses at the first run's points; where other runs have other points, interpolate linearly."""
    places = np.array(curves[0].tokens, dtype=np.float64)
    by_run = np.array([np.interp(places, curve.tokens, curve.loss) for curve in curves])
    if all(len(curve.tokens) == len(places) for curve in curves):
        by_run = np.array([curve.loss for curve in curves])
        places = np.array([curve.tokens for curve in curves], dtype=np.float64).mean(axis=0)
    return _of(places, by_run)


def _in_bins(curve: Curve, num_bins: int) -> Floats:
    """Return the mean loss of each bin: [bins]; NaN where a bin has no point."""
    ends = np.array(curve.tokens, dtype=np.float64)
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
    bins = np.minimum((middles / ends[-1] * num_bins).astype(np.intp), num_bins - 1)
    weights = np.array(curve.weights, dtype=np.float64)
    total = np.bincount(bins, weights=weights, minlength=num_bins)
    losses = np.bincount(bins, weights=weights * np.array(curve.loss), minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return np.asarray(losses / total)


def _of(places: Floats, by_run: Floats) -> MeanCurve:
    """Reduce the runs to a mean, a lowest and a highest curve. by_run: [runs, P]."""
    there = ~np.isnan(by_run).all(axis=0)
    values = by_run[:, there]
    return MeanCurve(
        tokens=places[there],
        mean=np.nanmean(values, axis=0),
        low=np.nanmin(values, axis=0),
        high=np.nanmax(values, axis=0),
    )
