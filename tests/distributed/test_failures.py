"""What a rank says when others fail or have something else; what happens amid a run is tried in faults/ranks.py."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from faults.several import together
from tests.gallery import OUT, usual

import brim
from brim.data.tokens import TokenRows
from brim.distributed import PeerError, Place, Ranks, joined
from brim.errors import InputError
from brim.models.loss import NextToken
from brim.train import update

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: other threads, which do nothing here
]
SECOND = Place(rank=1, local_rank=1, world_size=2, local_world_size=2)


def other_settings(config, output):
    return {**config, "trainer": {**config["trainer"], "learning_rate": 0.5}}, None, output


def other_data(config, output):
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"  # of another machine
    rows = output.with_name("others.jsonl")
    rows.write_text(Path(config["dataset"]).read_text().replace("1", "2"))
    return config, rows, output


def other_folder(config, output):
    return config, None, output.with_name("elsewhere")


@pytest.mark.parametrize(
    ("differs", "codes", "key"),
    [
        (other_settings, [2, 2], "trainer.learning_rate differs between the processes: rank 1"),
        (other_data, [2, 2], "the data set differs between the processes: rank 1"),
        (other_folder, [1, 2], "this process does not see the run's folder"),
    ],
)
def test_a_rank_that_has_something_else_is_named(differs, codes, key, tiny_base, sums_file, tmp_path):
    config, output = usual(tiny_base, dataset=str(sums_file)), tmp_path / "run"

    def work(rank: int) -> None:
        mine, dataset, folder = differs(config, output) if rank else (config, None, output)
        brim.Model(mine).train(dataset, output_directory=folder, say=None)

    ended = together(2, work, folder=tmp_path / "ranks", ends_all=False)
    assert [each.code for each in ended] == codes
    assert key in ended[1].error
    assert differs is not other_settings or "(rank 0: 0.01, rank 1: 0.5)" in ended[0].error
    assert key in ended[0].error or "PeerError: rank 1 failed" in ended[0].error
    assert not output.exists()


def test_what_cannot_be_sharded_is_refused_before_the_data_are_read(tiny_base, tmp_path):
    (tmp_path / "damaged.jsonl").write_text("{")
    backend = {"type": "local", "trainer": {"strategy": "fsdp"}}
    config = usual(tiny_base, dataset=str(tmp_path / "damaged.jsonl"), backend=backend, precision="fp16-mixed")
    ended = together(2, lambda rank: brim.Model(config).train(output_directory=tmp_path / "run"), folder=tmp_path)
    assert [each.code for each in ended] == [2, 2]
    assert all("fsdp does not go with a scaled loss" in each.error for each in ended)


class InterruptedAfter(brim.Observer):
    def __init__(self, step):
        self._step = step

    def write(self, record):
        if record["step"] == self._step and "learning_rate" in record:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_rank_that_was_asked_to_stop_does_not_call_it_a_failure_that_another_has_not_waited(
    tiny_base, sums_file, tmp_path
):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4, "steps_per_checkpoint": 100})

    def work(rank: int) -> None:
        if rank == 1:
            whole, calls = NextToken.loss, []

            def loss(*arguments, **options):
                calls.append(1)
                return whole(*arguments, **options) if len(calls) < 3 else os._exit(130)

            patch.object(NextToken, "loss", loss).start()
        brim.Model(config).train(output_directory=tmp_path / "run", observer=InterruptedAfter(2), say=None)

    first, _ = together(2, work, folder=tmp_path / "ranks", ends_all=False)
    assert first.error.startswith("KeyboardInterrupt")
    assert "stopped amid step 3, which is not saved" in first.error
    assert "another process of the run ended" in first.error


def test_a_rank_that_is_interrupted_while_it_waits_to_join_ends_at_once(tmp_path):
    """PyTorch waits for the other one where no handler of Python's is heard."""
    waiting = tmp_path / "waiting"

    def hears_no_handler(pid: str) -> bool:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return not int(caught[1], 16) & 1 << (signal.SIGINT - 1)

    def work(rank: int) -> None:
        if rank == 1:
            waiting.symlink_to(str(os.getpid()))
            with joined(Place.of_environment()):
                raise AssertionError("nobody else has joined")
        while not (waiting.is_symlink() and hears_no_handler(str(waiting.readlink()))):
            time.sleep(0.01)
        os.kill(int(str(waiting.readlink())), signal.SIGINT)

    ended = together(2, work, folder=tmp_path / "ranks", ends_all=False, limit_s=30)
    assert [each.code for each in ended] == [0, -signal.SIGINT]


