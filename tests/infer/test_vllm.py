"""vLLM, with a fake in its place."""

import dataclasses
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tests.infer.fake_vllm import SamplingParams, install
from tests.infer.families import GREEDY as USUAL

from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer.engines import LabelConstraint, Response, VllmEngine, respond_to, vllm as vllm_module
from brim.infer.engines.base import row_seed
from brim.models import precision

OF_VLLM = {**USUAL, "max_new_tokens": 3, "eos_token_id": [0, 9]}


def write(prompt, params):
    """The prompt's last token counted up; 7 ends at once, by a second end."""
    return [9] if prompt[-1] == 7 else [prompt[-1] + step for step in range(1, params.max_tokens)] + [0]


def vllm(settings=OF_VLLM, **how):
    model = {"folder": "/base", "precision": precision("bf16-true"), "device": torch.device("cuda")}
    return VllmEngine(**{**model, "memory_share": 0.7, "settings": settings, "seed": 5, **how})


def test_responses_have_their_tokens_and_reasons(monkeypatch, prompts):
    engines = install(monkeypatch, write)
    last = [int(row.input_ids[-1]) for row in prompts]
    assert respond_to(vllm(), prompts) == [
        Response(token_ids=[token + 1, token + 2], finish_reason="stop", end_id=0) for token in last
    ]
    assert len(engines.made) == 1
    install(monkeypatch, lambda prompt, params: [2, 3, 4])
    assert respond_to(vllm(), prompts)[0] == Response(token_ids=[2, 3, 4], finish_reason="length")
    install(monkeypatch, lambda prompt, params: [9])
    assert respond_to(vllm(), prompts)[4] == Response(token_ids=[], finish_reason="stop", end_id=9)


def test_what_vllm_is_started_with_and_that_greedy_is_a_temperature_of_nothing(monkeypatch, prompts):
    engines = install(monkeypatch, write)
    respond_to(vllm(), prompts)
    (made,) = engines.made
    assert {key: value for key, value in dataclasses.asdict(made.args).items() if value is not None} == {
        "model": "/base", "skip_tokenizer_init": True, "trust_remote_code": False, "dtype": "bfloat16", "seed": 5,
        "gpu_memory_utilization": 0.7, "max_model_len": 60 + 3, "generation_config": "vllm", "disable_log_stats": True,
        "enable_lora": False, "max_lora_rank": 16,
    }  # fmt: skip
    params = made.submitted[0][2]
    assert (params.temperature, params.seed, params.top_k) == (0.0, None, 0)


def test_each_row_is_asked_for_with_a_seed_of_its_own(monkeypatch, prompts):
    engines = install(monkeypatch, write)
    sampling = {**OF_VLLM, "do_sample": True, "temperature": 0.4, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.2}
    respond_to(vllm(settings={**sampling, "min_new_tokens": 1}), prompts)
    submitted = engines.made[0].submitted
    assert [int(request_id) for request_id, *_ in submitted][:3] == [1, 7, 4]  # the longest first
    for request_id, prompt, params, lora in submitted:
        row = prompts[int(request_id)]
        assert prompt == {"prompt_token_ids": row.input_ids.tolist()}
        assert params.seed == row_seed(5, row.key)
        assert lora is None
    assert dataclasses.asdict(submitted[0][2]).items() >= {
        "temperature": 0.4, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1.2, "max_tokens": 3, "min_tokens": 1,
        "stop_token_ids": [0, 9], "ignore_eos": True, "detokenize": False,
    }.items()  # fmt: skip
    assert submitted[0][2].output_kind.name == "FINAL_ONLY"
    assert len({params.seed for _, _, params, _ in submitted}) == len(prompts)


@pytest.mark.parametrize(("rank", "most"), [(4, 8), (16, 16), (24, 32)])
def test_an_adapter_goes_along(monkeypatch, prompts, rank, most):
    engines = install(monkeypatch, write)
    respond_to(vllm(adapter=Path("/run/model"), adapter_rank=rank), prompts)
    made = engines.made[0]
    assert (made.args.enable_lora, made.args.max_lora_rank) == (True, most)
    assert made.submitted[0][3].lora_path == "/run/model"


