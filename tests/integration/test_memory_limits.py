"""Memory that runs out: whole runs that are told so, and processes under a real limit, which go on and learn the same.

RLIMIT_AS makes the allocator itself fail, at any allocation, as a full device does. Each case is a process of its own,
forked from one that has imported PyTorch: a limit is not raised again, and what others touched would decide what fits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from tests.conftest import make_llama, make_tokenizer
from tests.gallery import OUT, Scarce, usual
from tests.integration.conftest import MODEL, events, losses, steps, validation
from tests.train.scarce import apart

import brim
from brim.models.loss import NextToken
from brim.train import job as exporting

pytestmark = pytest.mark.run
linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux alone")


def test_a_run_that_runs_out_learns_the_same_and_tells_it(gallery):
    """Two rows at once are the most, and four are asked for."""
    clean, run = gallery("lora").run, gallery("replayed").run
    np.testing.assert_allclose(losses(run), losses(clean), rtol=1e-5)
    (out,), (cap,), (replay,) = (events(run, kind) for kind in ("oom", "cap", "replay"))
    assert (out["step"], len(out["rows"]), cap["before"], cap["after"], replay["num_micro_batches"]) == (1, 4, 4, 2, 4)
    assert [step["num_micro_batches"] for step in steps(run)] == [4, 4, 4, 2] * 2
    last = (run / "notes.txt").read_text().splitlines()[-1]
    assert re.match("memory ran out (once|1 times?) in training.* metrics.jsonl$", last)
    before, after = (load_file(folder / MODEL) for folder in (clean, run))
    assert apart(after, before) < 1e-4


def test_an_evaluation_shrinks_once_and_never_the_training_batch(train, tmp_path, monkeypatch, gallery):
    run, clean, scarce = tmp_path / "run", gallery("lora").run, Scarce(NextToken.scores, 2)
    monkeypatch.setattr(NextToken, "scores", lambda *given: scarce(*given))
    result = train("run", trainer={"eval_batch_size": 4})
    (event,) = events(run, "oom")
    assert (event["step"], event["where"], event["rows_at_once"], len(event["rows"])) == (4, "evaluation", 2, 4)
    assert max(scarce.tried[1:]) == 2
    assert losses(run) == losses(clean)
    assert validation(run) == pytest.approx(validation(clean), rel=1e-5)
    assert result.metrics["validation"]["num_rows"] == 4


def test_the_model_is_written_at_the_second_try_or_from_the_checkpoints(train, tmp_path, monkeypatch, gallery):
    whole, failures = exporting.write_manifest, [MemoryError] * 2

    def scarce(folder):
        if failures:
            raise failures.pop()
        whole(folder)

    monkeypatch.setattr(exporting, "write_manifest", scarce)
    with pytest.raises(brim.BrimError, match="memory ran out twice when the model was written: MemoryError"):
        train("run")
    assert not (tmp_path / "run" / "model").exists()
    failures.append(OSError(28, "No space left on device"))
    with pytest.raises(brim.errors.CheckpointError, match=r"the model could not be written: .*No space left"):
        train("run", resume=True)
    failures.append(MemoryError)
    train("run", resume=True)
    assert (tmp_path / "run" / MODEL).read_bytes() == (gallery("lora").run / MODEL).read_bytes()


def test_predictions_and_evaluations_say_that_they_take_fewer_rows(tiny_base, sums_file):
    greedy = {"max_new_tokens": 3, "do_sample": False}
    model = brim.Model(usual(tiny_base, adapter=None, generation=greedy, trainer={"eval_batch_size": 4}))
    expected = model.predict(sums_file, split="test").predictions
    said = []

    def scarce(module, inputs, output):
        if len(output.last_hidden_state) > 1:
            raise torch.OutOfMemoryError(OUT)

    hook = model._weights().model.model.register_forward_hook(scarce)
    try:
        found = model.predict(sums_file, split="test", say=said.append).predictions
        evaluated = model.evaluate(sums_file, split="test", say=said.append)
    finally:
        hook.remove()
    assert found["answer_response"].tolist() == expected["answer_response"].tolist()
    assert evaluated.metrics["num_rows"] == 8
    told = [line for line in said if "ran out of memory" in line]
    assert [line.split(":")[0] for line in told] == ["generation", "generation", "evaluation", "evaluation"]
    assert told[-1].endswith("they are run again, and from now on 1 together")


# Processes that may not have more address space

LIMITED = """
import ctypes, gc, json, os, resource, sys, threading, warnings
import numpy as np
import torch
from tests.infer.families import GREEDY, ON_CPU, rows_of
from transformers import LlamaConfig, LlamaForCausalLM
import brim
from brim.errors import OutOfMemoryError
from brim.infer.engines import FixedRoom, SlotsEngine, StaticEngine

def limit(mib=None):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    most = resource.RLIM_INFINITY if mib is None else used + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

class Limit:
    def __init__(self, mib):
        self.mib = mib

    def start(self, *, first_step, total_steps, total_samples):
        limit(self.mib)

    def write(self, record): ...

    def close(self):
        limit()

