"""A conversation and a response in pieces, against prompts that are written out by hand and the whole of it."""

import json
import shutil

import pytest
from tests.gallery import usual

import brim
from brim.errors import ConfigError, DataError, InputError
from brim.memory.devices import budget as at_hand
from brim.planning import generation as generation_planning
from brim.workflows.prediction import chat as streaming

pytestmark = pytest.mark.run
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}{{ message.role[0] + ':' + message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SETTINGS = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "top_k": 200}


@pytest.fixture(scope="module")
def chat_config(tiny_base, tmp_path_factory):
    folder = shutil.copytree(tiny_base, tmp_path_factory.mktemp("chat") / "base")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return {"base_model": str(folder), "chat": {}, "generation": SETTINGS, "trainer": {"type": "none"}}


@pytest.fixture(scope="module")
def talker(chat_config):
    return brim.Model(chat_config)


@pytest.fixture
def exact(monkeypatch):
    """Plans to the byte, which are the same at any time."""
    monkeypatch.setattr(generation_planning, "WORTH_TRACING_S", 0.0)  # no bound, which a trace may be below
    monkeypatch.setattr(at_hand, "resident_bytes", lambda: 10**9)


@pytest.fixture(scope="module")
def plain(chat_config):
    """The same without `chat`."""
    config = usual(chat_config["base_model"], generation=SETTINGS)
    return brim.Model({**config, "adapter": None, "trainer": {"type": "none"}})


def said_by(conversation, text):
    return "".join(conversation.ask(text))


def test_what_was_said_is_forgotten_and_the_system_stays(talker):
    conversation = talker.chat()
    for system, turns, prompt in (
        ("sum", ({"role": "system", "content": "sum"},), "s:sum<|end|>u:2<|end|>a:"),
        (None, (), "u:2<|end|>a:"),
    ):
        conversation.set_system(system)
        said_by(conversation, "1")
        conversation.reset()
        assert conversation.turns == turns
        assert said_by(conversation, "2") == talker.generate(prompt)


def written(turns):
    return "".join(f"{turn['role'][0]}:{turn['content']}<|end|>" for turn in turns) + "a:"


def test_no_more_than_the_oldest_turns_are_forgotten_once_the_context_is_full(talker):
    """And each answer goes on from all turns that are not."""
    notes, num_forgotten = [], 0
    conversation = talker.chat(say=notes.append)
    assert conversation.remembers
    conversation.set_system("sum")
    for number in range(12):
        before, question = conversation.turns, {"role": "user", "content": f"{number} and {number}"}
        answer = said_by(conversation, question["content"])
        system, *others = conversation.turns
        assert system == {"role": "system", "content": "sum"}
        assert others[-2:] == [question, {"role": "assistant", "content": answer}]
        assert answer == talker.generate(written(conversation.turns[:-1]))
        forgotten = len(before) + 2 - len(conversation.turns)
        assert others[:-2] == list(before[1 + forgotten :])
        num_forgotten += forgotten
        if forgotten:
            with pytest.raises(DataError, match="1 prompt is too long"):
                talker.generate(written([system, *before[forgotten - 1 :], question]))
    assert num_forgotten > 2
    assert "the context is full: the oldest question and its answer are forgotten" in notes


def test_a_budget_bounds_what_is_remembered_as_the_context_does(chat_config, exact):
    def conversing(budget):
        notes = []
        return brim.Model({**chat_config, "memory": {"budget": budget, "margin": "0B"}}).chat(say=notes.append), notes

    ample, _ = conversing("1500MiB")
    assert ample._most_tokens == 128
    plan = streaming.plan_of_one(ample._llm, ample._session, prompt_tokens=122)
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
    largest = streaming.plan_of_one(conversation._llm, conversation._session, prompt_tokens=most - 6)
    assert largest.fits
    assert largest.shapes[0].peak_bytes <= allowed_bytes
    before = conversation.turns
    with pytest.raises(InputError, match=r"the longest prompt, \d+ tokens(.|\n)*\(memory.budget\)"):
        conversation.ask("x" * 110)
    assert conversation.turns == before
    assert said_by(conversation, "1")


def test_a_question_that_is_too_long_alone_leaves_everything_as_it_was(talker):
    conversation = talker.chat()
    said_by(conversation, "1")
    before = conversation.turns
    with pytest.raises(DataError, match=r"the conversation \(\d+ tokens\): 1 prompt is too long"):
        conversation.ask("x" * 500)
    with pytest.raises(InputError, match="prompt 1 is not a text"):
        conversation.ask("half \ud83d")
    assert conversation.turns == before


def test_what_was_said_before_it_was_stopped_counts_as_the_answer(talker):
    """Stopped by hand, or by the next question; an answer at its limit says so."""
    notes = []
    conversation = talker.chat(say=notes.append)
    pieces = conversation.ask("1")
    assert conversation.turns == ()
    first = next(pieces)
    pieces.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": first}
    never_begun = conversation.ask("2")
    never_begun.close()
    assert len(conversation.turns) == 2
    stopped = conversation.ask("3")
    piece = next(stopped)
    assert notes == []
    said_by(conversation, "4")
    assert list(stopped) == []
    assert [turn["content"] for turn in conversation.turns[:5]] == ["1", first, "3", piece, "4"]
    assert notes == ["the answer was cut at generation.max_new_tokens (6)"]


def test_what_was_said_is_read_once(talker):
    conversation, lengths = talker.chat(), []
    said_by(conversation, "add 1 and 2")
    embed = talker._weights().model.get_input_embeddings()
    hook = embed.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
    said_by(conversation, "add 3 and 4")  # the cache becomes larger
    num_before = len(lengths)
    said_by(conversation, "5")
    hook.remove()
    (whole,) = talker._open().encoder.encode([written(conversation.turns[:-1])], special_tokens=False)
    assert lengths[1:num_before] == [1] * (num_before - 1)
    assert 1 < lengths[num_before] <= len(whole) - lengths[0]


def test_settings_hold_from_now_on_and_are_checked(talker):
    conversation = talker.chat()
    conversation.set("max_new_tokens", "3")
    conversation.set("generation.do_sample", "false")
    assert said_by(conversation, "1") == talker.generate("u:1<|end|>a:", max_new_tokens=3, do_sample=False)
    with pytest.raises(ConfigError, match=r"generation\.temperature"):
        conversation.set("temperature", "warm")
    with pytest.raises(InputError, match=r"generation\.num_beams"):
        conversation.set("num_beams", "3")
    conversation.reset()
    assert said_by(conversation, "1") == talker.generate("u:1<|end|>a:", max_new_tokens=3, do_sample=False)


def test_without_chat_each_prompt_stands_alone(plain):
    notes = []
    conversation = plain.chat(say=notes.append)
    assert not conversation.remembers
    assert "each prompt stands alone; the tokenizer has a chat template" in notes[0]
    for text in ("add 1", "add 2"):
        assert said_by(conversation, text) == plain.generate(text)
    assert conversation.turns == ()


def test_the_prompts_words_stand_around_each_text_and_several_columns_are_an_object(plain):
    wordy = brim.Model(plain.config, overrides=["prompt.template=add {question} ="])
    assert said_by(wordy.chat(), "1 and 2") == plain.generate("add 1 and 2 =")
    conversation = brim.Model(plain.config, overrides=["prompt.template=add {one} and {two} ="]).chat()
    assert said_by(conversation, '{"one": 1, "two": "2"}') == plain.generate("add 1 and 2 =")
    for text, message in (
        ("1 and 2", r'expected: a JSON object \{"one": …, "two": …\}'),
        ('{"one": 1}', "a JSON object"),
    ):
        with pytest.raises(DataError, match=message):
            conversation.ask(text)
    few_shot = brim.Model(plain.config, overrides=["prompt.task=add", "prompt.retrieval={type: random, k: 2}"])
    with pytest.raises(InputError, match=r"prompt\.retrieval looks for examples in a data set"):
        few_shot.chat()


PROMPTS = ["add 3 and 4 =", "add 1 and 2 = 3; the sum of", "x"]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 200, "max_new_tokens": 24}


