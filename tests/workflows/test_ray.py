"""Predictions by actors of a real Ray cluster, begun for them: one process's file, whoever dies, and who can reach it."""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.gallery import sums
from tests.workflows.test_prediction_job import files

import brim
from brim.errors import ConfigError

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes and their sockets are read from /proc")


def test_to_train_on_a_ray_cluster_is_refused_with_what_to_use(config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"(?s)backend.type.*brim does not|brim does not train on a Ray cluster.*torchrun.*TrainJob"
    ):
        brim.Model(config, overrides=["backend.type=ray"]).train(sums(), output_directory=tmp_path / "run")


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'brim[ray]'")
@linux
def test_two_actors_write_what_one_process_writes_though_one_is_killed(model, zero_shot, tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    model.predict(data, output=tmp_path / "one.parquet", scores=True)
    counts, places, said = [], set(), []

    def on_batch(count):
        counts.append(count)
        if len(counts) == 2:
            begun = _descendants()
            places.update(_listening(begun))
            os.kill(next(each for each in begun if "_Actor" in _command(each)), signal.SIGKILL)

    several = brim.Model(zero_shot, overrides=["backend.type=ray"])
    result = several.predict(
        data, output=tmp_path / "p.parquet", scores=True, gpus=2, say=said.append, on_batch=on_batch
    )
    assert files(tmp_path / "p.parquet") == files(tmp_path / "one.parquet")
    assert sum(counts) == 40
    assert sorted(each["starts"] for each in result.summary["generation"]["members"]) == [1, 2]
    assert len(places) > 1
    assert {address for address in places if not address.endswith("0100007F")} == set()
    assert any(line.startswith("Ray: 1 machine at 127.0.0.1:") for line in said)
    assert [command for each in _descendants()[1:] if (command := _command(each))] == []


def _command(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has ended
        return ""


def _descendants():
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [os.getpid()]
    for each in found:
        found += [process for process, parent in parents.items() if parent == each]
    return found


def _listening(processes):
    """Return the addresses, in hexadecimal, at which these processes listen."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:
                continue
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
