"""Several configurations over several seeds: means and paired differences, their tables, notes and curves."""

import math

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from tests.report.hand_made_runs import figures, two_by_three

from brim.report import comparison_notes, comparison_tables, curves_plot, final_split, summaries
from brim.report.comparison import Estimate
from brim.report.curves import COLOURS, demeaned, look, of_evaluations, of_training
from brim.train import Curve


def test_differences_are_paired_by_seed_and_what_they_show_is_told():
    """The seeds scatter a hundred times as much as the differences."""
    _, second = summaries(two_by_three())
    difference = second.differences["validation"]
    assert difference.mean == pytest.approx(-0.199)
    half = 4.302653 * 0.001 / math.sqrt(3)
    assert difference.interval.low == pytest.approx(-0.199 - half)
    assert difference.interval.high == pytest.approx(-0.199 + half)
    assert difference.verdict == "lower"
    assert second.differences["test"].mean == pytest.approx(0.0)
    assert second.differences["test"].verdict == "no difference that these seeds show"
    assert Estimate(mean=-1.0, interval=None, num_seeds=1).verdict == "one seed shows nothing"
    assert Estimate(mean=math.nan, interval=None, num_seeds=3).verdict == "not a number"
    runs = {"a": {s: figures(1.0) for s in (0, 1)}, "b": {s: figures(1.5) for s in (0, 1)}}
    assert summaries(runs)[1].differences["validation"].verdict == "higher"


def test_what_is_missing_is_left_out():
    runs = two_by_three()
    assert final_split(runs) == "validation"
    del runs["a"][1]
    first, second = summaries(runs)
    assert (first.seeds, second.seeds) == ((0, 2), (0, 1, 2))
    assert second.differences["validation"].num_seeds == 2, "only seeds that both have are paired"
    assert second.differences["validation"].mean == pytest.approx(-0.199)
    runs["b"][2] = figures(1.0, losses={"train": 1.0})
    assert final_split(runs) == "train"
    assert list(summaries(runs)[1].losses) == ["train"]
    assert [each.name for each in summaries({"a": {0: figures(1.0)}, "b": {}})] == ["a"]
    assert summaries({"a": {}, "b": {}}) == []
    (alone,) = summaries({"a": {}, "b": {0: figures(1.0)}})
    assert alone.differences == {}


def test_tables_of_a_comparison(golden):
    runs = two_by_three()
    alone, failed = {"a|b": {0: figures(1.0)}}, {"a": {5: figures(2.0), 4: figures(1.5)}, "b": {4: figures(math.nan)}}
    losses, costs = comparison_tables(summaries(runs), {}, first="a", splits=["validation"])
    # Seeds are named where they are not the same.
    with_seeds = comparison_tables(summaries({**runs, "b": {0: runs["b"][0]}}), {}, first="a", splits=["test"])[0]
    others = comparison_tables(summaries(alone), failed, first="a|b", splits=["validation"])[1:]
    tables = [losses, with_seeds, costs, *others]
    golden("report/comparison.md", "\n\n".join(table.markdown() for table in tables))


def with_tokens(tokens):
    return {"a": {0: figures(1.0, tokens=100_000)}, "b": {0: figures(1.0, tokens=tokens)}}


