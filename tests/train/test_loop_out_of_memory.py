"""A run whose memory runs out in a step ends as the run whose memory did not."""

import numpy as np
import pytest
import torch
from tests.train.scarce import LENGTHS, OUT, Given, Run, Shortage, Watched, apart, equal

from brim.batching import ByLength, Costs, Surface
from brim.errors import OutOfMemoryError

FIRST_OF_STEP_2 = 5  # micro-batches of two rows: four in the first step


def adam(weights):
    return torch.optim.Adam(weights, lr=0.0)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_the_losses_are_those_of_the_clean_run_and_to_the_bit_those_of_one_with_the_same_cuts(
    tmp_path, place, micro_batch
):
    clean = Run(tmp_path / "clean").train()
    scarce = Run(tmp_path / "scarce")
    Shortage(scarce.model, **{place: [FIRST_OF_STEP_2 + micro_batch - 1]})
    scarce.train()
    assert scarce.loop.num_out_of_memory == 1
    np.testing.assert_allclose(scarce.log.losses, clean.log.losses, rtol=1e-5)
    assert apart(scarce.weights, clean.weights) < 1e-5
    same = Run(tmp_path / "same", cutter=Given(scarce.cutter.cuts)).train()
    assert scarce.log.losses == same.log.losses
    assert equal(scarce.weights, same.weights)
    assert [step["num_micro_batches"] for step in scarce.log.steps] == [4, 8, 4, 8, 8, 4]
    assert [step["num_micro_batches"] for step in clean.log.steps] == [4, 4, 2, 4, 4, 2]
    for counted in ("num_samples", "num_tokens", "num_supervised_tokens", "effective_batch_size", "learning_rate"):
        assert [s[counted] for s in scarce.log.steps] == [s[counted] for s in clean.log.steps]


@pytest.mark.parametrize(("place", "failing"), [("forward", 6), ("backward", 6)])
def test_what_happened_is_told_with_the_keys_of_the_rows(tmp_path, place, failing):
    run = Run(tmp_path)
    Shortage(run.model, **{place: [failing]})
    run.train()
    second = run.log.records.index(run.log.steps[1])
    told, cap, replay = run.log.events
    assert run.log.records[second - 3 : second] == [told, cap, replay]
    rows = told.pop("rows")
    lengths = sorted((LENGTHS[key - 100] for key in rows), reverse=True)
    assert len(rows) == 2
    assert told == {
        "step": 2, "event": "oom", "where": place, "micro_batch": 2, "num_micro_batches": 4,
        "padded_length": lengths[0], "predicted_bytes": None, "message": OUT,
    }  # fmt: skip
    assert cap == {"step": 2, "event": "cap", "before": 2, "after": 1, "unit": "rows"}
    assert replay == {"step": 2, "event": "replay", "num_micro_batches": 8}


def test_twice_in_a_row(tmp_path):
    clean = Run(tmp_path / "clean", cutter=Watched(max_rows=8)).train()
    scarce = Run(tmp_path / "scarce", cutter=Watched(max_rows=8))
    Shortage(scarce.model, rows_above=2)
    scarce.train()
    assert [event["event"] for event in scarce.log.events] == ["oom", "cap", "replay"] * 2
    assert {event["step"] for event in scarce.log.events} == {1}
    assert [step["num_micro_batches"] for step in scarce.log.steps] == [4, 4, 2, 4, 4, 2]
    np.testing.assert_allclose(scarce.log.losses, clean.log.losses, rtol=1e-5)
    same = Run(tmp_path / "same", cutter=Given(scarce.cutter.cuts)).train()
    assert equal(scarce.weights, same.weights)


def test_dropout_is_drawn_as_in_a_run_with_the_same_cuts(tmp_path):
    scarce = Run(tmp_path / "scarce", dropout=0.5)
    Shortage(scarce.model, forward=[2], backward=[11])
    scarce.train()
    assert scarce.loop.num_out_of_memory == 2
    same = Run(tmp_path / "same", dropout=0.5, cutter=Given(scarce.cutter.cuts)).train()
    assert scarce.log.losses == same.log.losses
    assert equal(scarce.weights, same.weights)


