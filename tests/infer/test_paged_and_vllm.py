"""The engines that others wrote: transformers' continuous batching, and vLLM with a fake in its place."""

import copy
import dataclasses
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import __version__

from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer.engines import (
    FixedRoom,
    PagedEngine,
    Response,
    StaticEngine,
    VllmEngine,
    VllmModel,
    paged as paged_module,
    respond_to,
    vllm as vllm_module,
    why_not_paged,
)
from brim.infer.engines.base import row_seed
from brim.infer.engines.paged import page_field
from brim.infer.engines.vllm import why_not_vllm
from brim.models import precision

from .fake_vllm import install
from .families import GREEDY as USUAL, MOST_NEW, ON_CPU, RunsOut, alone, build, ended, prompts as short_prompts, texts

pytestmark = pytest.mark.run

GREEDY = {**USUAL, "eos_token_id": [0, 91]}


def paged(model, rows, **how):
    how = {"settings": GREEDY, "seed": 0, **ON_CPU, **how}
    return PagedEngine(model, room=FixedRoom(rows, prefill_tokens=16), **how)


@pytest.fixture(scope="module")
def expected(model):
    """Responses of static batches, which have an oracle of their own."""

    def of(prompts):
        room = FixedRoom(4, prefill_tokens=1)
        return respond_to(StaticEngine(model, room=room, settings=GREEDY, seed=0, **ON_CPU), prompts)

    return of


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_paged_texts_equal_those_of_static_batches(model, prompts, expected, rows):
    states = torch.get_rng_state()
    responses = respond_to(paged(model, rows), prompts)
    assert responses == expected(prompts)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt2", "opt", "qwen3_moe"])
def test_paged_texts_of_other_architectures_too(family):
    model, rows = build(family), short_prompts()
    end, whole = ended([alone(model, row) for row in rows])
    settings = {**GREEDY, "max_new_tokens": MOST_NEW, "eos_token_id": [end]}
    assert texts(respond_to(paged(model, 3, settings=settings), rows)) == whole


def test_each_row_is_told_as_it_ends(model, prompts, monkeypatch):
    monkeypatch.setattr(paged_module, "_AHEAD", 1)  # submitted one by one
    told = []
    paged(model, 2).run(prompts, on_finished=lambda finished: told.append([each.position for each in finished]))
    assert sorted(told) == [[position] for position in range(len(prompts))]
    assert told[0] != [0]  # the longest first


def test_what_the_listener_raises_stops_the_thread_and_puts_the_attention_back(model, prompts):
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    seen, before = [], set(threading.enumerate())

    def listener(finished):
        seen.append((eager.config._attn_implementation, len(set(threading.enumerate()) - before)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        paged(eager, 2).run(prompts, on_finished=listener)
    assert seen == [("paged|eager", 1)]
    assert eager.config._attn_implementation == "eager"
    assert set(threading.enumerate()) == before


def test_texts_are_the_same_where_memory_ran_out_on_the_way(model, prompts, expected, freed):
    done, told = [], []
    freed.clear()
    with RunsOut(model, lambda rows, tokens, number: number in (1, 24)):
        responses = respond_to(paged(model, 8, on_smaller=told.append), prompts, on_batch=done.append)
    assert responses == expected(prompts)
    assert sum(done) == len(prompts)
    assert len(freed) == 2
    assert [(smaller.before, smaller.after) for smaller in told] == [(8, 4), (4, 2)]
    assert told[0].keys == (101, 107, 104, 110, 108, 102, 105, 109)
    assert not set(told[1].keys) & {101}  # it had its response by then


def test_a_row_that_never_fits_is_named_after_the_others_before_it(model, prompts):
    finished = []
    with (
        RunsOut(model, lambda rows, tokens, number: number >= 24),
        pytest.raises(OutOfMemoryError, match=r"of a single row runs out of memory \(31 tokens\)") as caught,
    ):
        paged(model, 1).run(prompts, on_finished=finished.extend)
    assert [each.position for each in finished] == [1, 7]
    assert caught.value.problems[0].where == "row 104 (numbered from 0)"


def test_another_failure_of_its_thread_is_told(model, prompts):
    def fail(module, args):
        raise RuntimeError("shapes\ndo not match")

    hook = model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(BrimError, match="continuous batching failed: shapes do not match") as caught:
            respond_to(paged(model, 4), prompts)
    finally:
        hook.remove()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"do_sample": True}, "generation.do_sample: what is drawn would depend on the rows beside it"),
        ({"num_beams": 2}, "generation.num_beams: it has no beams"),
        ({"repetition_penalty": 1.2}, "generation.repetition_penalty: it does not honour it for each row by itself"),
        ({"max_time": 3.0}, "generation.max_time: it does not honour it for each row by itself"),
        ({"use_cache": False}, "generation.use_cache is false"),
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}, ""),
    ],
)
def test_settings_that_paged_batches_cannot_honour_are_told(model, keys, reason):
    assert why_not_paged(model, {**GREEDY, **keys}, precision=precision("fp32")) == reason


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "BloomForCausalLM computes attention in a way of its own"),
        ("deepseek_v3", "DeepseekV3ForCausalLM has keys and values of different sizes"),
        ("lfm2", "Lfm2ForCausalLM keeps more than keys and values (conv)"),
    ],
)
def test_architectures_that_it_gets_wrong_are_told(family, reason):
    assert why_not_paged(build(family), GREEDY, precision=precision("fp32")) == reason


