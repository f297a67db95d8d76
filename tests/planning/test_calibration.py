"""What measured peaks say of later predictions."""

import pytest

from brim.planning.costs import Calibrations, Correction, Peak, at_once, calibration, of_run
from brim.planning.costs.calibration import RunPeaks, combined
from brim.storage import Cache, digest

STATIC = 1000
MIB = 2**20
FACTS = {"device": "t4", "model": {"layers": 3}}


def peaks(*pairs):
    return [Peak(predicted_bytes=predicted, measured_bytes=measured) for predicted, measured in pairs]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Numbers that are easy to follow; what is too small to tell anything on a device has a test of its own."""
    monkeypatch.setattr(calibration, "TELLING_BYTES", 1)


def test_a_few_megabytes_tell_nothing(monkeypatch):
    monkeypatch.undo()
    told = peaks((STATIC + 63 * MIB, STATIC + 90 * MIB))
    assert of_run(told, static_bytes=STATIC) is None
    enough = of_run(peaks((STATIC + 64 * MIB, STATIC + 80 * MIB)), static_bytes=STATIC)
    assert enough is not None
    assert enough.scale == 1.25


def run(scale, outside=None):
    return RunPeaks(scale=scale, outside_bytes=outside, num_peaks=1)


def test_what_the_shapes_add_is_compared_and_the_most_counts():
    found = of_run(peaks((3000, 3200), (2900, 2900), (2000, 1900)), static_bytes=STATIC, outside_bytes=77)
    assert found == RunPeaks(scale=1.1, outside_bytes=77, num_peaks=3)


def test_peaks_that_are_small_beside_the_largest_do_not_count():
    found = of_run(peaks((3000, 3000), (1900, 9000)), static_bytes=STATIC)
    assert found == RunPeaks(scale=1.0, outside_bytes=None, num_peaks=1)


@pytest.mark.parametrize("told", [[], peaks((1040, 1080)), peaks((900, 950))])
def test_shapes_that_add_next_to_nothing_tell_nothing(told):
    assert of_run(told, static_bytes=STATIC) is None


@pytest.mark.parametrize(("measured", "scale"), [(100_000, 2.0), (1100, 0.5)])
def test_a_scale_is_bounded(measured, scale):
    found = of_run(peaks((2000, measured)), static_bytes=STATIC)
    assert found is not None
    assert found.scale == scale


def test_the_median_of_runs_counts_and_of_two_the_larger():
    assert combined([run(1.0), run(1.9), run(1.1)]).scale == 1.1
    assert combined([run(1.05), run(1.2)]).scale == 1.2
    assert combined([run(0.9, 5), run(0.8, 9), run(0.9)]) == Correction(scale=0.9, outside_bytes=9, num_runs=3)


def test_only_the_newest_eight_runs_count():
    assert combined([run(2.0)] * 20 + [run(1.1)] * 8) == Correction(scale=1.1, num_runs=8)


def test_a_hundredth_is_no_correction():
    assert combined([run(1.008)] * 3) == Correction(scale=1.0, num_runs=3)


def test_nothing_measured_is_said_as_nothing():
    assert combined([]) == Correction()
    assert Correction().reason == ""
    assert Correction(scale=1.04, num_runs=3).reason == "measured in 3 runs: ×1.04"


def test_a_probe_that_takes_more_counts_at_once_and_one_that_takes_less_does_not():
    before = Correction(scale=1.04, outside_bytes=5, num_runs=3)
    assert at_once(before, *peaks((3000, 3400)), static_bytes=STATIC) == Correction(
        scale=1.2, outside_bytes=5, num_runs=3
    )
    assert at_once(before, *peaks((3000, 2000)), static_bytes=STATIC) == before


def test_runs_are_kept_by_their_facts(tmp_path):
    for scale in (1.2, 1.1, 1.3):
        Calibrations(tmp_path, FACTS).add(run(scale, 40))
    assert Calibrations(tmp_path, FACTS).correction() == Correction(scale=1.2, outside_bytes=40, num_runs=3)
    assert Calibrations(tmp_path, {**FACTS, "device": "l4"}).correction() == Correction()


@pytest.mark.parametrize(
    "saved", [[1], {"a": 1}, [{"scale": 9.0, "outside_bytes": None, "num_peaks": 1}], [{"scale": None}], 7]
)
def test_a_damaged_entry_is_said_and_not_used(tmp_path, saved):
    Cache(tmp_path, "calibrations").write(digest(FACTS), saved)
    calibrations = Calibrations(tmp_path, FACTS)
    assert calibrations.correction() == Correction()
    assert calibrations.note is not None
    assert "is damaged" in calibrations.note
    calibrations.add(run(1.5))
    assert Calibrations(tmp_path, FACTS).correction().scale == 1.5