def test_the_loss_scale_of_fp16_hears_nothing_of_it(tmp_path):
    scarce = Run(tmp_path / "scarce", kind="fp16-mixed")
    Shortage(scarce.model, forward=[6], backward=[1])
    scarce.train()
    assert scarce.loop.num_out_of_memory == 2
    same = Run(tmp_path / "same", kind="fp16-mixed", cutter=Given(scarce.cutter.cuts)).train()
    assert equal(scarce.weights, same.weights)
    scales = [run.newest().state["train"]["loss_scaler"] for run in (scarce, same)]
    assert scales[0] == scales[1]


@pytest.mark.parametrize(
    ("lengths", "size", "sizes"),
    [(LENGTHS[:5], 32, [5, 5]), (LENGTHS[:9], 4, [4, 4, 1, 4, 4, 1]), ([7], 8, [1, 1]), ([6] * 6, 6, [6, 6])],
    ids=["effective batch larger than the data", "a last batch of one row", "one row", "rows of equal length"],
)
def test_odd_sizes(tmp_path, lengths, size, sizes):
    clean = Run(tmp_path / "clean", lengths=lengths, size=size).train()
    scarce = Run(tmp_path / "scarce", lengths=lengths, size=size)
    passes = len(scarce.cutter.cut(scarce.job.rows.lengths[:size]))
    scarce.cutter.cuts.clear()
    Shortage(scarce.model, backward=[passes])  # the last of the first step
    scarce.train()
    assert scarce.loop.num_out_of_memory == 1
    assert [step["effective_batch_size"] for step in scarce.log.steps] == sizes
    np.testing.assert_allclose(scarce.log.losses, clean.log.losses, rtol=1e-5)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_run_that_was_stopped_goes_on_to_the_bit_also_across_what_ran_out(tmp_path, stop_after):
    """The sixth pass, the second of the second step, runs out: in the first session or in the second."""
    whole = Run(tmp_path / "whole", optimizer=adam, dropout=0.2)
    Shortage(whole.model, forward=[6])
    whole.train()
    first = Run(tmp_path / "parts", optimizer=adam, dropout=0.2, stop_after=stop_after)
    shortage = Shortage(first.model, forward=[6])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    torch.manual_seed(999)
    second = Run(tmp_path / "parts", optimizer=adam, dropout=0.2, checkpoint=first.newest())
    Shortage(second.model, forward=[number - shortage.num_passes for number in [6]])
    second.train()
    assert first.log.losses + second.log.losses == whole.log.losses
    assert equal(second.weights, whole.weights)
    assert second.cutter.state() == whole.cutter.state()
    assert second.newest().state["cutter"] == whole.newest().state["cutter"]


def test_the_limit_is_raised_after_clean_steps_and_that_count_is_in_the_checkpoint(tmp_path):
    def ends(run):
        return [(event["step"], event["before"], event["after"]) for event in run.log.events if event["event"] == "cap"]

    few = {"lengths": LENGTHS[:4], "size": 2, "epochs": 30}
    whole = Run(tmp_path / "whole", **few)
    Shortage(whole.model, forward=[2])
    whole.train()
    assert ends(whole) == [(2, 2, 1), (52, 1, 2)]
    first = Run(tmp_path / "parts", stop_after=40, **few)
    Shortage(first.model, forward=[2])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = Run(tmp_path / "parts", checkpoint=first.newest(), **few).train()
    assert ends(second) == [(52, 1, 2)]
    assert equal(second.weights, whole.weights)