M_MMAP_THRESHOLD = -3  # malloc.h

def train(config, dataset, folder):
    warnings.simplefilter("ignore")
    # Freed tensors go back to the system at once, so that the limit is on those that are alive.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"  # so that brim leaves that as it is
    for mib in (None, 12):
        brim.Model(config).train(dataset, output_directory=f"{folder}/{mib}", observer=Limit(mib), say=None)

CONFIG = LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8, head_dim=64,
    num_key_value_heads=8, max_position_embeddings=8192, initializer_range=0.4, eos_token_id=0, pad_token_id=1,
)

def generate(engine, limit_mib=None, longest=128):
    lengths = np.random.default_rng(1).integers(8, 128, 24)
    lengths[17] = longest
    told, responses = [], []

    def make(rows):
        kind = {"slots": SlotsEngine, "static": StaticEngine}[engine]
        how = {"settings": {**GREEDY, "eos_token_id": [0, 3]}, "seed": 0, **ON_CPU}
        smaller = lambda each: told.append([each.before, each.after])
        return kind(model, room=FixedRoom(rows, prefill_tokens=256), on_smaller=smaller, **how)

    make(2).run(rows_of([4, 4]), on_finished=lambda finished: None)  # what is imported and allocated once
    refused = None
    if limit_mib is not None:
        limit(limit_mib)
    try:
        make(16).run(rows_of(lengths), on_finished=responses.extend)
    except OutOfMemoryError as error:
        refused = str(error)
    limit()
    texts = sorted([each.position, each.response.token_ids] for each in responses)
    return {"texts": texts, "told": told, "refused": refused}

threading.stack_size(1 << 20)  # an address space of its own, which counts
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG).eval()
gc.freeze()
for name, (do, case) in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print(json.dumps({name: globals()[do](**case)}))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
ENGINES = ["slots", "static"]
# A token keeps 8 KiB of keys and values: 16 rows of 136 tokens 17 MiB, and a row of 2,500 tokens 20 MiB.
GENERATIONS = {
    "free": {"engine": "slots"},
    **{f"{engine} limited": {"engine": engine, "limit_mib": 12} for engine in ENGINES},
    **{f"{engine} too long": {"engine": engine, "limit_mib": 12, "longest": 2500} for engine in ENGINES},
}


@pytest.fixture(scope="module")
def told(shared_folder):
    """What each child said, by its name, and the folder of a run without a limit and of one with."""
    folder = shared_folder / "limited"
    with FileLock(f"{folder}.lock"):
        if not (folder / "told.jsonl").exists():
            folder.mkdir(exist_ok=True)
            (folder / "told.jsonl").write_text(run_limited(folder))
    lines = (folder / "told.jsonl").read_text().splitlines()
    said = {name: value for line in lines for name, value in json.loads(line).items()}
    return {**said, "train": (folder / "None", folder / "12")}


def run_limited(folder):
    base, data = folder / "base", folder / "rows.jsonl"
    base.mkdir()
    make_tokenizer(base)
    make_llama(base, hidden_size=64, intermediate_size=128, max_position_embeddings=512)
    rows = [
        {"question": "x y " * (20 + 3 * (number % 32)), "answer": f" {number}", "split": number // 32}
        for number in range(64)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = usual(base, trainer={"effective_batch_size": 32, "batch_size": 32, "eval_batch_size": 32})
    train = {"config": settings, "dataset": str(data), "folder": str(folder)}
    cases = {"train": ("train", train), **{name: ("generate", case) for name, case in GENERATIONS.items()}}
    how = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", LIMITED, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **how}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@linux
@pytest.mark.process
def test_under_a_real_limit_training_and_evaluation_go_on_and_learn_the_same(told):
    """Limited from the first step to the end of the run to 12 MiB more than the process has then."""
    free, limited = told["train"]
    assert events(free, "oom") == []
    failed = events(limited, "oom")
    assert {event["where"] for event in failed} >= {"evaluation"}
    assert {event["where"] for event in failed} & {"forward", "backward"}
    assert all("can't allocate memory" in event["message"] for event in failed if "message" in event)
    np.testing.assert_allclose(losses(limited), losses(free), rtol=1e-5)
    assert validation(limited) == pytest.approx(validation(free), rel=1e-5)
    assert [step["num_samples"] for step in steps(limited)] == [32, 64]


@linux
@pytest.mark.process
def test_what_does_not_fit_is_generated_all_the_same_and_once(told):
    free = told["free"]
    assert (free["told"], free["refused"]) == ([], None), "without a limit"
    assert [position for position, _ in free["texts"]] == list(range(24)), "each once"
    assert {len(text) == 8 for _, text in free["texts"]} == {True, False}
    for engine in ENGINES:
        limited = told[f"{engine} limited"]
        assert limited["told"], "the limit did not bind"
        assert all(after < before for before, after in limited["told"])
        assert (limited["refused"], limited["texts"]) == (None, free["texts"])
        refused = told[f"{engine} too long"]["refused"]
        assert "generation of a single row runs out of memory (2,500 tokens)" in refused
        assert "row 17 (numbered from 0)" in refused
