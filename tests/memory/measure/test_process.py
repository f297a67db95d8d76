"""A measurement in processes of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from brim.config import load_config
from brim.errors import BrimError, ConfigError, InputError
from brim.models import locate
from brim.workflows.measure import PhasePeak, run as process
from brim.workflows.measure.messages import Report
from brim.workflows.measure.run import measure, measured_alone
from brim.workflows.measure.work import run

linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set's peak is read from /proc")
TRAINS = {"trainer": {"type": "finetune", "learning_rate": 0.001}}


def config_of(base, **settings):
    return load_config({"base_model": str(base), **settings}).config


@pytest.fixture
def parts(monkeypatch):
    """What would have been measured; each process reports 1,000 bytes a layer and 10 a phase."""
    asked = []

    def measured(request, environment=process.RETURNED_AT_ONCE):
        asked.append(request)
        layers = request.folder.config["num_hidden_layers"]
        steps = [("train", n + 1) for n in range(request.num_steps)] if "train" in request.phases else []
        others = [(phase, None) for phase in request.phases if phase in ("evaluate", "generate")]
        return Report(
            device="cpu",
            kind="cpu",
            baseline_bytes=5,
            peaks=tuple(peak(phase, step, 1000 * layers + 10) for phase, step in [("load", None), *steps, *others]),
            end_bytes=tuple(100 * n for n, _ in enumerate(steps)),
            stayed=(),
            timeline=None,
            notes=("said by each",),
        )

    monkeypatch.setattr(process, "measured_alone", measured)
    return asked


def peak(phase, step, total_bytes):
    return PhasePeak(
        phase=phase,
        step=step,
        allocated_bytes=None,
        reserved_bytes=None,
        outside_bytes=None,
        total_bytes=total_bytes,
        end_bytes=0,
        baseline_bytes=5,
    )


def test_training_and_running_are_measured_apart_and_loading_told_once(tiny_base, parts):
    found = measure(config_of(tiny_base, **TRAINS), locate(str(tiny_base)), batch_size=2, sequence_length=16, steps=2)
    assert [(request.phases, request.trainable) for request in parts] == [
        (("load", "train"), True),
        (("evaluate", "generate"), True),
    ]
    phases = [(each.phase, each.step) for each in found.peaks]
    assert phases == [("load", None), ("train", 1), ("train", 2), ("evaluate", None), ("generate", None)]
    assert found.notes == ("said by each",)
    assert found.layers_run == (2,)
    assert found.peak("train").total_bytes == 2010


def test_only_what_was_asked_for_is_told(tiny_base, parts):
    found = measure(
        config_of(tiny_base), locate(str(tiny_base)), batch_size=1, sequence_length=8, phases=("generate",), steps=1
    )
    assert [each.phase for each in found.peaks] == ["generate"]
    with pytest.raises(KeyError):
        found.peak("load")


def test_a_step_has_two_micro_batches_where_it_has_more(tiny_base, parts):
    trainer = {**TRAINS["trainer"], "gradient_accumulation_steps": 8}
    measure(
        config_of(tiny_base, trainer=trainer),
        locate(str(tiny_base)),
        batch_size=3,
        sequence_length=8,
        phases=("train",),
    )
    assert parts[0].step_lengths == ((8,) * 6,)


def test_two_depths_are_run_and_the_peaks_extrapolated(tiny_base, parts):
    folder = locate(str(tiny_base))
    deep = replace(folder, config={**folder.config, "num_hidden_layers": 40})
    found = measure(
        config_of(tiny_base, **TRAINS), deep, batch_size=1, sequence_length=8, phases=("train",), steps=1, layers=1
    )
    assert [request.folder.config["num_hidden_layers"] for request in parts] == [1, 2]
    assert [each.total_bytes for each in found.peaks] == [40_010]
    assert (found.layers_run, found.num_layers) == ((1, 2), 40)
    assert "extrapolated from 1 and 2 layers of random weights to 40" in found.notes


def test_live_bytes_that_rise_at_each_step_are_a_leak(tiny_base, parts):
    given = {"batch_size": 1, "sequence_length": 8, "phases": ("train",)}
    found = measure(config_of(tiny_base, **TRAINS), locate(str(tiny_base)), steps=5, **given)
    assert parts[0].looks_for_leaks
    assert found.leak is not None
    assert (found.leak.bytes_per_step, str(found.leak)) == (100, "live bytes rose by 100 a step, 4 times in a row")
    assert found.as_dict()["leak"] == {"bytes_per_step": 100, "end_bytes": [0, 100, 200, 300, 400], "stayed": []}
    assert measure(config_of(tiny_base, **TRAINS), locate(str(tiny_base)), steps=4, **given).leak is None


def test_a_configuration_that_trains_nothing_has_no_step_to_measure(tiny_base):
    with pytest.raises(ConfigError, match="a training step cannot be measured"):
        measure(config_of(tiny_base), locate(str(tiny_base)), batch_size=1, sequence_length=8, phases=("train",))


def test_rows_longer_than_the_context_are_refused(tiny_base):
    with pytest.raises(InputError, match="rows of 129 tokens are longer than the model's context"):
        measure(config_of(tiny_base, **TRAINS), locate(str(tiny_base)), batch_size=1, sequence_length=129)


@linux
def test_a_process_of_its_own_gives_the_peaks_without_the_weights(asked):
    request = asked(num_steps=1)
    report = measured_alone(replace(request, folder=replace(request.folder, has_weights=False)))
    [load, train] = report.peaks
    weights_bytes = 30_000 * 4
    assert report.baseline_bytes < load.total_bytes < report.baseline_bytes + 16 * 2**20
    assert report.baseline_bytes + 3 * weights_bytes < train.total_bytes < report.baseline_bytes + 32 * 2**20
    json.dumps(report.end_bytes)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (1, "the process that measured ended with 1: its last words"),
        (-9, "ended with -9; the system ends a process that takes too much memory: its last words"),
    ],
)
def test_a_process_that_dies_is_told_with_its_last_words(tmp_path, code, told):
    ended = subprocess.CompletedProcess([], code, stderr=b"its last words\n")
    with pytest.raises(BrimError, match=re.escape(told)):
        process._report_in(tmp_path, ended)


def test_a_problem_of_that_process_is_raised_here_as_the_same_kind(tmp_path):
    problem = {"what": "no room", "where": "", "expected": "", "fix": "buy some"}
    (tmp_path / "error.json").write_text(json.dumps({"exit_code": 2, "problems": [problem]}))
    with pytest.raises(InputError, match="no room\n  fix: buy some"):
        process._report_in(tmp_path, subprocess.CompletedProcess([], 0, stderr=b""))


def test_a_device_that_is_not_there_is_refused(asked):
    with pytest.raises(InputError, match="there is no device 'rocm' here to measure on"):
        run(asked(device="rocm"))
