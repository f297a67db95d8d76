"""Predictions by several processes: the file of one process, whoever dies, and whoever goes on."""

import json
import multiprocessing
import os
import signal
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from faults.several import forked
from tests.gallery import sums
from tests.workflows.test_child import is_there
from tests.workflows.test_prediction_job import Killed, files

import brim
from brim.errors import ModelError
from brim.workflows.prediction import member, members
from brim.workflows.runs import child

pytestmark = pytest.mark.run


@pytest.fixture
def processes(monkeypatch):
    """Those that members ran in; forked, so that they have what a test changes."""
    started = []

    def start(*arguments):
        started.append(forked(*arguments))
        return started[-1]

    monkeypatch.setattr(child, "_process", start)
    yield started
    assert [process.pid for process in started if is_there(process.pid)] == []


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """What one process writes."""
    folder = tmp_path_factory.mktemp("whole")
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    model.predict(data, output=folder / "p.parquet", scores=True)
    return data, folder / "p.parquet"


def test_two_processes_write_what_one_writes(model, whole, tmp_path, processes, monkeypatch):
    data, path = whole
    said, counts, begun = [], [], []
    run, both = member.Generation.run, multiprocessing.get_context("fork").Barrier(2, timeout=60)

    def runs_beside_the_other(self, prompts, **how):
        if not begun:  # of this process: or the first could be done before the other has begun
            begun.append(both.wait())
        return run(self, prompts, **how)

    monkeypatch.setattr(member.Generation, "run", runs_beside_the_other)
    result = model.predict(
        data, output=tmp_path / "p.parquet", scores=True, gpus=2, say=said.append, on_batch=counts.append
    )
    assert files(tmp_path / "p.parquet") == files(path)
    assert (len(processes), sum(counts)) == (2, 40)
    facts = result.summary["generation"]["members"]
    assert sum(each["rows"] for each in facts) == 40
    assert all(each["rows"] and each["leases"] and 0 < each["busy"] <= 1 and each["starts"] == 1 for each in facts)
    assert result.summary["generation"]["rows_at_once"] == 8
    assert sum(line.startswith("batch: 4 rows") for line in said) == 1  # the plan is told once, not by each


def test_a_process_that_dies_costs_its_unfinished_rows_alone(model, whole, tmp_path, processes):
    data, path = whole
    counts, said = [], []

    def on_batch(count):
        counts.append(count)
        if len(counts) == 2:
            os.kill(processes[0].pid, signal.SIGKILL)

    result = model.predict(data, output=tmp_path / "p.parquet", scores=True, gpus=2, on_batch=on_batch, say=said.append)
    assert files(tmp_path / "p.parquet") == files(path)
    assert (len(processes), sum(counts)) == (3, 40)
    assert [each["starts"] for each in result.summary["generation"]["members"]] == [2, 1]
    (died,) = [line for line in said if "signal 9" in line]
    assert "process 0 of 2: it ended by itself" in died
    assert "it is started again" in died


