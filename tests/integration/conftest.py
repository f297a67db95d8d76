"""What the parts of a run's log say, and a run by the usual configuration."""

from __future__ import annotations

import json

import pytest
from tests.gallery import usual

import brim

FULL = {"adapter": None}
MODEL = "model/adapter_model.safetensors"


def log(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run):
    return [record for record in log(run) if record.get("split") == "train" and "event" not in record]


def losses(run):
    return [step["loss"] for step in steps(run)]


def validation(run):
    return {record["step"]: record["loss"] for record in log(run) if record.get("split") == "validation"}


def events(run, kind):
    return [record for record in log(run) if record.get("event") == kind]


def untimed(records):
    """Return the records without times, and without where checkpoints were written."""
    timed = ("seconds", "peak_bytes")
    return [{k: v for k, v in r.items() if k not in timed} for r in records if r.get("event") != "checkpoint"]


def told(run):
    return untimed(log(run))


@pytest.fixture
def train(tiny_base, sums_file, tmp_path):
    """train("name", trainer={…}, …): the result of a run into that folder, by the usual configuration with changes."""

    def run(name, *, base=tiny_base, data=sums_file, resume=False, observer=None, say=None, **changes):
        model = brim.Model(usual(base, **changes))
        return model.train(data, output_directory=tmp_path / name, resume=resume, observer=observer, say=say)

    return run