def test_vllm_knows_only_so_many_prompts_at_once_and_no_prompts_load_nothing(monkeypatch, prompts):
    monkeypatch.setattr(vllm_module, "_AHEAD", 5)
    engines = install(monkeypatch, write)
    assert respond_to(vllm(), prompts.take([])) == []
    assert engines.made == []
    assert len(respond_to(vllm(rows=2), prompts)) == len(prompts)
    assert engines.made[0].most_in == 5
    assert engines.made[0].args.max_num_seqs == 2


def test_rows_are_told_as_they_end_and_what_the_listener_raises_passes(monkeypatch, prompts):
    install(monkeypatch, write, rows=2)
    told = []
    vllm().run(prompts, on_finished=lambda finished: told.append([each.position for each in finished]))
    assert told[:2] == [[1, 7], [4, 10]]
    refuse = Mock(side_effect=MemoryError("the listener's own"))
    with pytest.raises(MemoryError, match="the listener's own"):
        vllm().run(prompts, on_finished=refuse)


def test_too_little_memory_and_other_failures_are_told_and_that_it_must_be_installed(monkeypatch, prompts):
    engines = install(monkeypatch, write)
    for engines.fails_at_start in (
        torch.OutOfMemoryError("CUDA out of memory."),
        ValueError("To serve at least one request, 4.0 GiB KV cache is needed, which is larger than the available"),
        ValueError("No available memory for the cache blocks."),
    ):
        with pytest.raises(OutOfMemoryError, match=r"vLLM has too little memory(.|\n)*fix: .*memory\.budget"):
            respond_to(vllm(), prompts)
    engines.fails_at_start = None
    engines.fails_at_step = RuntimeError("EngineCore encountered an issue.\nSee above")
    with pytest.raises(BrimError, match=r"vLLM failed: EngineCore encountered an issue\. See above") as caught:
        respond_to(vllm(), prompts)
    assert caught.value.exit_code == 1
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"vLLM cannot be imported[\s\S]*pip install 'brim\[vllm\]'"):
        vllm()


def test_labels_go_along_to_a_processor_of_brims_own(monkeypatch, prompts):
    constraint = LabelConstraint({"low": [(30, 31)], "high": [(90,), (90, 2)]}, end_ids=[0, 9])
    engines = install(monkeypatch, lambda prompt, params: [prompt[-1], 2, 3])
    labels = [tuple(response.token_ids) for response in respond_to(vllm(constraint=constraint), prompts)]
    assert labels == [(30, 31) if row.input_ids[-1] <= 60 else (90, 2) for row in prompts]
    assert set(labels) <= {(30, 31), (90,), (90, 2)}
    made = engines.made[0].args
    assert (made.logits_processors, made.async_scheduling) == (["brim.infer.engines.vllm:LabelProcessor"], False)
    json.dumps(engines.made[0].submitted[0][2].extra_args)  # it goes to another process
    _, _, params, _ = engines.made[0].submitted[0]
    assert _processor_of(params) is not None
    assert _processor_of(SamplingParams()) is None  # a request of somebody else's


def _processor_of(params):
    return vllm_module.LabelProcessor(None, None, False).new_req_logits_processor(params)


def test_settings_and_labels_that_vllm_is_not_for(monkeypatch):
    install(monkeypatch, write)
    vllm(settings={**OF_VLLM, "top_k": 50, "typical_p": 1.0, "use_cache": True})
    for keys in ({"num_beams": 2}, {"bad_words_ids": [[3]]}, {"max_time": 1.0}):
        with pytest.raises(InputError, match=f"generation.{next(iter(keys))} is not passed on to it"):
            vllm(settings={**OF_VLLM, **keys})
    for how, reason in (
        ({"adapter": Path("/run/model"), "precision": precision("fp32")}, "computes adapters in 16 bits alone"),
        ({"adapter": Path("/run/model"), "adapter_rank": 1000}, "rank is 1,000, and it goes up to 512"),
        ({"constraint": LabelConstraint({}, end_ids=[0]), "settings": {**OF_VLLM, "min_new_tokens": 2}}, "min_new"),
    ):
        with pytest.raises(InputError, match=reason):
            vllm(**how)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.logits_processor", None)
    vllm_module._label_processor.cache_clear()
    with pytest.raises(InputError, match="responses are limited to labels, for which this version is too old"):
        vllm(constraint=LabelConstraint({}, end_ids=[0]))