@pytest.mark.parametrize(("visible", "cards"), [(None, ["0", "1", "0"]), ("3,GPU-ab", ["3", "GPU-ab", "3"])])
def test_each_process_sees_a_card_of_its_own(monkeypatch, visible, cards):
    """Not only PyTorch's choice: vLLM takes the first card that it sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(members.torch.cuda, "device_count", lambda: 2)
    seen = []
    monkeypatch.setattr(
        members, "Child", lambda *arguments, environment, **how: seen.append(environment) or mock.Mock()
    )
    with members.Processes({}, 3, 3) as processes:
        for member in range(3):
            processes.start(member)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == cards


def test_what_was_stopped_goes_on_with_more_processes_and_with_none(model, whole, tmp_path, processes):
    data, path = whole

    def predict(gpus, num_rows):
        counts = []

        def on_batch(count):
            counts.append(count)
            if sum(counts) >= num_rows:
                raise Killed

        model.predict(
            data, output=tmp_path / "p.parquet", scores=True, resume=True, gpus=gpus, on_batch=on_batch, say=None
        )

    for gpus, num_rows in ((2, 8), (3, 20), (1, 28)):
        with pytest.raises(Killed):
            predict(gpus, num_rows)
        assert not any(is_there(process.pid) for process in processes)
    predict(2, 1_000)
    assert files(tmp_path / "p.parquet") == files(path)


def test_a_row_that_kills_is_found_and_treated_by_on_error(model, whole, tmp_path, processes, monkeypatch):
    data, path = whole
    run = member.Generation.run

    def dies_over_row_7(self, prompts, **how):
        if 7 in prompts.keys:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, prompts, **how)

    monkeypatch.setattr(member.Generation, "run", dies_over_row_7)
    with pytest.raises(brim.errors.DataError, match=r"(?s)sums.jsonl:8: two processes .*signal 9.*--on-error skip"):
        model.predict(data, output=tmp_path / "p.parquet", scores=True, gpus=2)
    model.predict(data, output=tmp_path / "p.parquet", scores=True, gpus=2, resume=True, on_error="skip")
    there, expected = pq.read_table(tmp_path / "p.parquet"), pq.read_table(path)
    assert there.equals(expected.take(np.delete(np.arange(40), 7)))
    (entry,) = pq.read_table(tmp_path / "p.parquet.ledger.parquet").to_pylist()
    assert (entry["key"], entry["event"]) == (7, "dropped_bad")


def test_what_keeps_all_from_starting_is_their_own_error_and_the_job_is_kept(
    model, whole, tmp_path, processes, monkeypatch
):
    data, _ = whole

    def fails(*arguments, **how):
        raise ModelError(what="no weights here", fix="f")

    monkeypatch.setattr(member, "load_llm", fails)
    with pytest.raises(ModelError, match="no weights here"):
        model.predict(data, output=tmp_path / "p.parquet", gpus=2)
    assert len(processes) == 2  # the same would be said again

    def breaks(*arguments, **how):
        print("said before")
        raise RuntimeError("no luck with hf_abcdefghijklmnopqrstuvwxyz01234567")

    monkeypatch.setattr(member, "load_llm", breaks)
    with pytest.raises(
        brim.BrimError, match=r"(?s)RuntimeError: no luck with \*\*\*.*    said before.*in breaks"
    ) as raised:
        model.predict(data, output=tmp_path / "p.parquet", gpus=2)
    assert "hf_abc" not in str(raised.value)
    processes.clear()
    monkeypatch.setattr(member, "load_llm", lambda *arguments, **how: os._exit(3))
    with pytest.raises(brim.BrimError, match=r"process \d of 2: it ended by itself \(exit code 3\)"):
        model.predict(data, output=tmp_path / "p.parquet", gpus=2)
    assert len(processes) <= 2 + 2 * 3


def test_a_run_s_evaluation_and_its_merged_adapter_are_those_of_one_process(gallery, processes):
    run = gallery("lora")

    def taken(gpus):
        model = brim.Model.load(run.run)
        how = {"with_texts": True, "against": "base"}
        merged = model.predict(run.data, generation={"merge_adapter": True}, gpus=gpus, say=None)
        return model.evaluate(run.data, **how, gpus=gpus, say=None), merged

    (one, alone), (two, together) = taken(1), taken(2)
    assert len(processes) == 6
    assert two.rows.drop(columns="loss").equals(one.rows.drop(columns="loss"))
    np.testing.assert_allclose(two.rows["loss"], one.rows["loss"], rtol=1e-5)
    assert two.comparison.differences == pytest.approx(one.comparison.differences, rel=1e-3, abs=1e-6)
    assert together.predictions.equals(alone.predictions)
    assert alone.summary["generation"]["merge_adapter"] is together.summary["generation"]["merge_adapter"] is True


@pytest.mark.parametrize(
    ("overrides", "pooling"), [([], "mean"), (["trainer.eval_batch_size=7"], None), (["trainer.packing=true"], "last")]
)
def test_vectors_are_those_of_one_process_to_the_byte_though_one_is_killed(
    model, tmp_path, processes, monkeypatch, overrides, pooling
):
    data = [{"question": "ab"[number % 2] * (number**2 % 97 + 1), "answer": "1"} for number in range(240)]
    monkeypatch.setattr(member, "_PART_BYTES", 2_000)  # of which a batch has several, with a vector a token
    how = {"pooling": pooling, "normalize": True}
    one, three = brim.Model(model.config, overrides=overrides), brim.Model(model.config, overrides=overrides)
    alone = one.collect_activations(["last", 0], data, output=tmp_path / "one.parquet", **how)
    counts, said = [], []

    def on_batch(count):
        counts.append(count)
        if len(counts) == 1:
            os.kill(processes[0].pid, signal.SIGKILL)

    path = tmp_path / "three.parquet"
    how |= {"on_batch": on_batch, "say": said.append}
    found = three.collect_activations(["last", 0], data, output=path, gpus=3, **how)
    assert path.read_bytes() == (tmp_path / "one.parquet").read_bytes()
    assert (sum(counts), found.widths, len(processes)) == (240, alone.widths, 3 + (len(counts) > 1))
    assert any(line.startswith("runs: 3 processes") for line in said)