def test_another_plan_or_an_older_checkpoint_begins_with_its_own_limit(tmp_path):
    first = Run(tmp_path, stop_after=2)
    Shortage(first.model, forward=[6])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    checkpoint = first.newest()
    run = Run(tmp_path, checkpoint=checkpoint)
    assert run.cutter.max_rows == 1
    run.cutter.restore(Watched(max_rows=2).state())
    run.loop.restore(checkpoint, keep_cutter=False)
    assert run.cutter.max_rows == 2
    del checkpoint.state["cutter"], checkpoint.state["owes_evaluation"]  # of a version before
    run.loop.restore(checkpoint)
    assert run.cutter.max_rows == 2
    assert run.train().log.steps[0]["step"] == 3


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_row_that_never_fits_is_named_and_what_was_learned_before_is_saved(tmp_path, place):
    clean = Run(tmp_path / "clean").train()
    run = Run(tmp_path / "run", epochs=1, dropout=0.0)
    Shortage(run.model, **{place: range(6, 100)})
    with pytest.raises(OutOfMemoryError) as caught:
        run.train()
    failed = run.log.events[-1]
    assert failed["event"] == "oom"
    (key,) = failed["rows"]
    problem = caught.value.problems[0]
    assert problem.what == (
        f"row {key} (numbered from 0) ({LENGTHS[key - 100]} tokens) ran out of memory twice in the {place} pass, with "
        f"nothing beside it: {OUT}"
    )
    assert problem.where == "step 2"
    assert problem.fix.endswith("The checkpoint of step 1 holds all that was learned")
    assert caught.value.exit_code == 1
    assert all(parameter.grad is None for parameter in run.model.parameters())
    checkpoint = run.newest()
    assert checkpoint.step == 1
    rest = Run(tmp_path / "run", checkpoint=checkpoint, cutter=Given(clean.cutter.cuts[1:]))
    rest.train()
    assert run.log.losses + rest.log.losses == clean.log.losses
    assert equal(rest.weights, clean.weights)


def test_nothing_is_saved_where_nothing_was_learned(tmp_path):
    run = Run(tmp_path)
    Shortage(run.model, forward=range(1, 100))
    with pytest.raises(OutOfMemoryError, match=r"step 1: row 1\d\d .* ran out of memory twice") as caught:
        run.train()
    assert caught.value.problems[0].fix.endswith("Nothing had been learned yet")
    assert run.store.steps() == []


def test_a_row_that_fits_at_the_second_try_is_learned_from_once(tmp_path):
    clean = Run(tmp_path / "clean", lengths=[7], size=8).train()
    run = Run(tmp_path / "run", lengths=[7], size=8)
    Shortage(run.model, backward=[1])
    run.train()
    assert [event["event"] for event in run.log.events] == ["oom", "replay"]
    assert run.log.losses == clean.log.losses
    assert equal(run.weights, clean.weights)


def test_with_predicted_bytes_they_are_named_with_the_limit(tmp_path):
    plane = Surface(base=0, lengths=(1,), tokens=((1, 100),), values=((1024, 102400),))
    costs = Costs(peak=plane, static_bytes=0, time=plane)
    run = Run(tmp_path, cutter=ByLength(costs=costs, cap_bytes=15 * 1024), lengths=[10], size=1)
    Shortage(run.model, forward=[1, 2])
    with pytest.raises(OutOfMemoryError, match=r"Tried .*\.; predicted: 10\.0 KiB; limit of a micro-batch: 15\.0 KiB"):
        run.train()


def test_peaks_are_kept_by_the_shape_that_was_predicted_to_take_the_most(tmp_path):
    plane = Surface(base=0, lengths=(1,), tokens=((1, 100),), values=((10, 1000),))
    costs = Costs(peak=plane, static_bytes=0, time=plane)
    run = Run(tmp_path, cutter=ByLength(costs=costs, cap_bytes=300))
    Shortage(run.model, forward=[1])
    run.train()
    peaks = run.loop.peaks
    assert run.loop.num_out_of_memory == 1
    assert peaks
    assert all(peak.measured_bytes is None for peak in peaks)
    assert all(peak.predicted_bytes == 10 * peak.rows * peak.padded_length <= 300 for peak in peaks)
    assert len({(peak.rows, peak.padded_length) for peak in peaks}) == len(peaks)