def test_notes_of_a_comparison(golden):
    runs = two_by_three()
    other_rows = {
        ("a", 0): {"train": "x"},
        ("b", 0): {"train": "y"},
        ("a", 1): {"train": "z"},
        ("b", 1): {"train": "z"},
    }
    less_evaluated = figures(1.0, evaluated_tokens={"validation": 51}, test=None)
    equal = comparison_notes(runs, {}, seeds=(0, 1, 2))
    told = {
        "equal runs": equal,
        "one seed": comparison_notes({"a": {0: figures(1.0)}}, {}, seeds=(0,)),
        "training losses": comparison_notes({name: {0: figures(1.0, losses={"train": 1.0})} for name in "ab"}, {}, seeds=(0,)),
        "other tokens": comparison_notes(with_tokens(101_000), {}, seeds=(0,)),
        "other evaluated tokens": comparison_notes({**runs, "b": {**runs["b"], 1: less_evaluated}}, {}, seeds=(0, 1, 2)),
        "other rows": comparison_notes(runs, other_rows, seeds=(0, 1, 2)),
        "steps without an update": comparison_notes(
            {**runs, "b": {seed: figures(1.0, num_skipped=2) for seed in (0, 1)}}, {}, seeds=(0, 1, 2)
        ),
    }  # fmt: skip
    golden("report/comparison_notes.txt", "\n\n".join("\n".join([f"# {what}", *notes]) for what, notes in told.items()))
    nearly = comparison_notes(with_tokens(100_009), {}, seeds=(0,))
    assert not any(note.startswith("not equal in tokens") for note in nearly)
    one_lacks_a_seed = {key: value for key, value in other_rows.items() if key != ("a", 0)}
    assert comparison_notes(runs, one_lacks_a_seed, seeds=(0, 1, 2)) == equal


def plot(runs, **texts):
    return curves_plot(runs, **{"title": "t", "subtitle": "s", **texts})


def title(axes):
    return axes.get_title(loc="left")


def test_validation_and_training_have_a_panel_each_with_a_mean_and_a_band_in_its_colour():
    figure = plot(two_by_three())
    validation, training = figure.axes
    assert title(validation).startswith("validation loss")
    assert title(training).startswith("training loss, in 10 equal stretches")
    assert validation.get_xlim() == training.get_xlim() == (0, pytest.approx(1002 * 1.01))
    assert len({look(number) for number in range(18)}) == 18
    for axes in figure.axes:
        assert [to_hex(line.get_color()).upper() for line in axes.lines] == list(COLOURS[:2])
        assert [isinstance(band, PolyCollection) for band in axes.collections] == [True, True]
    line = figure.axes[0].lines[0]
    assert line.get_ydata()[-1] == pytest.approx(2.1 + 50 / 1001, abs=1e-4)
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    last = band[band[:, 0] == band[:, 0].max(), 1]
    # The seeds lie 0.1 apart, a's and b's alike but for 0.001: paired, half of that is left on each side.
    assert last.min() == pytest.approx(line.get_ydata()[-1] - 0.0005, abs=2e-4)
    assert last.max() == pytest.approx(line.get_ydata()[-1] + 0.0005, abs=2e-4)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_the_fall_of_the_first_steps_is_cut_and_that_is_said_and_one_evaluation_is_no_curve():
    """At 50 of 1,000 tokens the loss is 4.0; from a tenth on it is 3.0 at most."""
    (axes,) = plot({name: {0: figures(2.0, steps=20, evaluations=1)} for name in "ab"}).axes
    assert axes.get_ylim()[1] < 3.5
    assert "(the first steps lie above)" in title(axes)
    figure = plot({"a$x_1$": {0: figures(2.0, evaluations=1)}, "b": {0: figures(2.0)}}, title="$t_1$")
    (axes,) = figure.axes
    assert title(axes).startswith("training loss")
    assert not any(text.get_parse_math() for text in [*figure.texts, *figure.legends[0].get_texts()]), "no formula"


@pytest.mark.parametrize("names", ["ab", [f"configuration-with-a-long-name-{n}" for n in range(7)]])
def test_no_words_stand_on_each_other(names, stand_apart):
    runs = {name: {seed: figures(2.0 + 0.1 * seed) for seed in range(2)} for name in names}
    figure = plot(runs, title="Loss over tokens", subtitle="means of 2 seeds")
    texts = [part for axes in figure.axes for part in (axes._left_title, axes.xaxis.label)]
    stand_apart(figure, [*figure.texts, *figure.legends[0].get_texts(), *texts])


