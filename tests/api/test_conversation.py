"""A conversation, against prompts that are written out by hand."""

import json
import shutil

import pytest

import brim
from brim.errors import ConfigError, DataError, InputError
from brim.memory import budget as at_hand
from brim.planning import generation as generation_planning, plan_of_one

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}{{ message.role[0] + ':' + message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SETTINGS = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "top_k": 200}


@pytest.fixture(scope="module")
def chat_base(tiny_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "base"
    shutil.copytree(tiny_base, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def model(chat_base):
    return brim.Model({"base_model": str(chat_base), "chat": {}, "generation": SETTINGS, "trainer": {"type": "none"}})


@pytest.fixture(scope="module")
def plain(chat_base):
    """The same without `chat`."""
    config = {
        "base_model": str(chat_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": SETTINGS,
        "trainer": {"type": "none"},
    }
    return brim.Model(config)


def said_by(conversation, text):
    return "".join(conversation.ask(text))


def test_each_answer_goes_on_from_all_that_was_said(model):
    conversation = model.chat()
    assert conversation.remembers
    first = said_by(conversation, "add 1 and 2")
    assert first == model.generate("u:add 1 and 2<|end|>a:")
    second = said_by(conversation, "and 3")
    assert second == model.generate(f"u:add 1 and 2<|end|>a:{first}<|end|>u:and 3<|end|>a:")
    assert first
    assert [(turn["role"], turn["content"]) for turn in conversation.turns] == [
        ("user", "add 1 and 2"),
        ("assistant", first),
        ("user", "and 3"),
        ("assistant", second),
    ]


def test_what_was_said_is_forgotten_and_the_system_stays(model):
    conversation = model.chat()
    conversation.set_system("sum")
    said_by(conversation, "1")
    conversation.reset()
    assert conversation.turns == ({"role": "system", "content": "sum"},)
    assert said_by(conversation, "2") == model.generate("s:sum<|end|>u:2<|end|>a:")
    conversation.set_system(None)
    conversation.reset()
    assert said_by(conversation, "2") == model.generate("u:2<|end|>a:")


def written(turns):
    return "".join(f"{turn['role'][0]}:{turn['content']}<|end|>" for turn in turns) + "a:"


def test_no_more_than_the_oldest_turns_are_forgotten_once_the_context_is_full(model):
    notes, num_forgotten = [], 0
    conversation = model.chat(say=notes.append)
    conversation.set_system("sum")
    for number in range(12):
        before, question = conversation.turns, {"role": "user", "content": f"{number} and {number}"}
        answer = said_by(conversation, question["content"])
        system, *others = conversation.turns
        assert system == {"role": "system", "content": "sum"}
        assert others[-2:] == [question, {"role": "assistant", "content": answer}]
        assert answer == model.generate(written(conversation.turns[:-1]))
        forgotten = len(before) + 2 - len(conversation.turns)
        assert others[:-2] == list(before[1 + forgotten :])
        num_forgotten += forgotten
        if forgotten:
            with pytest.raises(DataError, match="1 prompt is too long"):
                model.generate(written([system, *before[forgotten - 1 :], question]))
    assert num_forgotten > 2
    assert "the context is full: the oldest question and its answer are forgotten" in notes


def test_a_budget_bounds_what_is_remembered_as_the_context_does(model, monkeypatch):
    monkeypatch.setattr(generation_planning, "_WORTH_TRACING_S", 0.0)
    monkeypatch.setattr(at_hand, "resident_bytes", lambda: 10**9)
    config = {"base_model": model.config.base_model, "chat": {}, "generation": SETTINGS, "trainer": {"type": "none"}}

    def conversing(budget):
        notes = []
        return brim.Model({**config, "memory": {"budget": budget, "margin": "0B"}}).chat(say=notes.append), notes

    ample, _ = conversing("1500MiB")
    assert ample._most_tokens == 128
    plan = plan_of_one(ample._llm, ample._session, prompt_tokens=122)
    added_bytes = plan.shapes[0].peak_bytes - plan.costs.static_bytes
    allowed_bytes = plan.costs.static_bytes + added_bytes * 6 // 10
    conversation, notes = conversing(f"{plan.budget.outside_bytes + allowed_bytes}B")
    most = conversation._most_tokens
    assert 50 < most < 90
    columns = []
    for number in range(8):
        said_by(conversation, f"add {number} and {number}")
        columns.append(conversation._kept._passes.cache.columns)
    assert 40 < max(columns) <= most
    assert "memory.budget is used up: the oldest question and its answer are forgotten" in notes
    largest = plan_of_one(conversation._llm, conversation._session, prompt_tokens=most - 6)
    assert largest.fits
    assert largest.shapes[0].peak_bytes <= allowed_bytes
    before = conversation.turns
    with pytest.raises(InputError, match=r"the longest prompt, \d+ tokens(.|\n)*\(memory.budget\)"):
        conversation.ask("x" * 110)
    assert conversation.turns == before
    assert said_by(conversation, "1")


def test_a_question_that_is_too_long_alone_leaves_everything_as_it_was(model):
    conversation = model.chat()
    said_by(conversation, "1")
    before = conversation.turns
    with pytest.raises(DataError, match=r"the conversation \(\d+ tokens\): 1 prompt is too long"):
        conversation.ask("x" * 500)
    with pytest.raises(InputError, match="prompt 1 is no text"):
        conversation.ask("half \ud83d")
    assert conversation.turns == before


def test_what_was_said_before_it_was_stopped_counts_as_the_answer(model):
    conversation = model.chat()
    pieces = conversation.ask("1")
    assert conversation.turns == ()
    first = next(pieces)
    pieces.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": first}
    never_begun = conversation.ask("2")
    never_begun.close()
    assert len(conversation.turns) == 2


def test_another_question_ends_the_answer_before(model):
    conversation = model.chat()
    first = conversation.ask("1")
    piece = next(first)
    said_by(conversation, "2")
    assert list(first) == []
    assert [turn["content"] for turn in conversation.turns[:3]] == ["1", piece, "2"]


def test_what_was_said_is_read_once(model):
    lengths = []

    def note(module, positional, keywords, output):
        lengths.append(keywords["input_ids"].shape[1])

    conversation = model.chat()
    said_by(conversation, "add 1 and 2")
    hook = model._weights().model.register_forward_hook(note, with_kwargs=True)
    try:
        said_by(conversation, "add 3 and 4")  # the cache becomes larger
        num_before = len(lengths)
        said_by(conversation, "5")
    finally:
        hook.remove()
    (whole,) = model._open().encoder.encode([written(conversation.turns[:-1])], special_tokens=False)
    assert lengths[1:num_before] == [1] * (num_before - 1)
    assert 1 < lengths[num_before] <= len(whole) - lengths[0]


def test_settings_hold_from_now_on_and_are_checked(model):
    conversation = model.chat()
    conversation.set("max_new_tokens", "3")
    conversation.set("generation.do_sample", "false")
    assert said_by(conversation, "1") == model.generate("u:1<|end|>a:", max_new_tokens=3, do_sample=False)
    with pytest.raises(ConfigError, match=r"generation\.temperatur"):
        conversation.set("temperatur", "1")
    with pytest.raises(ConfigError, match=r"generation\.temperature"):
        conversation.set("temperature", "warm")
    with pytest.raises(InputError, match=r"generation\.num_beams"):
        conversation.set("num_beams", "3")
    conversation.reset()
    assert said_by(conversation, "1") == model.generate("u:1<|end|>a:", max_new_tokens=3, do_sample=False)


def test_an_answer_that_was_cut_is_told(model):
    notes = []
    conversation = model.chat(say=notes.append)
    said_by(conversation, "add 1 and 2")
    assert notes == ["the answer was cut at generation.max_new_tokens (6)"]


def test_without_chat_each_prompt_stands_alone(plain):
    notes = []
    conversation = plain.chat(say=notes.append)
    assert not conversation.remembers
    assert "each prompt stands alone; the tokenizer has a chat template" in notes[0]
    for text in ("add 1", "add 2"):
        assert said_by(conversation, text) == plain.generate(text)
    assert conversation.turns == ()
    with pytest.raises(InputError, match="without a chat template there is no system's turn"):
        conversation.set_system("sum")


def test_the_prompts_words_stand_around_each_text(plain):
    wordy = brim.Model(plain.config, overrides=["prompt.template=add {question} ="])
    assert said_by(wordy.chat(), "1 and 2") == plain.generate("add 1 and 2 =")


def test_several_columns_are_given_as_an_object(plain):
    wordy = brim.Model(plain.config, overrides=["prompt.template=add {one} and {two} ="])
    conversation = wordy.chat()
    assert said_by(conversation, '{"one": 1, "two": "2"}') == plain.generate("add 1 and 2 =")
    with pytest.raises(DataError, match=r'expected: a JSON object \{"one": …, "two": …\}'):
        conversation.ask("1 and 2")
    with pytest.raises(DataError, match="a JSON object"):
        conversation.ask('{"one": 1}')


def test_examples_of_a_data_set_are_refused(plain):
    few_shot = brim.Model(plain.config, overrides=["prompt.task=add", "prompt.retrieval={type: random, k: 2}"])
    with pytest.raises(InputError, match=r"prompt\.retrieval looks for examples in a data set"):
        few_shot.chat()
