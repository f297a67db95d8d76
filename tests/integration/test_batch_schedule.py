"""Whole runs whose effective batch moves: sizes, points, events, and what must not change with them."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.batching.cost_examples import linear_costs
from tests.gallery import stopped_after
from tests.integration.conftest import events, steps, untimed
from tests.train.scarce import Run, equal

from brim.batching import BatchSchedule, ByLength, ByRows
from brim.data.tokens import rows_of_step

pytestmark = pytest.mark.run
SGD = {"optimizer": {"type": "sgd"}}
RAMP = {"effective_batch_size": 8, "batch_rampup": {"length": "20sp", "from": 2}, **SGD}
NOISE = {
    "effective_batch_size": 2,
    "batch_adaptation": {"min": 2, "max": 8},
    "noise_scale_every": 1,
    "epochs": 3,
    "batch_lr_scaling": "sqrt",
    "batch_beta2_scaling": True,
    "learning_rate": 0.003,
}


def sizes(run):
    return [step["effective_batch_size"] for step in run.log.steps]


def moments(run, kind):
    return [record for record in run.log.records if record.get("event") == kind]


def heard(run):
    return untimed(run.log.records)


# Two epochs of 20 rows.
COURSES = {
    "doubling": (RAMP, [2, 2, 2, 2, 2, 4, 4, 2, 8, 8, 4]),
    "downwards": (
        {**RAMP, "effective_batch_size": 3, "batch_rampup": {"length": "0.5dur", "from": 12}},
        [12, 6, 2, 3, 3, 3, 3, 3, 3, 2],
    ),
    "a table up and down": (
        {"effective_batch_size": 3, "batch_schedule": "0sp:4 10sp:7 30sp:3", **SGD}, [4, 4, 4, 7, 1, 7, 7, 3, 3],
    ),
    "a function": (
        {"effective_batch_size": 4, "batch_increase_function": lambda epoch, current_batch_size: (0, 3, -6)[epoch],
         "epochs": 3, **SGD},
        [4, 4, 4, 4, 4, 7, 7, 6, *[1] * 20],
    ),
    "so many samples": ({**RAMP, "train_samples": 25}, [2, 2, 2, 2, 2, 4, 4, 2, 5]),
}  # fmt: skip


@pytest.mark.parametrize("name", COURSES)
def test_sizes_are_those_of_the_schedule_and_each_change_is_told_before_its_step(tmp_path, name):
    keys, expected = COURSES[name]
    run = Run(tmp_path, trainer=keys).train()
    assert sizes(run) == expected
    assert [step["num_samples"] for step in run.log.steps] == np.cumsum(expected).tolist()
    assert run.loop.state.consumed_samples == run.job.length.total_samples
    assert run.job.length.total_steps == len(expected)
    begins = [0, *np.cumsum(expected).tolist()[:-1]]
    declared = [run.job.length.schedule.size_at(begin) for begin in begins]
    changes = [
        {"step": step, "event": "schedule", "before": before, "effective_batch_size": after, "reason": "schedule"}
        for step, (before, after) in enumerate(pairwise(declared), start=2)
        if before != after
    ]
    assert moments(run, "schedule") == changes
    assert changes
    for change in changes:
        position = run.log.records.index(change)
        later = [record["step"] for record in run.log.records[position:] if record.get("split") == "train"]
        assert later[0] == change["step"]
    assert_points_are_means(run)


def assert_points_are_means(run):
    """Each point is the token-weighted mean of the steps since the one before: as many samples as a final batch has."""
    final, total = run.job.length.schedule.final_size, run.job.length.total_samples
    expected, losses, weights, last_point, last_step = [], [], [], 0, 0
    for step in run.log.steps:
        losses.append(step["loss"])
        weights.append(step["num_supervised_tokens"] - last_step)
        last_step, samples = step["num_supervised_tokens"], step["num_samples"]
        if samples // final > last_point // final or samples == total:
            mean = pytest.approx(np.average(losses, weights=weights), rel=1e-12)
            counts = {key: step[key] for key in ("num_samples", "num_tokens", "num_supervised_tokens")}
            expected.append({"step": step["step"], "event": "point", "loss": mean, "num_steps": len(losses), **counts})
            losses, weights, last_point = [], [], samples
    points = moments(run, "point")
    assert points == expected
    assert sum(point["num_steps"] for point in points) == len(run.log.steps)


def test_a_ramp_that_goes_on_with_other_micro_batches_keeps_its_sizes_and_rates(train, tmp_path):
    keys = {"batch_rampup": "0.6dur", "initial_effective_batch_size": 3, "batch_lr_scaling": "linear"}
    train("whole", trainer=keys)
    with stopped_after(8) as observer, pytest.raises(KeyboardInterrupt):
        train("parts", observer=observer, trainer=keys)
    train("parts", resume=True, trainer={**keys, "batch_size": 3})
    runs = [tmp_path / name for name in ("whole", "parts")]
    mine, others = map(steps, runs)
    # 28 rows: the stages of 3 and 6 rows share 34 samples, the first of which ends at 17.
    assert [step["effective_batch_size"] for step in mine] == [3, 3, 3, 3, 3, 3, 6, 4, 6, 8, 8, 6]
    assert [step["num_micro_batches"] for step in others] == [1, 1, 1, 1, 1, 1, 2, 1, 2, 3, 3, 2]
    for key in ("effective_batch_size", "learning_rate", "num_samples", "num_tokens", "num_supervised_tokens"):
        assert [step[key] for step in others] == [step[key] for step in mine]
    np.testing.assert_allclose([o["loss"] for o in others], [s["loss"] for s in mine], rtol=1e-5)
    points, other_points = (events(run, "point") for run in runs)
    assert [point["num_steps"] for point in points] == [point["num_steps"] for point in other_points]
    np.testing.assert_allclose([o["loss"] for o in other_points], [p["loss"] for p in points], rtol=1e-5)


def test_the_batch_that_follows_the_noise_moves_within_its_bounds_and_by_what_was_measured(tmp_path):
    run = Run(tmp_path, trainer=NOISE).train()
    changes = moments(run, "schedule")
    assert changes, "the example moves"
    ladder = [2, 4, 8]
    noise = {step["step"]: step["noise_scale"] for step in run.log.steps}
    for change in changes:
        before, after = change["before"], change["effective_batch_size"]
        assert abs(ladder.index(after) - ladder.index(before)) == 1
        measured = noise[change["step"] - 1]
        shown = "larger than the measured batches can tell" if measured is None else f"{measured:.1f} rows"
        assert change["reason"] == f"noise scale {shown}"
        if after < before:
            assert measured <= after
        else:
            assert measured is None or measured >= after
    assert [measured is None for measured in list(noise.values())[:4]] == [True] * 4
    declared, consumed = 2, 0
    by_step = {change["step"]: change["effective_batch_size"] for change in changes}
    for step in run.log.steps:
        declared = by_step.get(step["step"], declared)
        assert step["effective_batch_size"] == min(declared, 20 - consumed % 20)
        consumed = step["num_samples"]
    assert consumed == run.job.length.total_samples


SCALED = {"learning_rate": 0.003, "batch_lr_scaling": "sqrt", "batch_beta2_scaling": True}
RESUMED = {
    "doubling, beta2": {"effective_batch_size": 8, "batch_rampup": {"length": "20sp", "from": 2}, **SCALED},
    "noise": NOISE,
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_stops_anywhere_goes_on_to_the_bit(tmp_path, name):
    """Also at a switch, within a point, before the noise is known, and at the end of an epoch."""
    keys = RESUMED[name]
    whole = Run(tmp_path / "whole", trainer=keys, dropout=0.3).train()
    before_switch = {change["step"] - 1 for change in moments(whole, "schedule")}
    ends = {step["step"] for step in whole.log.steps if step["num_samples"] % 20 == 0}
    for step in sorted({1, 3, 6} | before_switch | {step + 1 for step in before_switch} | ends)[:-1]:
        assert_goes_on(whole, tmp_path / str(step), step, trainer=keys, dropout=0.3)


def assert_goes_on(whole, folder, step, **settings):
    """A run that stops after this step and goes on is the whole one to the bit."""
    first = Run(folder, **settings, stop_after=step)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    torch.manual_seed(99)
    second = Run(folder, **settings, checkpoint=first.newest()).train()
    assert heard(first) + heard(second) == heard(whole)
    assert equal(second.weights, whole.weights)
    assert second.newest().state == whole.newest().state


def test_the_loss_scale_of_fp16_moves_with_updates_and_is_kept_over_a_switch(tmp_path, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr("torch.amp.GradScaler", lambda kind, enabled: scaler(kind, init_scale=2.0**22, enabled=enabled))
    keys = RESUMED["doubling, beta2"]
    whole = Run(tmp_path / "whole", trainer=keys, kind="fp16-mixed").train()
    overflows = moments(whole, "overflow")
    assert overflows, "the scale is too large at first"
    assert overflows[0] == {"step": 1, "event": "overflow", "loss_scale": 2.0**22}
    assert sizes(whole) == COURSES["doubling"][1]
    assert all(math.isfinite(loss) for loss in whole.log.losses)
    saved = whole.newest().state
    assert saved["train"]["loss_scaler"]["scale"] == 2.0 ** (22 - len(overflows))
    # Updates that were left out have moved neither Adam's count nor the betas that its correction goes by.
    assert saved["rates"]["num_updates"] == len(whole.log.steps) - len(overflows)
    for step in (1, 5, 6):
        assert_goes_on(whole, tmp_path / str(step), step, trainer=keys, kind="fp16-mixed")


# Whatever the schedule, the data, the batch and the micro-batches: every row goes in once an epoch

NUM_CASES = 10_000


def drawn_schedule(chance, total_samples):
    """A schedule of a random kind, up or down, with sizes up to twice what a small epoch holds."""
    initial, final = chance.randint(1, 24), chance.randint(1, 24)
    length = chance.randint(0, total_samples)
    match chance.randrange(5):
        case 0:
            return BatchSchedule.constant(final)
        case 1:
            return BatchSchedule.doubling(initial=initial, final=final, length_samples=length)
        case 2:
            return BatchSchedule.equal_steps(initial=initial, final=final, length_samples=length)
        case 3:
            return BatchSchedule.linear(
                initial=initial, final=final, length_samples=length, increment=chance.randint(1, 8)
            )
        case _:
            starts = sorted(chance.sample(range(1, total_samples + 2), min(chance.randint(1, 4), total_samples)))
            return BatchSchedule.of([(0, initial), *((start, chance.randint(1, 24)) for start in starts)])


def drawn_cutter(chance):
    if chance.random() < 0.75:  # the other one takes ten times as long
        return ByRows(max_rows=chance.randint(1, 12))
    return ByLength(costs=COSTS, cap_bytes=1000 + 10 * chance.randint(20, 200), most_rows=chance.choice([None, 5]))


COSTS = linear_costs(seconds=20.0)


def walk_case(number):
    """Walk a random run as the loop does; how often each cutter cut, and how often memory ran out."""
    chance = random.Random(number)
    num_rows = chance.randint(1, 24)
    total = num_rows * chance.randint(1, 3) - chance.choice([0, 0, chance.randrange(num_rows)])
    schedule, cutter = drawn_schedule(chance, total), drawn_cutter(chance)
    lengths = np.array([chance.randint(1, 40) for _ in range(num_rows)])
    consumed, steps, num_lowered = 0, 0, 0
    seen = Counter()
    while consumed < total:
        size = schedule.size_at(consumed)
        epoch, indices = rows_of_step(
            num_rows=num_rows, seed=number, consumed_samples=consumed, size=min(size, total - consumed)
        )
        cut = cutter.cut(lengths[indices])
        if chance.random() < 0.1:
            num_lowered += cutter.lower(cut[0]) is not None
            cut = cutter.cut(lengths[indices])
        seen.update((epoch, row) for micro_batch in cut for row in indices[micro_batch.rows].tolist())
        consumed, steps = consumed + len(indices), steps + 1
        assert len(indices) == size or consumed % num_rows == 0 or consumed == total
    epochs, rest = divmod(total, num_rows)
    assert set(seen.values()) == {1}
    assert Counter(epoch for epoch, _ in seen) == {
        **dict.fromkeys(range(epochs), num_rows), **({epochs: rest} if rest else {})
    }  # fmt: skip
    assert steps == schedule.num_steps(num_rows=num_rows, total_samples=total)
    return Counter({type(cutter).__name__: 1, "lowered": num_lowered, "phases": len(schedule.phases)})


def test_every_sample_goes_in_once_an_epoch_in_ten_thousand_cases():
    walked = sum((walk_case(number) for number in range(NUM_CASES)), Counter())
    assert walked["ByRows"] + walked["ByLength"] == NUM_CASES
    # The cases are worth their time: both cutters, moving batches, memory that runs out.
    assert walked["ByLength"] > 0.2 * NUM_CASES
    assert walked["phases"] > 2 * NUM_CASES
    assert walked["lowered"] > 0.1 * NUM_CASES
