"""Conversations from end to end: learned, stored with their template, evaluated and predicted."""

from __future__ import annotations

import datetime
import json
import shutil

import pytest

import brim
from brim.data.tokens import load_encoder
from brim.infer.engines import SlotsEngine
from brim.models import locate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(a, b, turns=1):
    messages = [{"role": "system", "content": "Say."}]
    for number in range(turns):
        is_even = (a + b + number) % 2 == 0
        messages.append({"role": "user", "content": "even" if is_even else "odd?"})
        messages.append({"role": "assistant", "content": "yes" if is_even else "no"})
    return messages


@pytest.fixture(scope="module")
def chat_base(tiny_base, tmp_path_factory):
    """The tiny base with the tokens of ChatML, a template in tokenizer_config.json, and a BOS before each text."""
    from tokenizers import AddedToken, Tokenizer, processors

    folder = tmp_path_factory.mktemp("chat") / "base"
    shutil.copytree(tiny_base, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spare = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)[-2:]
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    model = vocabulary["model"]
    for old, new in zip(spare, ["<|im_start|>", "<|im_end|>"], strict=True):
        model["vocab"][new] = model["vocab"].pop(old)
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != old]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    assert tokenizer.get_vocab_size() == 300
    begin = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHATML}))
    return folder


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [
        {"messages": conversation(number % 5, number % 3, turns=1 + number % 2), "split": number % 4 == 3}
        for number in range(24)
    ]
    path.write_text("".join(json.dumps({**row, "split": int(row["split"])}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def config(chat_base):
    return {
        "base_model": str(chat_base),
        "chat": {},
        "adapter": {"type": "lora", "dropout": 0.0},
        "preprocessing": {"split": "fixed"},
        "generation": {"max_new_tokens": 8, "do_sample": False},
        "trainer": {"type": "finetune", "epochs": 1, "batch_size": 4, "learning_rate": 0.05, "early_stop": -1},
    }


@pytest.fixture(scope="module")
def run(config, rows_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    said = []
    model = brim.Model(config, overrides=["adapter=null", "trainer.epochs=6", "trainer.learning_rate=0.01"])
    model.train(rows_file, output_directory=folder, say=said.append)
    return folder, model, said


def test_it_learns_to_answer_and_to_stop(run, rows_file):
    folder, model, _ = run
    predictions = model.predict(rows_file).predictions
    answers = [cell[-1]["content"] for cell in predictions["messages"]]
    assert predictions["assistant_response"].tolist() == answers
    assert (predictions["finish_reason"] == "stop").all()
    encoder = load_encoder(locate(str(folder / "model"), initialize="random"))
    (end,) = encoder.encode(["<|im_end|>"], special_tokens=False)[0]
    generation = json.loads((folder / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [end, encoder.eos_id]


def test_a_loaded_run_is_the_same_model_with_its_own_template(run, rows_file, chat_base, tmp_path):
    from transformers import AutoTokenizer

    folder, model, _ = run
    moved = tmp_path / "run"
    shutil.copytree(folder, moved)
    stored = (moved / "model" / "chat_template.jinja").read_text()
    assert stored == CHATML
    assert "chat_template" not in json.loads((moved / "model" / "tokenizer_config.json").read_text())
    loaded = brim.Model.load(moved)
    assert loaded.config.chat.template == str(moved / "model")
    assert loaded.evaluate(rows_file).metrics == model.evaluate(rows_file).metrics
    theirs = AutoTokenizer.from_pretrained(moved / "model")
    messages = conversation(2, 2)[:-1]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert model.generate(text) == loaded.predict({"messages": [messages]}).predictions["assistant_response"][0]


def test_generate_goes_on_from_the_tokens_that_predict_does(run, monkeypatch):
    folder, model, _ = run
    asked = []

    run_engine = SlotsEngine.run

    def spied(engine, prompts, **options):
        asked.append(prompts[0].input_ids.tolist())
        return run_engine(engine, prompts, **options)

    monkeypatch.setattr(SlotsEngine, "run", spied)
    model.generate("<|im_start|>user\neven<|im_end|>\n<|im_start|>assistant\n")
    model.predict({"messages": [[{"role": "user", "content": "even"}]]})
    assert asked[0] == asked[1]
    encoder = load_encoder(locate(str(folder / "model"), initialize="random"))
    assert encoder.encode(["a"], special_tokens=True) != encoder.encode(["a"], special_tokens=False)


def test_the_last_turn_is_asked_for_when_texts_are_compared(run, rows_file):
    _, model, _ = run
    metrics = model.evaluate(rows_file, split="full", with_texts=True).metrics
    predictions = model.predict(rows_file).predictions
    answers = [cell[-1]["content"] for cell in predictions["messages"]]
    assert metrics["exact_match"] == (predictions["assistant_response"] == answers).mean()
    assert metrics["num_rows"] == 24


def test_texts_are_compared_for_one_split_whatever_the_others_hold(run):
    _, model, _ = run
    columns = {"messages": [json.dumps(conversation(1, 1)), "[]", json.dumps(conversation(1, 2))], "split": [2, 0, 2]}
    metrics = model.evaluate(columns, split="test", with_texts=True).metrics
    assert (metrics["num_rows"], metrics["exact_match"]) == (2, 1.0)


def test_the_prompt_of_a_conversation_is_never_cut(run):
    folder, _, _ = run
    loaded = brim.Model.load(folder, overrides=["preprocessing.on_overlong=truncate"])
    turns = [{"role": "user", "content": "x" * 200}]
    with pytest.raises(brim.DataError, match="1 prompt is too long"):
        loaded.predict({"messages": [turns]})


def test_an_answer_that_is_there_is_left_out_of_the_prompt(run):
    _, model, _ = run
    whole, asked = conversation(2, 1, turns=2), conversation(2, 1, turns=2)[:-1]
    both = model.predict({"messages": [json.dumps(whole), json.dumps(asked)]}).predictions
    assert both["num_prompt_tokens"].nunique() == 1
    assert both["assistant_response"].nunique() == 1


def test_the_configuration_of_a_run_works_again(run, rows_file, tmp_path):
    folder, _, _ = run
    again = brim.Model(folder / "config.yaml", overrides=["trainer.epochs=1"])
    assert again.config.chat == brim.Model(folder / "config.yaml").config.chat
    result = again.train(output_directory=tmp_path / "again")
    assert result.num_rows["train"] == 18


def test_a_stopped_run_goes_on_on_another_day(config, rows_file, tmp_path, monkeypatch):
    def on(day):
        monkeypatch.setattr("brim.data.chat.template.today", lambda: datetime.date.fromisoformat(day))

    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    config = {**config, "chat": {"template": str(tmp_path / "dated.jinja")}}
    on("2026-01-31")
    said = []
    brim.Model(config).train(rows_file, output_directory=tmp_path / "run", say=said.append)
    assert "chat.date: 2026-01-31 (today: the template asks for the day, and the run keeps it)" in said
    on("2026-02-01")
    said.clear()
    brim.Model(config).train(rows_file, output_directory=tmp_path / "run", resume=True, say=said.append)
    assert "chat.date: 2026-01-31 (the day on which the run began)" in said
    loaded = brim.Model.load(tmp_path / "run")
    assert loaded.config.chat.date == "2026-01-31"
