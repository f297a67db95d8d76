"""vLLM for a session: folders and a share of the memory; brim's own weights are not loaded."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import brim
from brim.data.tokens import TokenRow, TokenRows
from brim.errors import InputError
from brim.infer.engines import respond_to
from brim.planning import engines as module
from brim.session import open_session
from brim.workflows.prediction.job import differences, fingerprint
from brim.workflows.prediction.run import Generation

from ..infer.fake_vllm import install

PROMPTS = TokenRows.from_rows(
    TokenRow(key=key, input_ids=np.array([2, 5 + key], dtype=np.int32), supervised=np.zeros(2, np.bool_))
    for key in range(3)
)


def weights():
    raise AssertionError("two models would be in memory")


@pytest.fixture
def session_of(zero_shot, monkeypatch):
    """As if there were a GPU."""
    monkeypatch.setattr(module, "_memory_share", lambda session: 0.8)

    def of(**keys):
        generation = {"engine": "vllm", "max_new_tokens": 3, "do_sample": False}
        opened = open_session(brim.Model({**zero_shot, "generation": generation, **keys}).config)
        return replace(opened, device=torch.device("cuda"))

    return of


def test_it_writes_a_jobs_responses_without_brims_own_weights(session_of, tiny_base, monkeypatch):
    engines = install(monkeypatch, lambda prompt, params: [prompt[-1], 0])
    assert Generation(weights, session_of(), PROMPTS, say=lambda line: None).about["engine"] == "vllm"
    responses = respond_to(module.vllm_engine(session_of(), rows=None), PROMPTS)
    assert [response.token_ids for response in responses] == [[5], [6], [7]]
    args = engines.made[0].args
    assert (args.model, args.dtype, args.gpu_memory_utilization, args.seed) == (str(tiny_base), "float32", 0.8, 42)
    assert engines.made[0].submitted[0][2].stop_token_ids == [0]


def test_the_models_own_ends_count(session_of, tiny_base, tmp_path, monkeypatch):
    engines = install(monkeypatch, lambda prompt, params: [7])
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    engine = module.vllm_engine(session_of(base_model=str(base)), rows=5)
    engine.run(PROMPTS, on_finished=lambda finished: None)
    assert engines.made[0].submitted[0][2].stop_token_ids == [0, 7, 8]
    assert engines.made[0].args.max_num_seqs == 5


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"quantization": {"bits": 4}}, "the base is quantised as it is loaded"),
        ({"initialize": "random"}, "initialize is random"),
        ({"precision": "bf16-mixed"}, "precision is bf16-mixed, and it knows no mixed one"),
        ({"generation": {"engine": "vllm", "num_beams": 2, "max_new_tokens": 3}}, "generation.num_beams is not handed"),
    ],
)
def test_what_it_cannot_do_is_refused(session_of, monkeypatch, keys, reason):
    install(monkeypatch, lambda prompt, params: [7])
    with pytest.raises(InputError, match=f"vLLM cannot be used: {reason}"):
        module.vllm_engine(session_of(**keys), rows=None)


@pytest.mark.parametrize("sampling", [True, False])
def test_going_on_with_it_changes_what_is_drawn_but_not_what_is_likeliest(zero_shot, sampling):
    of = {}
    for engine in ("vllm", "slots", "static"):
        generation = {"engine": engine, "max_new_tokens": 3, "do_sample": sampling}
        session = open_session(brim.Model({**zero_shot, "generation": generation}).config)
        of[engine] = fingerprint(session, split="full")
    assert of["slots"] == of["static"]
    changed = ['generation.engine: null before, "vllm" now'] if sampling else []
    assert differences(of["slots"], of["vllm"]) == changed


def test_a_cpu_is_refused_before_weights_are_loaded(zero_shot, sums_file, monkeypatch):
    monkeypatch.setattr("brim.model.load_llm", lambda *given, **more: weights())
    model = brim.Model({**zero_shot, "generation": {"engine": "vllm", "max_new_tokens": 3}})
    with pytest.raises(InputError, match="vLLM cannot be used: it is for a CUDA GPU, and the device is cpu"):
        model.predict(sums_file)
