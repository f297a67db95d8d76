"""Engines under real memory limits: each response once, the same as without a limit, and a row that never fits is named.

RLIMIT_AS makes the allocator itself fail, as in tests/integration/test_real_limits.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux alone")

ENGINES = ["slots", "static", "paged"]
CASES = {
    "free": {"engine": "slots"},
    **{f"{engine} limited": {"engine": engine, "limit_mib": 12} for engine in ENGINES},
    **{f"{engine} too long": {"engine": engine, "limit_mib": 12, "longest": 2500} for engine in ENGINES[:2]},
}
# A token keeps 8 KiB of keys and values: 16 rows of 136 tokens 17 MiB, and a row of 2,500 tokens 20 MiB.
SCRIPT = """
import json, os, resource, sys, threading
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from brim.data.tokens import TokenRow; from brim.data.tokens import TokenRows
from brim.errors import OutOfMemoryError
from brim.infer.engines import PagedEngine
from brim.infer.engines import FixedRoom
from brim.infer.engines import SlotsEngine
from brim.infer.engines import StaticEngine
from brim.models import precision

CONFIG = LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8, head_dim=64,
    num_key_value_heads=8, max_position_embeddings=8192, initializer_range=0.4, eos_token_id=0, pad_token_id=1,
)
SETTINGS = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0, 3]}
CLASSES = {"slots": SlotsEngine, "static": StaticEngine, "paged": PagedEngine}

def used_bytes():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def rows_of(lengths):
    numbers = np.random.default_rng(0)
    return TokenRows.from_rows(
        TokenRow(key=key, input_ids=numbers.integers(4, 100, length).astype(np.int32),
                 supervised=np.zeros(length, dtype=bool))
        for key, length in enumerate(lengths)
    )

def generate(engine, limit_mib=None, longest=128):
    lengths = np.random.default_rng(1).integers(8, 128, 24)
    lengths[17] = longest
    prompts, told, responses, counts = rows_of(lengths), [], {}, {}
    how = {"settings": SETTINGS, "seed": 0, "device": torch.device("cpu"), "precision": precision("fp32")}

    def keep(finished):
        for each in finished:
            responses[each.position] = each.response.token_ids
            counts[each.position] = counts.get(each.position, 0) + 1

    def make(rows):
        room = FixedRoom(rows, prefill_tokens=256)
        return CLASSES[engine](model, room=room, on_smaller=lambda each: told.append([each.before, each.after]), **how)

    make(2).run(rows_of([4, 4]), on_finished=lambda finished: None)  # what is imported and allocated once
    refused = None
    if limit_mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + (limit_mib << 20), resource.RLIM_INFINITY))
    try:
        make(16).run(prompts, on_finished=keep)
    except OutOfMemoryError as error:
        refused = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    texts = [responses.get(position) for position in range(len(prompts))]
    return {"texts": texts, "told": told, "refused": refused, "most": max(counts.values(), default=0)}

threading.stack_size(1 << 20)  # an address space of its own, which counts
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG).eval()
for name, case in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print(json.dumps({name: generate(**case)}))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.fixture(scope="module")
def runs():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {name: run for line in done.stdout.splitlines() for name, run in json.loads(line).items()}


def test_without_a_limit_so_many_rows_run_together_as_are_asked_for(runs):
    free = runs["free"]
    assert (free["told"], free["refused"], free["most"]) == ([], None, 1)
    assert {len(text) == 8 for text in free["texts"]} == {True, False}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_does_not_fit_is_generated_all_the_same_and_once(runs, engine):
    limited = runs[f"{engine} limited"]
    assert limited["told"], "the limit did not bind"
    assert all(after < before for before, after in limited["told"])
    assert limited["refused"] is None
    assert limited["most"] == 1
    assert limited["texts"] == runs["free"]["texts"]


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_a_row_that_never_fits_is_named(runs, engine):
    refused = runs[f"{engine} too long"]["refused"]
    assert "generation of a single row runs out of memory (2,500 tokens)" in refused
    assert "row 17 (numbered from 0)" in refused


# Of prompts of about 800 tokens, 2 with 4 beams each take some 120 MiB: 8 beams at once were usual, whatever the memory.
BEAMS = """
import json, sys
import pandas as pd
import brim
from brim.memory.budget import resident_bytes

config = {
    "base_model": sys.argv[1],
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "prompt": {"template": "{text}"},
    "trainer": {"type": "none"},
    "generation": {"max_new_tokens": 3, "do_sample": False, **json.loads(sys.argv[2])},
}
rows = pd.DataFrame({"text": ["".join(f"def f{n}(a{k}): return a{k} " for k in range(60)) for n in range(4)]})
brim.Model(config).generate("def f(a):")  # what is imported and allocated once
mib = (resident_bytes() >> 20) + 110
model = brim.Model({**config, "memory": {"budget": f"{mib} MiB"}})
result = model.predict(rows, output=sys.argv[3])
about = json.load(open(sys.argv[3] + ".summary.json"))["generation"]
plan = about["plan"]
print(json.dumps({"budget": mib << 20, "peak": about["measured_peak_bytes"], "rows": about["rows_at_once"],
    "engine": about["engine"], "source": plan["source"], "reason": plan["rows_reason"], "done": len(result.predictions),
    "longest": plan["prompts"]["longest"]}))
"""


def test_beams_stay_within_the_budget(tmp_path):
    base = Path(__file__).parents[2] / "examples" / "stdlib_code" / "base-model"
    done = subprocess.run(
        [sys.executable, "-c", BEAMS, str(base), json.dumps({"num_beams": 4}), str(tmp_path / "out.jsonl")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BRIM_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak"] <= found["budget"], found
    assert (found["engine"], found["done"]) == ("static", 4)
    assert found["source"] in ("traced", "closed form")
    assert found["reason"] == "as many as there is memory for"