def test_runs_of_few_steps_are_averaged_over_as_few_stretches():
    """A last step of one row is no point of its own."""
    training = plot({"a": {0: figures(2.0, steps=10)}, "b": {0: figures(2.0, steps=1)}}).axes[1]
    assert title(training).startswith("training loss, in 2 equal stretches")
    assert [len(line.get_xdata()) for line in training.lines] == [2, 1]
    assert [line.get_marker() for line in training.lines] == ["", "o"]


def curve(tokens, loss, weights=None):
    return Curve(tokens=tuple(tokens), loss=tuple(loss), weights=tuple(weights or [1] * len(tokens)))


def test_training_losses_are_weighted_means_in_equal_stretches():
    """Ends of 40 and 80: the stretches are shares of each run, drawn at the mean run's tokens."""
    one = curve([10, 20, 30, 40], [4.0, 2.0, 1.0, 3.0], [1, 3, 1, 1])
    other = curve([20, 40, 60, 80], [5.0, 5.0, 5.0, 5.0])
    found = of_training([one, other], num_bins=2)
    assert found.tokens.tolist() == [15.0, 45.0]
    assert found.low.tolist() == [2.5, 2.0]
    assert found.high.tolist() == [5.0, 5.0]
    assert found.mean.tolist() == [3.75, 3.5]
    # A stretch that a run skips is the others'; one that all skip has no point.
    found = of_training([curve([60, 100], [2.0, 1.0]), curve([25, 50, 75, 100], [4.0, 3.0, 2.0, 1.0])], num_bins=4)
    assert found.tokens.tolist() == [12.5, 37.5, 62.5, 87.5]
    assert found.mean.tolist() == [4.0, 2.5, 2.0, 1.0]
    assert of_training([curve([60, 100], [2.0, 1.0])], num_bins=4).tokens.tolist() == [37.5, 87.5]


def test_evaluations_after_as_many_steps_go_together_and_others_are_drawn_straight():
    found = of_evaluations([curve([10, 20], [3.0, 1.0]), curve([12, 22], [4.0, 3.0])])
    assert found.tokens.tolist() == [11.0, 21.0]
    assert (found.mean.tolist(), found.low.tolist(), found.high.tolist()) == ([3.5, 2.0], [3.0, 1.0], [4.0, 3.0])
    found = of_evaluations([curve([10, 20], [3.0, 1.0]), curve([10, 15, 30], [3.0, 3.0, 0.0])])
    assert found.tokens.tolist() == [10.0, 20.0]
    assert found.mean == pytest.approx(np.array([3.0, 1.5]))


def losses_levelled(**runs):
    """The losses of each configuration after its seeds are demeaned; each is given as losses by seed."""
    curves = {
        name: {seed: curve(range(1, len(loss) + 1), loss) for seed, loss in enumerate(of)} for name, of in runs.items()
    }
    return {name: [each.loss for each in found] for name, found in demeaned(curves).items()}


def test_what_a_seed_adds_to_all_is_taken_away_and_differences_stay():
    found = losses_levelled(a=[(4.0, 3.0), (6.0, 5.0)], b=[(3.0, 2.0), (5.0, 4.0)])
    assert found == {"a": [(5.0, 4.0), (5.0, 4.0)], "b": [(4.0, 3.0), (4.0, 3.0)]}
    # Seeds that one lacks stay where they are, and a run that fell apart moves none.
    assert losses_levelled(a=[(4.0,), (9.0,)], b=[(2.0,)])["a"] == [(4.0,), (9.0,)]
    assert losses_levelled(a=[(4.0,), (math.nan,)], b=[(2.0,), (7.0,)])["b"][1] == (7.0,)
    assert losses_levelled() == {}
    # A level counts tokens: both of these are 2.
    found = demeaned({"a": {1: curve((1, 2), (4.0, 1.0), (1, 2)), 2: curve((1, 2), (2.0, 2.0))}})["a"]
    assert [each.loss for each in found] == [pytest.approx((4.0, 1.0)), pytest.approx((2.0, 2.0))]
