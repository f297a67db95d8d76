"""Conversations from end to end: learned, stored with their template, evaluated and predicted."""

from __future__ import annotations

import datetime
import json
import shutil
from dataclasses import replace

import pytest
from tests.chatml import CHATML, conversation

import brim
from brim.data.tokens import load_encoder
from brim.infer.engines import SlotsEngine
from brim.models.folders import locate

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def piece(gallery, tmp_path_factory):
    """As the gallery's, in more steps: it knows each answer."""
    chat, run = gallery("chat"), tmp_path_factory.mktemp("chat") / "run"
    trainer = {**chat.config["trainer"], "effective_batch_size": 4, "early_stop": -1}
    config = {**chat.config, "trainer": trainer}
    brim.Model(config).train(chat.data, output_directory=run, say=None)
    return replace(chat, run=run, config=config)


@pytest.fixture(scope="module")
def model(piece):
    return brim.Model.load(piece.run, overrides=["generation.max_new_tokens=8"])


@pytest.fixture(scope="module")
def predicted(model, piece):
    return model.predict(piece.data).predictions


def test_it_learns_to_answer_and_to_stop(piece, predicted):
    answers = [cell[-1]["content"] for cell in predicted["messages"]]
    assert predicted["assistant_response"].tolist() == answers
    assert (predicted["finish_reason"] == "stop").all()
    encoder = load_encoder(locate(str(piece.run / "model"), initialize="random"))
    (end,) = encoder.encode(["<|im_end|>"], special_tokens=False)[0]
    generation = json.loads((piece.run / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [end, encoder.eos_id]


def test_a_run_goes_by_its_own_template_wherever_it_lies(piece, model, tmp_path):
    """And its configuration works again."""
    from transformers import AutoTokenizer

    moved = shutil.copytree(piece.run, tmp_path / "run")
    assert (moved / "model" / "chat_template.jinja").read_text() == CHATML
    assert "chat_template" not in json.loads((moved / "model" / "tokenizer_config.json").read_text())
    loaded = brim.Model.load(moved)
    assert loaded.config.chat.template == str(moved / "model")
    messages = conversation(2, 2)[:-1]
    theirs = AutoTokenizer.from_pretrained(moved / "model")
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert model.generate(text) == loaded.predict({"messages": [messages]}).predictions["assistant_response"][0]

    again = brim.Model(piece.run / "config.yaml", overrides=["trainer.epochs=1"])
    assert again.config.chat == brim.Model(piece.run / "config.yaml").config.chat
    result = again.train(output_directory=tmp_path / "again", say=None)
    assert result.num_rows["train"] == 18
    assert brim.Model.load(tmp_path / "again").evaluate(piece.data).metrics == again.evaluate(piece.data).metrics


def test_generate_goes_on_from_the_tokens_that_predict_does(piece, model, monkeypatch):
    asked, run_engine = [], SlotsEngine.run

    def spied(engine, prompts, **options):
        asked.append(prompts[0].input_ids.tolist())
        return run_engine(engine, prompts, **options)

    monkeypatch.setattr(SlotsEngine, "run", spied)
    model.generate("<|im_start|>user\neven<|im_end|>\n<|im_start|>assistant\n")
    model.predict({"messages": [[{"role": "user", "content": "even"}]]})
    assert asked[0] == asked[1]
    encoder = load_encoder(locate(str(piece.run / "model"), initialize="random"))
    assert encoder.encode(["a"], special_tokens=True) != encoder.encode(["a"], special_tokens=False)


def test_the_last_turn_is_asked_for_when_texts_are_compared(piece, model, predicted):
    """For one split, whatever the others hold."""
    metrics = model.evaluate(piece.data, split="full", with_texts=True).metrics
    answers = [cell[-1]["content"] for cell in predicted["messages"]]
    assert metrics["exact_match"] == (predicted["assistant_response"] == answers).mean()
    assert metrics["num_rows"] == 24
    columns = {"messages": [json.dumps(conversation(1, 1)), "[]", json.dumps(conversation(1, 2))], "split": [2, 0, 2]}
    metrics = model.evaluate(columns, split="test", with_texts=True).metrics
    assert (metrics["num_rows"], metrics["exact_match"]) == (2, 1.0)


def test_an_answer_that_is_there_is_left_out_of_the_prompt_which_is_never_cut(piece, model):
    whole, asked = conversation(2, 1, turns=2), conversation(2, 1, turns=2)[:-1]
    both = model.predict({"messages": [json.dumps(whole), json.dumps(asked)]}).predictions
    assert both["num_prompt_tokens"].nunique() == 1
    assert both["assistant_response"].nunique() == 1
    loaded = brim.Model.load(piece.run, overrides=["preprocessing.on_overlong=truncate"])
    with pytest.raises(brim.DataError, match="1 prompt is too long"):
        loaded.predict({"messages": [[{"role": "user", "content": "x" * 200}]]})


def test_a_stopped_run_goes_on_on_another_day(piece, tmp_path, monkeypatch):
    def on(day):
        monkeypatch.setattr("brim.data.chat.template.today", lambda: datetime.date.fromisoformat(day))

    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    config = {**piece.config, "chat": {"template": str(tmp_path / "dated.jinja")}}
    config["trainer"] = {**config["trainer"], "epochs": 1}
    said, kept = [], "chat.date: 2026-01-31"
    on("2026-01-31")
    brim.Model(config).train(piece.data, output_directory=tmp_path / "run", say=said.append)
    assert f"{kept} (today: the template asks for the day, and the run keeps it)" in said
    on("2026-02-01")
    said.clear()
    brim.Model(config).train(piece.data, output_directory=tmp_path / "run", resume=True, say=said.append)
    assert f"{kept} (the day on which the run began)" in said
    assert brim.Model.load(tmp_path / "run").config.chat.date == "2026-01-31"