def test_what_it_cannot_do_is_refused_before_anything_runs(model, monkeypatch):
    with pytest.raises(InputError, match="precision bf16-mixed: it does not run under autocast"):
        paged(model, 4, precision=precision("bf16-mixed"))
    assert why_not_paged(model, GREEDY, precision=precision("fp32"), constraint=object()).startswith("responses are")
    monkeypatch.setattr("transformers.generation.ContinuousBatchingConfig", dataclasses.make_dataclass("Config", []))
    assert __version__ in why_not_paged(None, GREEDY, precision=precision("fp32"))


@pytest.mark.parametrize(("fields", "name"), [(["page_size", "seed"], "page_size"), (["block_size"], "block_size")])
def test_a_page_is_asked_for_by_the_name_that_this_transformers_has(fields, name):
    assert page_field(dataclasses.make_dataclass("Config", fields)) == name


OF_VLLM = {**USUAL, "max_new_tokens": 3, "eos_token_id": [0, 9]}
MODEL = VllmModel(
    folder="/base", precision=precision("bf16-true"), device=torch.device("cuda"), memory_share=0.7, rows=None
)


def write(prompt, params):
    """The prompt's last token counted up; 7 ends at once, by a second end."""
    return [9] if prompt[-1] == 7 else [prompt[-1] + step for step in range(1, params.max_tokens)] + [0]


def vllm(model=MODEL, settings=OF_VLLM, seed=5, **how):
    return VllmEngine(model, settings=settings, seed=seed, **how)


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
        "model": "/base",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "seed": 5,
        "gpu_memory_utilization": 0.7,
        "max_model_len": 60 + 3,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enable_lora": False,
        "max_lora_rank": 16,
    }
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


@pytest.mark.parametrize(("rank", "most"), [(4, 8), (16, 16), (24, 32), (1000, 1000)])
def test_an_adapter_goes_along(monkeypatch, prompts, rank, most):
    engines = install(monkeypatch, write)
    respond_to(vllm(dataclasses.replace(MODEL, adapter=Path("/run/model"), adapter_rank=rank)), prompts)
    made = engines.made[0]
    assert (made.args.enable_lora, made.args.max_lora_rank) == (True, most)
    assert made.submitted[0][3].lora_path == "/run/model"


def test_vllm_knows_only_so_many_prompts_at_once_and_no_prompts_load_nothing(monkeypatch, prompts):
    monkeypatch.setattr(vllm_module, "_AHEAD", 5)
    engines = install(monkeypatch, write)
    assert respond_to(vllm(), prompts.take([])) == []
    assert engines.made == []
    assert len(respond_to(vllm(dataclasses.replace(MODEL, rows=2)), prompts)) == len(prompts)
    assert engines.made[0].most_in == 5
    assert engines.made[0].args.max_num_seqs == 2


def test_rows_are_told_as_they_end_and_what_the_listener_raises_passes(monkeypatch, prompts):
    install(monkeypatch, write, rows=2)
    told = []
    vllm().run(prompts, on_finished=lambda finished: told.append([each.position for each in finished]))
    assert told[:2] == [[1, 7], [4, 10]]

    def refuse(finished):
        raise MemoryError("the listener's own")

    with pytest.raises(MemoryError, match="the listener's own"):
        vllm().run(prompts, on_finished=refuse)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        ValueError("To serve at least one request, 4.0 GiB KV cache is needed, which is larger than the available"),
        ValueError("No available memory for the cache blocks."),
    ],
)
def test_too_little_memory_is_told(monkeypatch, prompts, error):
    engines = install(monkeypatch, write)
    engines.fails_at_start = error
    with pytest.raises(OutOfMemoryError, match="vLLM has too little memory") as caught:
        respond_to(vllm(), prompts)
    assert "memory.budget" in caught.value.problems[0].fix


def test_its_other_failures_are_told_and_that_it_must_be_installed(monkeypatch, prompts):
    engines = install(monkeypatch, write)
    engines.fails_at_step = RuntimeError("EngineCore encountered an issue.\nSee above")
    with pytest.raises(BrimError, match=r"vLLM failed: EngineCore encountered an issue\. See above") as caught:
        respond_to(vllm(), prompts)
    assert caught.value.exit_code == 1
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"vLLM cannot be imported[\s\S]*pip install 'brim\[vllm\]'"):
        vllm()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, ""),
        ({"top_k": 50, "typical_p": 1.0, "use_cache": True}, ""),
        ({"num_beams": 2}, "generation.num_beams is not handed on to it"),
        ({"bad_words_ids": [[3]]}, "generation.bad_words_ids is not handed on to it"),
        ({"max_time": 1.0}, "generation.max_time is not handed on to it"),
    ],
)
def test_settings_that_vllm_is_not_asked_to_honour(keys, reason):
    assert why_not_vllm({**OF_VLLM, **keys}, precision=precision("fp32"), device=torch.device("cuda")) == reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": torch.device("cpu")}, "it is for a CUDA GPU, and the device is cpu"),
        ({"precision": precision("bf16-mixed")}, "precision is bf16-mixed, and it knows no mixed one"),
        ({}, "responses are limited to labels"),
    ],
)
def test_devices_and_precisions_and_labels(monkeypatch, changes, words):
    install(monkeypatch, write)
    with pytest.raises(InputError, match=words):
        vllm(dataclasses.replace(MODEL, **changes), constraint=None if changes else object())
