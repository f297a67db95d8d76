"""transformers' continuous batching as an engine: texts, its thread, its cache, and what it is refused for."""

import copy
import dataclasses
import threading

import pytest
import torch
from transformers import __version__

from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer.engines import FixedRoom, PagedEngine, StaticEngine, paged as module, respond_to, why_not_paged
from brim.infer.engines.paged import page_field
from brim.models import precision

from .families import build

GREEDY = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0, 91]}


def engine(model, rows, **how):
    how = {"settings": GREEDY, "seed": 0, "device": torch.device("cpu"), "precision": precision("fp32"), **how}
    return PagedEngine(model, room=FixedRoom(rows, prefill_tokens=16), **how)


@pytest.fixture(scope="module")
def expected(model):
    """Responses of static batches, which have an oracle of their own."""

    def of(prompts):
        room = FixedRoom(4, prefill_tokens=1)
        how = {"settings": GREEDY, "seed": 0, "device": torch.device("cpu"), "precision": precision("fp32")}
        return respond_to(StaticEngine(model, room=room, **how), prompts)

    return of


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_greedy_texts_equal_those_of_static_batches(model, prompts, expected, rows):
    states = torch.get_rng_state()
    responses = respond_to(engine(model, rows), prompts)
    assert responses == expected(prompts)
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt2", "opt", "qwen3_moe"])
def test_other_architectures_too(family):
    from .test_families import MOST_NEW, ON_CPU, alone, ended, prompts as short_prompts

    model, rows = build(family), short_prompts()
    end, texts = ended([alone(model, row) for row in rows])
    settings = {**GREEDY, "max_new_tokens": MOST_NEW, "eos_token_id": [end]}
    responses = respond_to(engine(model, 3, settings=settings, **ON_CPU), rows)
    assert [response.token_ids for response in responses] == texts


def test_each_row_is_told_as_it_ends(model, prompts, monkeypatch):
    monkeypatch.setattr(module, "_AHEAD", 1)  # submitted one by one
    told = []
    engine(model, 2).run(prompts, on_finished=lambda finished: told.append([each.position for each in finished]))
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
        engine(eager, 2).run(prompts, on_finished=listener)
    assert seen == [("paged|eager", 1)]
    assert eager.config._attn_implementation == "eager"
    assert set(threading.enumerate()) == before


class Scarce:
    """Runs out of memory in the passes of these numbers."""

    def __init__(self, model, passes):
        self.passes, self.num_passes = passes, 0
        self.hook = model.register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.num_passes += 1
        if self.num_passes in self.passes:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_texts_are_the_same_where_memory_ran_out_on_the_way(model, prompts, expected):
    done, told = [], []
    scarce = Scarce(model, {1, 24})
    try:
        responses = respond_to(engine(model, 8, on_smaller=told.append), prompts, on_batch=done.append)
    finally:
        scarce.hook.remove()
    assert responses == expected(prompts)
    assert sum(done) == len(prompts)
    assert [(smaller.before, smaller.after) for smaller in told] == [(8, 4), (4, 2)]
    assert told[0].keys == (101, 107, 104, 110, 108, 102, 105, 109)
    assert not set(told[1].keys) & {101}  # it had its response by then


def test_a_row_that_never_fits_is_named_after_the_others_before_it(model, prompts):
    scarce = Scarce(model, range(24, 100))
    finished = []
    try:
        with pytest.raises(OutOfMemoryError, match="generation of a single row runs out of memory") as caught:
            engine(model, 1).run(prompts, on_finished=finished.extend)
    finally:
        scarce.hook.remove()
    assert [each.position for each in finished] == [1, 7]
    assert caught.value.problems[0].where == "row 104 (numbered from 0)"
    assert caught.value.problems[0].what.endswith("(31 tokens)")


def test_another_failure_of_its_thread_is_told(model, prompts):
    def fail(module, args):
        raise RuntimeError("shapes\ndo not match")

    hook = model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(BrimError, match="continuous batching failed: shapes do not match") as caught:
            engine(model, 4).run(prompts, on_finished=lambda finished: None)
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
def test_settings_that_it_cannot_honour_are_told(model, keys, reason):
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


def test_what_it_cannot_do_is_refused_before_anything_runs(model):
    with pytest.raises(InputError, match="precision bf16-mixed: it does not run under autocast"):
        engine(model, 4, precision=precision("bf16-mixed"))
    assert why_not_paged(model, GREEDY, precision=precision("fp32"), constraint=object()).startswith("responses are")


@pytest.mark.parametrize(("fields", "name"), [(["page_size", "seed"], "page_size"), (["block_size"], "block_size")])
def test_a_page_is_asked_for_by_the_name_that_this_transformers_has(fields, name):
    assert page_field(dataclasses.make_dataclass("Config", fields)) == name


def test_a_transformers_without_pages_is_named(monkeypatch):
    monkeypatch.setattr("transformers.generation.ContinuousBatchingConfig", dataclasses.make_dataclass("Config", []))
    assert __version__ in why_not_paged(None, GREEDY, precision=precision("fp32"))