@pytest.mark.parametrize("when", ["before all have asked for it", "then"])
def test_a_request_to_stop_in_the_last_step_is_heard_by_all(when, tiny_base, sums_file, tmp_path):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4, "train_steps": 2})
    exchanged = Ranks.exchanged

    def stopped_then(ranks, name, make):
        found = exchanged(ranks, name, make)
        if name == "stopping":
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    def work(rank: int) -> None:
        if when == "then":
            patch.object(Ranks, "exchanged", stopped_then).start()
        observer = None if when == "then" else InterruptedAfter(2)
        brim.Model(config).train(output_directory=tmp_path / "run", observer=observer, say=None)

    for each in together(2, work, folder=tmp_path / "ranks", ends_all=False):
        assert each.error.startswith("KeyboardInterrupt")
        assert "stopped after step 2" in each.error
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*2")] == ["step-00000002"]


def test_the_rows_are_not_left_behind_where_a_rank_cannot_read_them(tiny_base, sums_file, tmp_path):
    config, scratch = usual(tiny_base, dataset=str(sums_file)), tmp_path / "scratch"
    for name in ("brim-rows-of-a-killed-run", "brim-rows-of-another"):
        (scratch / name).mkdir(parents=True)
        (scratch / name / "0.npz").touch()
    other = os.open(scratch / name, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def work(rank: int) -> None:
        patch.object(tempfile, "tempdir", str(scratch)).start()
        patch.object(TokenRows, "mapped", side_effect=MemoryError("no room")).start()
        brim.Model(config).train(output_directory=tmp_path / "run", say=None)

    ended = together(2, work, folder=tmp_path / "ranks", ends_all=False)
    assert ["PeerError: rank 1 failed" in ended[0].error, "MemoryError: no room" in ended[1].error] == [True, True]
    assert [path.name for path in scratch.iterdir()] == ["brim-rows-of-another"]
    os.close(other)


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_runs_out_where_a_rank_clips_ends_all_at_once(rank, tiny_base, sums_file, tmp_path):
    config, output = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4}), tmp_path / "run"

    def work(number: int) -> None:
        if number == rank:
            patch.object(update, "get_total_norm", side_effect=torch.OutOfMemoryError(OUT)).start()
        brim.Model(config).train(output_directory=output, say=None)

    ended = together(2, work, folder=tmp_path / "ranks", ends_all=False)
    assert [each.code for each in ended] == [1, 1]
    assert "OutOfMemoryError: step 1: memory ran out when the gradient was clipped" in ended[rank].error
    assert "PeerError" in ended[1 - rank].error
    assert max(each.late_s for each in ended) < 30  # the time-out is twice as long at least


def test_a_rank_that_did_not_answer_is_not_waited_for_again(monkeypatch):
    ranks, slept = Ranks(SECOND, torch.distributed.HashStore(), timeout_s=0.2), []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(PeerError, match="rank 0 has not shown a sign of life"):
        ranks.exchanged("scores", lambda: 1)
    assert slept
    slept.clear()
    with pytest.raises(PeerError, match="rank 0 has not shown a sign of life"):
        ranks.first_does("checkpoint", lambda: None)
    assert not slept


@pytest.mark.parametrize(("backend", "is_aborted"), [("nccl", True), ("gloo", False)])
def test_a_rank_that_fails_does_not_wait_for_what_nccl_has_begun(backend, is_aborted):
    group, met = torch.distributed.distributed_c10d, iter([(torch.distributed.HashStore(), 1, 2)])
    with (
        patch("torch.distributed.rendezvous.rendezvous", lambda *_, **__: met),
        patch.object(torch.distributed, "init_process_group"),
        patch.object(torch.distributed, "get_backend_config", lambda: f"cuda:{backend}"),
        patch.object(torch.distributed, "destroy_process_group") as destroyed,
        patch.object(group, "_abort_process_group") as aborted,
        pytest.raises(ValueError, match="amid a pass"),
        joined(SECOND),
    ):
        raise ValueError("amid a pass")
    assert (aborted.called, destroyed.called) == (is_aborted, not is_aborted)


class Stuck:
    """A store that is held by a process which was stopped."""

    def check(self, keys):
        threading.Event().wait()


def test_a_store_that_does_not_answer_is_given_up():
    ranks = Ranks(SECOND, Stuck(), timeout_s=0.02)
    for _ in range(2):
        with pytest.raises(PeerError, match="the process that holds the store does not answer"):
            ranks.heard("planned")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_the_time_out_of_the_environment_is_a_number_of_seconds(text, monkeypatch):
    monkeypatch.setenv("BRIM_PEER_TIMEOUT_S", text)
    with pytest.raises(InputError, match="BRIM_PEER_TIMEOUT_S"), joined(replace(SECOND, rank=0)):
        pass