ENDED = {**SAMPLED, "eos_token_id": list(range(150))}  # any of half of the base's tokens ends it


@pytest.mark.parametrize(
    "settings", [{}, ENDED, {**SAMPLED, "repetition_penalty": 1.2}], ids=["greedy", "ended", "sampled"]
)
def test_pieces_join_up_to_the_whole_response(model, settings):
    for prompt in PROMPTS:
        pieces = list(model.generate(prompt, stream=True, **settings))
        assert all(pieces)
        assert "".join(pieces) == model.generate(prompt, **settings)


def test_what_cannot_be_answered_piece_by_piece_is_refused_before_anything_is_made(model):
    assert "".join(model.generate(PROMPTS[:1], stream=True)) == model.generate(PROMPTS[0])  # a list of one is one
    for prompts in (PROMPTS, []):
        with pytest.raises(InputError, match=r"cannot be answered piece by piece(.|\n)*one prompt with stream=True"):
            model.generate(prompts, stream=True)
    for key, value in {"num_beams": 2, "prompt_lookup_num_tokens": 3, "guidance_scale": 1.5}.items():
        with pytest.raises(InputError, match=rf"cannot be streamed: generation\.{key}"):
            model.generate(PROMPTS[0], stream=True, **{key: value})
    with pytest.raises(DataError, match="1 prompt is empty"):
        model.generate("", stream=True)


def test_an_architecture_with_a_state_of_another_kind_says_all_at_the_end(model, monkeypatch):
    monkeypatch.setattr(streaming.SlotsEngine, "why_not", lambda *_: "Mamba keeps a state that is not keys and values")
    assert list(model.generate(PROMPTS[0], stream=True)) == [model.generate(PROMPTS[0])]


def test_a_response_that_the_budget_does_not_hold_is_refused_before_it_is_begun(model, zero_shot, exact):
    def held(budget):
        trainer = {"type": "none"}  # rows by hand would be taken
        return brim.Model({**zero_shot, "trainer": trainer, "memory": {"budget": budget, "margin": "0B"}})

    enough = held("1500MiB")
    plan = streaming.plan_of_one(enough._weights(), enough._open(), prompt_tokens=60)
    less, read = held(f"{plan.budget.outside_bytes + plan.shapes[0].peak_bytes}B"), []
    too_long = r"100 tokens, and a response of up to 6 take(.|\n)*\(memory.budget\)(.|\n)*raise memory.budget"
    for stream in (True, False):
        for holding, prompt in ((enough, "x" * 100), (less, "x" * 60)):
            assert "".join(holding.generate(prompt, stream=stream)) == model.generate(prompt)
        hook = less._weights().model.register_forward_pre_hook(lambda *given: read.append(1))
        with pytest.raises(InputError, match=too_long):
            less.generate("x" * 100, stream=stream)
        hook.remove()
        assert read == []
