"""The benchmarks of training: losses beside those of other loops, noise, dropout by row, and the records."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.dropout_by_row import main as dropout_by_row
from benchmarks.loop_overhead import TINY, Case, measure
from benchmarks.loss_equality import Bench, Scenario, compare
from benchmarks.noise_accuracy import Pool
from benchmarks.report import command, write_report

from benchmarks import subject


@pytest.fixture(scope="module", autouse=True)
def few_modules(tmp_path_factory):
    """Rows come from six packages of the standard library: reading all of it takes seconds."""
    library = tmp_path_factory.mktemp("library")
    for name in ("asyncio", "email", "importlib", "logging", "multiprocessing", "xml"):
        shutil.copytree(Path(sysconfig.get_path("stdlib"), name), library / name)
    subject.from_examples()
    from stdlib_code import dataset

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "stdlib_modules", partial(dataset.stdlib_modules, library))
        subject.training_rows.cache_clear()
        yield
    subject.training_rows.cache_clear()


SCENARIO = Scenario(
    method="lora", optimizer={"type": "adamw", "weight_decay": 0.01}, decay="constant", num_rows=70
)  # two full batches and one of 6 rows


@pytest.mark.run
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_losses_are_those_of_transformers_trainer_and_a_mean_of_means_is_told_apart(tmp_path):
    bench = Bench(tmp_path, base=None, num_rows=70, max_characters=300, pretraining_steps=12)
    reference = bench.brim(SCENARIO, micro_batch_rows=4)
    steps = bench.peer("transformers", SCENARIO, micro_batch_rows=8)
    assert len(steps.losses) == 3
    assert compare(SCENARIO, "peer", steps, "brim", reference, goal=1e-5).verdict == "equal"
    settings = replace(SCENARIO.peers(), averages_micro_batches=True)
    steps = bench.peer("transformers", SCENARIO, micro_batch_rows=4, settings=settings)
    assert compare(SCENARIO, "peer", steps, "brim", reference, goal=1e-3).verdict == "NOT EQUAL"


@pytest.mark.run
def test_losses_are_those_of_a_bare_loop_to_the_bit_and_dropout_by_row_is_timed_in_three_ways(tmp_path, capsys):
    case = Case(
        name="tiny", shape=TINY, method="full", micro_batch_rows=8, num_steps=5, max_characters=200, counts=False
    )
    assert measure(case, tmp_path).num_steps == 3  # asserts that each step's losses are equal
    capsys.readouterr()
    dropout_by_row(["--rows", "2", "--repetitions", "1"])
    title, columns, figures = capsys.readouterr().out.splitlines()
    assert "rate 0.05" in title
    assert "by row" in columns
    rows, milliseconds, *ratios = figures.split()
    assert (int(rows), len(ratios)) == (2, 2)
    assert all(float(figure) > 0 for figure in (milliseconds, *ratios))


def test_what_is_true_of_a_pool():
    """Of rows whose gradient points elsewhere the longer they are, and has less noise."""
    random = np.random.default_rng(0)
    lengths = random.integers(5, 100, 150)
    common, by_length = random.standard_normal((2, 40)) / 4
    gradients = common + by_length * (lengths[:, None] / 50 - 1)
    gradients += random.standard_normal((150, 40)) * np.sqrt(20 / lengths)[:, None]
    sums = gradients * lengths[:, None]
    pool = Pool(lengths=lengths, weights=lengths, products=sums @ sums.T)
    mean = sums.sum(0) / pool.weights.sum()
    assert pool.squared_gradient == pytest.approx((mean**2).sum())
    random = np.random.default_rng(1)
    batches = random.integers(0, 150, (3000, 64))
    of_batches = sums[batches].sum(1) / pool.weights[batches].sum(1)[:, None]
    assert 64 * ((of_batches - mean) ** 2).sum(1).mean() == pytest.approx(pool.gradient_variance, rel=0.03)
    noise = (sums - np.outer(pool.weights, mean)) / pool.weights.mean()
    covariance = noise.T @ noise / 150
    dimensions = np.trace(covariance) ** 2 / np.trace(covariance @ covariance)
    assert pool.effective_dimensions == pytest.approx(dimensions)


def test_a_record_holds_what_is_needed_to_judge_and_repeat_it_and_nothing_of_whose_machine_it_was(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["/somewhere/startup.py", "--repeats", "9"])
    path = write_report("startup", figures={"median_s": 0.25}, num_threads=2, folder=tmp_path / "results")
    record = json.loads(path.read_text())
    assert path == tmp_path / "results" / "startup.json"
    assert record["command"] == "python -m benchmarks.startup --repeats 9"
    assert record["median_s"] == 0.25
    assert record["machine"]["torch_threads"] == 2
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["torch"] == torch.__version__
    for private in (socket.gethostname(), str(Path.home()), str(Path.cwd())):
        assert private not in path.read_text()
    given = ["--base-model", "/home/me/llama", "-n", "2"]
    assert command("x", given) == "python -m benchmarks.x --base-model llama -n 2"


def test_the_ideal_of_two_ranks_of_which_one_takes_a_quarter_longer_is_one_ranks_time_over_their_speeds():
    """Planned dealing without any loss reaches 8/9 of it; beside two ranks that lost time themselves, more."""
    from benchmarks.claimed_ranks import CONTENDERS, figures_of  # here, as it imports an example

    seconds = dict(zip(CONTENDERS, (18.0, 9.9, 9 * 1.25, 10.0), strict=True))
    figures = figures_of([{name: {"seconds": each} for name, each in seconds.items()}])
    expected = (8 / 9, 8 / 9 * 1.1, 1.0, 1.1, 1.125)
    assert tuple(figures.values()) == pytest.approx(expected)
