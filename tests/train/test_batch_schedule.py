"""From the trainer's keys to the length of a run and the phases of its batch."""

import numpy as np
import pytest
from tests.train.scarce import rows_of

from brim.batching import num_steps
from brim.config import load_config
from brim.errors import InputError
from brim.train import RunLength, length_of

ROWS = rows_of([4] * 1600)


def length(rows=ROWS, **trainer):
    keys = {"type": "finetune", "epochs": 1, "effective_batch_size": 16, **trainer}
    config = load_config(
        {
            "model_type": "llm",
            "base_model": "somewhere",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": keys,
        }
    ).config
    return length_of(config.trainer, rows, seed=3)


def phases(found: RunLength):
    return [(phase.first_sample, phase.size) for phase in found.schedule.phases]


def test_without_a_key_the_batch_stands_still():
    found = length(epochs=3)
    assert (phases(found), found.total_samples, found.total_steps) == ([(0, 16)], 4800, 300)
    assert not found.batch_moves


def test_a_table_of_one_size_is_no_schedule():
    """So it cannot take longer: the loop is given the same."""
    assert length(batch_schedule="0sp:16", epochs=3) == length(epochs=3)


def test_a_ramp_begins_with_a_quarter_of_the_final_batch():
    assert phases(length(batch_rampup="0.1dur")) == [(0, 4), (80, 8), (160, 16)]


def test_batches_of_a_ramp_are_of_the_final_size():
    found = length(batch_rampup={"length": "10ba", "from": 8, "shape": "linear", "increment": 8})
    assert phases(found) == [(0, 8), (160, 16)]
    assert found.total_steps == 20 + 90


def test_steps_are_steps_and_samples_are_samples():
    ramp = {"length": "10ba", "from": 8, "shape": "linear", "increment": 8}
    assert length(batch_rampup=ramp, train_steps=100).total_samples == 20 * 8 + 80 * 16
    assert length(batch_rampup=ramp, train_steps=100).total_steps == 100
    assert length(batch_rampup=ramp, train_samples=1000).total_samples == 1000
    assert length(batch_rampup=ramp, train_samples=1000).total_steps == 20 + 53


def test_a_share_of_a_run_in_steps_is_one_of_its_samples():
    found = length(batch_rampup={"length": "0.5dur", "from": 2}, train_steps=120)
    assert found.total_steps == 120
    start = found.schedule.phases[-1].first_sample
    assert abs(start - found.total_samples / 2) < 16


def test_a_table_goes_up_and_down_and_its_last_size_is_the_final_one():
    found = length(batch_schedule="0sp:8 400sp:32 800sp:16")
    assert phases(found) == [(0, 8), (400, 32), (800, 16)]
    assert found.schedule.final_size == 16
    assert found.largest_size == 32


def test_a_table_of_tokens_switches_at_the_row_that_reaches_them():
    rows = rows_of([3, 9, 5, 7, 2, 4])
    found = length(rows, batch_schedule="0tok:1 13tok:2", effective_batch_size=2)
    (_, _), (start, size) = phases(found)
    assert size == 2
    order = np.concatenate([rows.lengths[_order(6, 3)]])
    assert order[:start].sum() >= 13 > order[: start - 1].sum()


def _order(num_rows, seed):
    from brim.data.tokens import rows_of_step

    return rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=0, size=num_rows)[1]


def test_a_function_is_asked_once_an_epoch():
    asked = []

    def increase(epoch, current_batch_size):
        asked.append((epoch, current_batch_size))
        return 8 if epoch == 2 else 0

    found = length(epochs=4, batch_increase_function=increase)
    assert asked == [(0, 16), (1, 16), (2, 16), (3, 24)]
    assert phases(found) == [(0, 16), (3200, 24)]


def test_what_the_bound_refuses_is_noted():
    config = load_config(
        {
            "model_type": "llm",
            "base_model": "somewhere",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": {
                "type": "finetune",
                "epochs": 4,
                "effective_batch_size": 16,
                "batch_increase_function": lambda epoch, current_batch_size: 8,
            },
        }
    ).config
    found = length_of(config.trainer, ROWS, seed=3, bound=24)
    assert phases(found) == [(0, 24)]
    (note,) = found.notes
    assert "asked for 32 rows after epoch 1, and 24 of the longest fit at once" in note
    assert note.endswith("nor were 2 later")
    (note,) = length_of(config.trainer, ROWS, seed=3, bound=16).notes
    assert "asked for 24 rows for the first epoch, and 16 of the longest fit at once" in note


def test_the_largest_batch_that_is_allowed_bounds_the_function_too():
    found = length(epochs=3, max_batch_size=20, batch_increase_function=lambda epoch, current_batch_size: 8)
    assert phases(found) == [(0, 16)]
    (note,) = found.notes
    assert "asked for 24 rows for the first epoch, and trainer.max_batch_size is 20: it was not followed" in note


def test_a_function_may_name_the_first_epoch_as_the_rfcs_does():
    found = length(epochs=3, batch_increase_function=lambda epoch, current_batch_size: 8 if epoch in [0] else 0)
    assert (phases(found), found.notes) == ([(0, 24)], ())


@pytest.mark.parametrize(
    ("keys", "epochs"),
    [
        ({"epochs": 3}, "each epoch from 0 to 2"),
        ({"epochs": 1}, "epoch 0, the only one"),
        ({"train_samples": 4000}, "each epoch from 0 to 2"),
        ({"train_steps": 101}, "each epoch from 0 to 1"),
    ],
)
def test_a_function_that_changes_nothing_is_told(keys, epochs):
    found = length(**keys, batch_increase_function=lambda epoch, current_batch_size: 8 if epoch == 9 else 0)
    assert phases(found) == [(0, 16)]
    assert found.notes == (
        f"trainer.batch_increase_function changes nothing: it returned 0 for {epochs}, so every update is of 16 rows",
    )


def test_a_faulty_function_is_an_error():
    with pytest.raises(InputError, match=r"returned 0\.5"):
        length(epochs=2, batch_increase_function=lambda epoch, current_batch_size: 0.5)


def test_a_course_that_was_saved_is_taken_and_the_function_not_asked():
    def increase(epoch, current_batch_size):
        raise AssertionError("asked again")

    saved = length(epochs=2, batch_schedule="0sp:8 100sp:16").course()
    config = {"epochs": 2, "batch_increase_function": increase}
    loaded = load_config(
        {
            "model_type": "llm",
            "base_model": "somewhere",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": {"type": "finetune", "effective_batch_size": 16, **config},
        }
    ).config
    found = length_of(loaded.trainer, ROWS, seed=3, course=saved)
    assert phases(found) == [(0, 8), (100, 16)]
    assert found.total_samples == 3200


def test_sizes_that_follow_the_noise_have_no_number_of_steps():
    found = length(effective_batch_size=8, batch_adaptation={"type": "noise_scale", "min": 4, "max": 20})
    assert found.total_steps is None
    assert found.sizes == (4, 8, 16, 20)
    assert found.batch_moves


@pytest.mark.parametrize("shape", ["doubling", "linear", "equal_steps"])
def test_a_trillion_tokens_are_planned_without_walking_them(shape):
    found = length(
        effective_batch_size=1024,
        batch_rampup={"length": "5e10tok", "from": 7, "shape": shape},
        train_samples=250 * 10**9,
    )
    assert found.schedule.final_size == 1024
    assert found.total_steps == num_steps(found.schedule, num_rows=1600, total_samples=250 * 10**9)
