"""What `brim check` tells about the data."""

import json

import numpy as np
import pytest

from brim.data import check_data
from brim.data.check import Lengths, Segment
from brim.data.read import read


@pytest.fixture
def source():
    return read({"q": ["x" * n for n in range(1, 11)], "a": [f"answer {n}" for n in range(10)]})


def test_the_report_counts_rows_and_tokens(source, encoder, make_config):
    config = make_config(preprocessing__global_max_sequence_length=16, output__preprocessing__max_sequence_length=7)
    report = check_data(config, source, encoder, context_length=64)
    assert [(part.name, part.num_rows) for part in report.splits] == [("train", 7), ("validation", 1), ("test", 2)]
    prompts = [1 + n for n in range(1, 11)]
    totals = [min(n + 8, 16) for n in prompts]
    assert sum(part.num_tokens for part in report.splits) == sum(totals)
    assert sum(part.num_supervised_tokens for part in report.splits) == sum(totals) - sum(prompts)
    assert max(part.total.max for part in report.splits if part.total) == 16
    assert report.events == (
        "10 of 10 rows had their answer cut: the longest from 8 to 7 tokens "
        "(output_features[0].preprocessing.max_sequence_length is 7)",
        "3 of 10 rows were cut as a whole (prompt and answer together): the longest from 19 to 16 tokens "
        "(preprocessing.global_max_sequence_length is 16)",
    )
    assert report.samples == ()


def test_lengths_are_quantiles_of_real_rows(source, encoder, make_config):
    config = make_config(preprocessing__split={"type": "random", "probabilities": [1.0, 0.0, 0.0]})
    train, validation, _ = check_data(config, source, encoder, context_length=None).splits
    assert train.prompt == Lengths(median=7, p95=11, p99=11, max=11)
    assert train.answer == Lengths(median=9, p95=9, p99=9, max=9)
    assert train.total == Lengths(median=16, p95=20, p99=20, max=20)
    assert (validation.num_rows, validation.total) == (0, None)
    assert type(train.total.median) is int


def test_samples_are_decoded_from_what_is_learned(source, encoder, make_config):
    config = make_config(
        preprocessing__split={"type": "random", "probabilities": [0.2, 0.0, 0.8]},
        prompt__template="Q: {q}\nA:",
        output__preprocessing__max_sequence_length=6,
    )
    report = check_data(config, source, encoder, context_length=None, show=3)
    assert len(report.samples) == 3
    for sample in report.samples:
        assert sample.where == f"the given columns, row {sample.key}"
        assert sample.segments == (
            Segment(text=f"<s>Q: {'x' * (sample.key + 1)}\nA:", supervised=False),
            Segment(text="answer</s>", supervised=True),
        )
    train_keys = [sample.key for sample in report.samples][:2]
    assert train_keys == sorted(train_keys)


def test_the_report_is_json(source, encoder, make_config):
    report = check_data(make_config(), source, encoder, context_length=np.int64(64).item(), show=1)
    told = json.loads(json.dumps(report.as_dict()))
    assert told["name"] == "the given columns"
    assert told["num_rows"] == 10
    assert told["splits"][0]["name"] == "train"
    assert set(told["samples"][0]) == {"key", "where", "segments"}
    assert told["samples"][0]["segments"][1]["supervised"] is True
