"""Where a template stands, and that it is stored as transformers reads it."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import given, strategies as st

from brim.data.chat import TemplateTexts, read_template, store_template
from brim.data.chat.template import ChatTemplate
from brim.errors import ConfigError, ModelError


def texts(default, tool_use=None, where="t.jinja"):
    return TemplateTexts(default=default, tool_use=tool_use, where=where)


def write_config(folder, chat_template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template, "eos_token": "</s>"}))


def test_the_file_comes_before_the_configuration(tmp_path):
    write_config(tmp_path, "old")
    assert read_template(None, tmp_path) == texts("old", where=str(tmp_path / "tokenizer_config.json"))
    (tmp_path / "chat_template.jinja").write_bytes("neu ü\r\nb".encode())
    assert read_template(None, tmp_path) == texts("neu ü\nb", where=str(tmp_path / "chat_template.jinja"))


@pytest.mark.parametrize(
    "given",
    [
        [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}],
        {"default": "d", "tool_use": "t"},
    ],
)
def test_of_named_templates_one_is_for_tools(tmp_path, given):
    write_config(tmp_path, given)
    found = read_template(None, tmp_path)
    assert (found.default, found.tool_use) == ("d", "t")
    template = ChatTemplate(found, special_tokens={}, today=datetime.date.min)
    assert template.render([], None, add_generation_prompt=True) == "d"
    assert template.render([], [{"name": "f"}], add_generation_prompt=True) == "t"


def test_a_file_or_a_folder_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "mine.jinja").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert read_template("mine.jinja", tmp_path / "nowhere") == texts("mine", where="mine.jinja")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("stored")
    assert read_template("model", tmp_path / "nowhere").default == "stored"


@pytest.mark.parametrize("tool_use", [None, "t {{ messages[0].role }}"])
def test_what_is_stored_is_what_transformers_reads(tmp_path, tool_use):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>", chat_template="old"
    ).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "old"}))
    store_template(texts("{{ messages[0].content }}\nü", tool_use), tmp_path)
    stored = read_template(None, tmp_path)
    assert tool_use is not None or stored == texts("{{ messages[0].content }}\nü", where=stored.where)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    asked = {"conversation": [{"role": "user", "content": "hi"}], "tokenize": False}
    assert tokenizer.apply_chat_template(**asked) == "hi\nü"
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.apply_chat_template(**asked, tools=[tool]) == ("hi\nü" if tool_use is None else "t user")


BLOCKS = st.sampled_from(
    [" ", "\n", "x", "{{ messages }}", "{% if tools %}", "{%- if tools -%}", "{# c #}", "{% set a = 1 %}"]
)


@given(st.lists(BLOCKS, max_size=8), st.lists(BLOCKS, max_size=8))
def test_two_templates_in_one_file_write_the_same(default, tool_use):
    def closed(blocks):
        return "".join(blocks) + "{% endif %}\n" * sum("if tools" in block for block in blocks)

    two = texts(closed(default), closed(tool_use))
    for tools in (None, [{"name": "f"}]):
        written = [
            ChatTemplate(each, special_tokens={}, today=datetime.date.min).render(
                "M", tools, add_generation_prompt=False
            )
            for each in (two, texts(two.as_one()))
        ]
        assert written[0] == written[1]


def test_only_a_template_that_asks_for_the_day_depends_on_it():
    assert texts("{{ strftime_now('%d') }}").asks_for_day()
    assert texts("d", "{% if strftime_now is defined %}x{% endif %}").asks_for_day()
    assert not texts("strftime_now {{ messages }}").asks_for_day()


@pytest.mark.parametrize(
    ("files", "named", "error", "message"),
    [
        ({}, None, ModelError, "the tokenizer has no chat template, and chat.template names none"),
        ({}, "x.jinja", ConfigError, "chat.template: there is no such file: "),
        ({"m/config.json": "{}"}, "m", ConfigError, "chat.template: the folder holds no chat_template.jinja: "),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, None, ModelError, "chat_template is neither a text nor a list of named texts"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "a"}]}'}, None, ModelError, "chat_template is neither a text nor"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "a", "template": "b"}]}'}, None, ModelError, "the tokenizer has several chat templates (a) and none called default"),
        ({"tokenizer_config.json": "{"}, None, ModelError, "tokenizer_config.json cannot be read: "),
        ({"chat_template.jinja": b"\xff"}, None, ModelError, "the chat template cannot be read: it is not UTF-8"),
        ({"chat_template.jinja": b"x" * 2_000_000}, None, ModelError, "the chat template is longer than 1,048,576 bytes"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_had_is_told(tmp_path, files, named, error, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error) as caught:
        read_template(None if named is None else str(tmp_path / named), tmp_path)
    (problem,) = caught.value.problems
    assert problem.what.startswith(message)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x' | center(10**9) }}", "{% for %}"])
def test_a_text_that_is_no_template_is_told_with_its_file(source):
    with pytest.raises(ModelError, match=r"^t\.jinja: the chat template cannot be used: "):
        ChatTemplate(texts(source), special_tokens={}, today=datetime.date.min).render(
            [], None, add_generation_prompt=False
        )
