"""What steps took against what was predicted."""

import numpy as np
import pytest
import torch

from brim.batching import MicroBatch
from brim.train import Peak
from brim.train.logs import Peaks


def micro_batch(rows, length, peak_bytes):
    return MicroBatch(rows=np.arange(rows), padded_length=length, peak_bytes=peak_bytes)


class Counter:
    """A CUDA device's count of allocated bytes."""

    def __init__(self, monkeypatch):
        self.most = 0
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", self.reset)

    def reset(self, device):
        self.most = 100  # what stays


@pytest.fixture
def counter(monkeypatch):
    return Counter(monkeypatch)


def test_the_largest_measured_peak_of_a_shape_is_kept(counter):
    peaks = Peaks(torch.device("cuda"))
    for measured, shapes in [(700, [(2, 9, 600), (3, 4, 500)]), (650, [(2, 9, 600)]), (300, [(4, 1, 310)])]:
        peaks.begin()
        counter.most = measured
        peaks.end(micro_batch(*shape) for shape in shapes)
    assert peaks.by_shape() == (
        Peak(rows=2, padded_length=9, predicted_bytes=600, measured_bytes=700),
        Peak(rows=4, padded_length=1, predicted_bytes=310, measured_bytes=300),
    )


def test_what_was_the_most_so_far_outlives_the_counter(counter):
    peaks = Peaks(torch.device("cuda"))
    most = []
    for measured in (500, 900, 700):
        peaks.begin()
        counter.most = measured
        most.append(peaks.most_bytes())
    assert most == [500, 900, 900]


def test_without_predictions_there_is_nothing_to_compare():
    peaks = Peaks(torch.device("cpu"))
    peaks.begin()
    peaks.end([micro_batch(2, 9, None)])
    assert peaks.by_shape() == ()
    assert peaks.most_bytes() > 0
