"""Fewer layers, and from two depths to the whole model."""

from __future__ import annotations

import pytest

from brim.workflows.measure import PhasePeak
from brim.workflows.measure.run import Depths, depths, extrapolated, num_layers, with_layers

SLIDING, FULL = "sliding_attention", "full_attention"


def peak(total_bytes, allocated_bytes=None, **changes):
    given = {
        "phase": "train",
        "step": 1,
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": None,
        "outside_bytes": None,
        "total_bytes": total_bytes,
        "end_bytes": total_bytes // 2,
        "baseline_bytes": 7,
    }
    return PhasePeak(**{**given, **changes})


def test_one_and_two_layers_stand_for_many():
    assert depths({"num_hidden_layers": 32}, 1) == Depths(1, 2, 32)
    assert depths({"n_layer": 32}, 3) == Depths(3, 6, 32)


def test_layers_that_alternate_are_taken_by_periods():
    kinds = [SLIDING] * 5 + [FULL]
    config = {"num_hidden_layers": 26, "layer_types": (kinds * 5)[:26]}
    assert depths(config, 1) == Depths(6, 12, 26)


def test_layers_at_the_front_are_always_run():
    assert depths({"num_hidden_layers": 27, "first_k_dense_replace": 1}, 1) == Depths(2, 3, 27)


@pytest.mark.parametrize("config", [{"num_hidden_layers": 2}, {"hidden_size": 8}])
def test_there_is_nothing_to_gain_of_a_shallow_model(config):
    assert depths(config, 1) is None


def test_lists_by_layer_are_cut_and_others_are_not():
    config = {
        "num_hidden_layers": 3,
        "max_window_layers": 3,
        "layer_types": [SLIDING, FULL, FULL],
        "eos_token_id": [1, 2, 3],
    }
    assert with_layers(config, 2) == {
        "num_hidden_layers": 2,
        "max_window_layers": 3,
        "layer_types": [SLIDING, FULL],
        "eos_token_id": [1, 2, 3],
    }


def test_the_decoder_of_a_model_with_several_parts_is_meant():
    config = {"model_type": "x", "num_hidden_layers": 9, "text_config": {"num_hidden_layers": 4}}
    assert num_layers(config) == 4
    assert with_layers(config, 1) == {
        "model_type": "x",
        "num_hidden_layers": 9,
        "text_config": {"num_hidden_layers": 1},
    }


def test_the_peak_lies_on_the_line_through_both():
    found = extrapolated(peak(1_000, 100), peak(1_300, 160), Depths(1, 2, 32))
    assert found.total_bytes == 1_000 + 31 * 300
    assert found.allocated_bytes == 100 + 31 * 60
    assert found.end_bytes == 500 + 31 * 150
    assert found.reserved_bytes is None
    assert (found.phase, found.step, found.baseline_bytes) == ("train", 1, 7)


def test_two_periods_beyond_the_front_are_one_step_of_the_line():
    assert extrapolated(peak(1_000), peak(1_600), Depths(7, 13, 27)).total_bytes == 1_000 + 100 * 20
