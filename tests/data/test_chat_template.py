"""Templates: what they reach, where they stand, and conversations as text, against transformers."""

import datetime
import json
import re
import tracemalloc
from unittest.mock import Mock

import jinja2
import pytest
from hypothesis import given, strategies as st
from tests.data.conftest import CHAT_TEMPLATES as TEMPLATES
from tests.messages import refused, says

from brim.data.chat import TemplateTexts, read_template, sandbox as chat_sandbox, store_template
from brim.data.chat.messages import BadConversation, conversation_of
from brim.data.chat.render import ConversationRenderer
from brim.data.chat.sandbox import MAX_STEPS, BoundedEnvironment, Overreach, TemplateFault
from brim.data.chat.template import ChatTemplate
from brim.errors import ConfigError, ModelError

FEW_STEPS, FEW_CHARACTERS = 20_000, 1 << 17  # in place of the bounds, which take seconds to reach
TOO_LONG = f"it makes a text of more than {FEW_CHARACTERS:,} characters"
ENDLESS = f"it does not come to an end within {FEW_STEPS:,} passes of its loops"
TOO_LARGE = "it computes a number that is too large"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def doubling(start, step, end=""):
    return DOUBLING.replace("START", start).replace("STEP", step) + end


def rendered(source, **variables):
    environment = BoundedEnvironment(today=datetime.date(2026, 1, 31))
    return environment.run(environment.compiled(source), variables)


WORKING = [  # a template, and what it writes
    ("{{ {'a': 'ü<'} | tojson }} {{ [1] | tojson(indent=1) }}", '{"a": "ü<"} [\n 1\n]'),
    ("{{ strftime_now('%d %b %Y %H') }}", "31 Jan 2026 00"),
    ("{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "13"),
    ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
    ("{% generation %}{% set x = 1 %}a{{ x }}{% endgeneration %}{{ x }}", "a1"),
    ("{{ 'a' ~ 1 ~ [1] }}{{ missing }}{{ missing is defined }}", "a1[1]False"),
    ("{{ '**%s** {}'.format(1) }} {{ '**%s** %05.1f' % ('a', 2.25) }} {{ '{{{}}}'.format(3) }}", "**%s** 1 **a** 002.2 {3}"),
    ("{{ dict(a=1) }} {{ dict.fromkeys(['b'], 2) }}", "{'a': 1} {'b': 2}"),
    ("{{ 'ab'.center(4) }}|{{ 'a\nb' | indent(2) }}|{{ 'x' * 3 }}|{{ 2 ** 10 }}|{{ 7 % 4 }}", " ab |a\n  b|xxx|1024|3"),
    ("{{ ['a', 'b'] | join('-') }} {{ 'aXa'.replace('X', 'Y') }} {{ messages | map(attribute='role') | list }}", "a-b aYa ['user']"),
    ("{{ 'Of 20260131: %s {}' % 1 }} {{ '1234567 {} %'.format(2) }} {{ '%-3s|%5.2f%%' % ('a', 1.5) }}", "Of 20260131: 1 {} 1234567 2 % a  | 1.50%"),
    ("{{ 'a\tb'.expandtabs(2) }} {{ ','.join(['a', 'b'] | map('upper')) }} {{ [{'n': 1}] | join(attribute='n') }}", "a b A,B 1"),
    ("{{ 'abab'.replace('a', 'b', 1) }} {{ '11' | replace(1, 2) }} {{ 'ab'.translate({97: 'x'}) }} {{ [1, 2] | sum }}", "bbab 22 xb 3"),
    ("{{ '%s %s' % ([1], {'a': none}) }} {{ [1, 2, 3] | batch(2, 0) | list }} {{ {'a': 1}.items() | list }}",
     "[1] {'a': None} [[1, 2], [3, 0]] [('a', 1)]"),
]  # fmt: skip


def test_what_templates_use_works_and_each_rendering_has_the_same_number_of_steps(monkeypatch):
    for source, text in WORKING:
        assert rendered(source, messages=[{"role": "user"}]) == text
    assert MAX_STEPS == 1_000_000
    monkeypatch.setattr(chat_sandbox, "MAX_STEPS", FEW_STEPS)
    environment = BoundedEnvironment(today=datetime.date.min)
    template = environment.compiled("{% for i in range(1_999) %}{% for j in range(9) %}{% endfor %}{% endfor %}done")
    assert [environment.run(template, {}) for _ in range(2)] == ["done", "done"]


OVERREACHING = [
    ("{{ ''.__class__ }}", "it reaches for '__class__' of a str, which a template may not"),
    ("{{ '' | attr('__class__') }}", "it reaches for '__class__' of a str"),
    ("{{ '{x.__class__}'.format(x=1) }}", "it reaches for '__class__' of a int"),
    ("{{ raise_exception.__globals__ }}", "it reaches for '__globals__' of a function"),
    ("{{ messages.append(1) }}", "it reaches for 'append' of a list"),
    ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "it sets the hidden attribute '__x' of a namespace"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big. The sandbox blocks "),
    ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", ENDLESS),
    ("{% macro m(n) %}{% if n %}{% for i in [1, 2] %}{{ m(n - 1) }}{% endfor %}{% endif %}{% endmacro %}{{ m(20) }}", ENDLESS),
    ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", f"it writes more than {FEW_CHARACTERS:,} characters"),
    ("{{ 'x' * 10**10 }}", TOO_LONG), ("{{ 10 ** (10 ** 9) }}", TOO_LARGE), (doubling("7", "ns.x * ns.x"), TOO_LARGE),
    (doubling("'x'", "ns.x + ns.x"), TOO_LONG), (doubling("'x'", "ns.x ~ ns.x"), TOO_LONG),
    (doubling("'x'", "[ns.x, ns.x]", "{{ ns.x }}"), TOO_LONG),
    (doubling("'x'", "[ns.x, ns.x]", "{{ ns.x | tojson }}"), TOO_LONG),
    (doubling("'x'", "[ns.x, ns.x]", "{{ ns.x | string }}"), TOO_LONG),
    (doubling("'xx'", "ns.x.replace('x', 'xx')"), TOO_LONG), (doubling("'xx'", "ns.x | replace('x', 'xx')"), TOO_LONG),
    (doubling("'xx'", "ns.x.join([ns.x, ns.x])"), TOO_LONG),
    ("{{ 'x'.center(10**9) }}", TOO_LONG), ("{{ 'x' | center(10**9) }}", TOO_LONG),
    ("{{ 'x' | indent(10**9) }}", TOO_LONG), ("{{ 'x' | tojson(indent=10**9) }}", TOO_LONG),
    ("{{ '%1000000000d' % 1 }}", TOO_LONG), ("{{ '%*d' % (10**9, 1) }}", TOO_LONG),
    ("{{ '%1000000000d' | format(1) }}", TOO_LONG), ("{{ '{:1000000000}'.format(1) }}", TOO_LONG),
    ("{{ '{:{w}}'.format(1, w=10**9) }}", TOO_LONG), ("{{ strftime_now('%1000000000d') }}", TOO_LONG),
    ("{{ ('a\n' * 9999) | indent(9999) }}", TOO_LONG), ("{{ ('\t' * 9999).expandtabs(9999) }}", TOO_LONG),
    ("{{ ('\t' * 99999).expandtabs() }}", TOO_LONG), ("{{ 'a' | indent('x' * 99999 ~ 'x' * 99999) }}", TOO_LONG),
    ("{{ '%09999d' * 99 % ((1,) * 99) }}", TOO_LONG), ("{{ ('{:9999}' * 99).format(*((1,) * 99)) }}", TOO_LONG),
    ("{{ '%*d' * 99 % ((9999, 1) * 99) }}", TOO_LONG), ("{{ '{:{w}}'.format(1, w='9' * 9) }}", TOO_LONG),
    ("{{ ([1] * 9999) | join('x' * 9999) }}", TOO_LONG), ("{{ ('x' * 9999).join(([1] * 9999) | map('string')) }}", TOO_LONG),
    ("{{ ('x' * 9999).join(range(9999) | map('string')) }}", TOO_LONG), ("{{ range(9999) | join('x' * 9999) }}", TOO_LONG),
    ("{{ ('a ' * 9999) | wordwrap(1, wrapstring='x' * 9999) }}", TOO_LONG), ("{{ 'x'.zfill(10**9) }}", TOO_LONG),
    ("{{ ([[[1]]] * 999) | tojson(indent=999) }}", TOO_LONG), ("{{ '%(a)1000000000d' % {'a': 1} }}", TOO_LONG),
    ("{{ '%.1000000000f' % 1 }}", TOO_LONG), ("{{ 'x'.ljust(10**9, 'y') }}", TOO_LONG),
    ("{% set x = 'x' * 9999 %}{{ ('{a[0]}' * 99).format_map({'a': [x]}) }}", TOO_LONG),
    (doubling("'x'", "[ns.x, ns.x]", "{{ '%s' % [ns.x] }}"), TOO_LONG),
    (doubling("'x'", "[ns.x, ns.x]", "{{ ns }}"), TOO_LONG), (doubling("'x'", "[ns.x, ns.x]", "{{ {1: ns.x}.values() }}"), TOO_LONG),
    ("{{ ('x' * 9999) | replace('x', ['y' * 9999]) }}", TOO_LONG),
    (doubling("'x'", "[ns.x, ns.x]", "{{ 'x'.replace(ns.x, 'y') }}"), TOO_LONG),
    ("{{ ('a ' * 9999) | wordwrap(1, wrapstring='x' * 9999, break_on_hyphens='y') }}", TOO_LONG),
    ("{{ ('a://b.c ' * 9999) | urlize(target='x' * 9999) }}", TOO_LONG),
    ("{{ ('x' * 9999).translate({120: 'y' * 9999}) }}", TOO_LONG), ("{{ ([1] * 9999) | join(['x' * 9999]) }}", TOO_LONG),
    ("{{ ([1] * 9999) | tojson(separators=('x' * 9999, ':')) }}", TOO_LONG),
    ("{{ ([10 ** 1000] * 99999) | string }}", TOO_LONG), ("{{ [1] | batch(10**9, 0) | list }}", TOO_LONG),
    ("{{ [1] | slice(10**9) | list }}", TOO_LONG), ("{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}", TOO_LONG),
    ("{{ 'x'.encode() * 10**10 }}", "it makes bytes"), ("{{ (1).to_bytes(10**10, 'big') }}", "it makes bytes"),
    ("{{ [1, 2] | random }}", "it draws by chance "),
]  # fmt: skip


def test_what_no_template_may_is_refused(monkeypatch):
    assert chat_sandbox.MAX_CHARACTERS == 2**24
    monkeypatch.setattr(chat_sandbox, "MAX_STEPS", FEW_STEPS)
    monkeypatch.setattr(chat_sandbox, "MAX_CHARACTERS", FEW_CHARACTERS)
    for source, why in OVERREACHING:
        with pytest.raises(Overreach) as caught:
            rendered(source, messages=[{}])
        assert str(caught.value).startswith(why), source


def test_what_would_take_gigabytes_is_refused_before_it_is_made():
    long, many = "x" * 9_999_999, [1] * 999_999
    for source in [
        "{{ [1] * 9999999 }}",
        "{{ [y, y, y, y] | tojson }}",
        "{{ '%(a)s' * 99 % {'a': x} }}",
        "{{ ('%s' * 99) | format(*((x,) * 99)) }}",
        "{{ ('{0}' * 99).format(x) }}",
        "{{ ('x' * 99) | replace(new=x, old='x') }}",
    ]:
        tracemalloc.start()
        try:
            with pytest.raises(Overreach, match="it makes a text of more than 16,777,216 characters"):
                rendered(source, x=long, y=many)
            assert tracemalloc.get_traced_memory()[1] < 150_000_000, source
        finally:
            tracemalloc.stop()


def test_a_fault_is_told_in_a_line():
    for source, why in [
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ 'a' + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "it is nested too deeply"),
        ("{% include 'x' %}", "TypeError: no loader for this environment specified"),
        ("\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
    ]:
        with pytest.raises(TemplateFault) as caught:
            rendered(source, messages=[])
        assert (str(caught.value), isinstance(caught.value, Overreach)) == (why, False)


def texts(default, tool_use=None, where="t.jinja"):
    return TemplateTexts(default=default, tool_use=tool_use, where=where)


def write_config(folder, chat_template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template, "eos_token": "</s>"}))


def test_a_template_is_read_from_where_it_stands(tmp_path, monkeypatch):
    listed = [{"name": name, "template": name[0]} for name in ("default", "tool_use", "rag")]
    for given_as in (listed, {"default": "d", "tool_use": "t"}):
        write_config(tmp_path, given_as)
        found = read_template(None, tmp_path)
        assert (found.default, found.tool_use) == ("d", "t")
        made = ChatTemplate(found, special_tokens={}, today=datetime.date.min)
        assert [made.render([], tools, add_generation_prompt=True) for tools in (None, [{"name": "f"}])] == ["d", "t"]
    write_config(tmp_path, "old")
    assert read_template(None, tmp_path) == texts("old", where=str(tmp_path / "tokenizer_config.json"))
    (tmp_path / "chat_template.jinja").write_bytes("neu ü\r\nb".encode())
    assert read_template(None, tmp_path) == texts("neu ü\nb", where=str(tmp_path / "chat_template.jinja"))
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

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>").save_pretrained(tmp_path)
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
    made = [ChatTemplate(each, special_tokens={}, today=datetime.date.min) for each in (two, texts(two.as_one()))]
    for tools in (None, [{"name": "f"}]):
        assert len({each.render("M", tools, add_generation_prompt=False) for each in made}) == 1


TOKENIZER, JINJA = "tokenizer_config.json", "chat_template.jinja"
NO_TEMPLATES = [  # files, the one that is named, the error and the decisive words
    ({}, None, ModelError, "the tokenizer has no chat template, and chat.template names none"),
    ({}, "x.jinja", ConfigError, "chat.template: there is no such file: "),
    ({"m/config.json": b"{}"}, "m", ConfigError, "chat.template: the folder holds no chat_template.jinja: "),
    ({TOKENIZER: b'{"chat_template": 3}'}, None, ModelError, "chat_template is neither a text nor a list of named texts"),
    ({TOKENIZER: b'{"chat_template": [{"name": "a", "template": "b"}]}'}, None, ModelError,
     "the tokenizer has several chat templates (a) and none called default"),
    ({TOKENIZER: b"{"}, None, ModelError, "tokenizer_config.json cannot be read: "),
    ({JINJA: b"\xff"}, None, ModelError, "the chat template cannot be read: it is not UTF-8"),
    ({JINJA: b"x" * 2_000_000}, None, ModelError, "the chat template is longer than 1,048,576 bytes"),
]  # fmt: skip


def test_a_template_that_cannot_be_had_or_is_none_is_told(tmp_path):
    for number, (files, named, error, message) in enumerate(NO_TEMPLATES):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        with refused(f"… {message}", by=error):
            read_template(None if named is None else str(folder / named), folder)
    for source in ("{% if %}", "{{ 'x' | center(10**9) }}", "{% for %}"):
        with refused("t.jinja: the chat template cannot be used: ", by=ModelError):
            made = ChatTemplate(texts(source), special_tokens={}, today=datetime.date.min)
            made.render([], None, add_generation_prompt=False)
    assert texts("{{ strftime_now('%d') }}").asks_for_day()
    assert texts("d", "{% if strftime_now is defined %}x{% endif %}").asks_for_day()
    assert not texts("strftime_now {{ messages }}").asks_for_day()


TODAY = datetime.date(2026, 1, 31)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
USER, ANSWER = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4, “surely” <b>"}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN, SECOND = {"role": "user", "content": " And 3+3? "}, {"role": "assistant", "content": "6"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "ü"}'}}],
}
RESULT, OTHER_RESULT = {"role": "tool", "content": "4", "name": "add"}, {"role": "tool", "content": "5", "name": "add"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <two>", "parameters": {"type": "object", "properties": {}}},
}
THOUGHT = {**ANSWER, "reasoning_content": "Two and two"}
CONVERSATIONS = {
    "one": [USER, ANSWER],
    "two": [USER, ANSWER, AGAIN, SECOND],
    "system": [SYSTEM, USER, ANSWER, AGAIN, SECOND],
    "calls": [SYSTEM, USER, CALL, RESULT, SECOND],
    "results": [USER, CALL, RESULT, OTHER_RESULT, SECOND],
    "thinks": [USER, THOUGHT],
}
WITH_TOOLS = ("calls", "results")


def template(name, **changes):
    texts = TemplateTexts(default=TEMPLATES.get(name, name), tool_use=None, where=f"{name}.jinja")
    return ChatTemplate(texts, special_tokens=SPECIAL, today=TODAY, **changes)


def renderer(name, supervise="all"):
    return ConversationRenderer(template=template(name), supervise=supervise)


RENDERER = renderer("chatml")


def conversation(name):
    return conversation_of(json.dumps(CONVERSATIONS[name]), json.dumps([TOOL] if name in WITH_TOOLS else None))


def pieces(made):
    """The text with what is learned in «»."""
    return "".join(f"«{piece.text}»" if piece.supervised else piece.text for piece in made)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(monkeypatch, name):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", Mock(now=lambda: datetime.datetime(2026, 1, 31, 12, 30)))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    for which in CONVERSATIONS:
        made = conversation(which)
        messages = json.loads(json.dumps(CONVERSATIONS[which]))
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        tools = [TOOL] if which in WITH_TOOLS else None
        for answer in (False, True):
            how = {"chat_template": TEMPLATES[name], "add_generation_prompt": answer}
            try:
                theirs = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **how)
            except (jinja2.TemplateError, TypeError) as error:  # what a template does not take, ours does not either
                with pytest.raises(TemplateFault, match=re.escape(str(error))):
                    template(name).render(made.messages, made.tools, add_generation_prompt=answer)
            else:
                ours = template(name).render(made.messages, made.tools, add_generation_prompt=answer)
                assert ours == theirs, (which, answer)


def problem_with(name, turns, tools=None, *, supervise="all"):
    """What is wrong with these turns where the assistant's are to be learned."""
    with pytest.raises(BadConversation) as caught:
        renderer(name, supervise).learned(conversation_of(turns, tools))
    return caught.value.problem


def start(role):
    return f"<|im_start|>{role}\n"


ONE, TWO = f"{start('user')}What is 2+2?<|im_end|>\n", f"{start('user')} And 3+3? <|im_end|>\n"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LEARNED = [  # a template, a conversation, and its text with what is learned in «»
    ("chatml", "two", f"{ONE}{start('assistant')}«4, “surely” <b><|im_end|>\n»{TWO}{start('assistant')}«6<|im_end|>\n»"),
    ("headers", "calls", (
        f"<s>{HEADER.format('system')}Today Date: 31 Jan 2026\n\nBe brief.<|eot_id|>"
        f"{HEADER.format('user')}Call one of these:\n\n{json.dumps(TOOL, indent=4)}\n\nWhat is 2+2?<|eot_id|>"
        f"{HEADER.format('assistant')}«{{\"name\": \"add\", \"parameters\": {{\"a\": 2, \"b\": \"ü\"}}}}<|eom_id|>»"
        f"{HEADER.format('ipython')}4<|eot_id|>{HEADER.format('assistant')}«6<|eot_id|>»")),
    ("alternating", "system",
     "<s> [INST] Be brief.\n\nWhat is 2+2? [/INST]« 4, “surely” <b></s>» [INST]  And 3+3?  [/INST]« 6</s>»"),
    ("thinking", "thinks", f"{ONE}{start('assistant')}«<think>\nTwo and two\n</think>\n\n4, “surely” <b><|im_end|>\n»"),
    ("marked", "one", f"{ONE}{start('assistant')}«4, “surely” <b><|im_end|>\n»"),
]  # fmt: skip


def test_the_assistants_turns_are_learned_with_their_end():
    for name, which, text in LEARNED:
        assert pieces(renderer(name).learned(conversation(which))) == text


def test_the_last_turn_can_be_learned_where_earlier_ones_are_written_otherwise():
    two, problem = conversation("two"), problem_with("thinking", CONVERSATIONS["two"])
    assert says(problem.what, "the template writes turns 1 to 2 otherwise alone … <think>")
    assert says(problem.fix, "set chat.supervise: last … or name another template with chat.template")
    assert pieces(renderer("thinking", "last").learned(two)).endswith(
        f"4, “surely” <b><|im_end|>\n{TWO}{start('assistant')}«<think>\n\n</think>\n\n6<|im_end|>\n»"
    )
    text = pieces(renderer("thinking", "last").learned(conversation("results")))
    assert "</tool_response>\n<tool_response>" in text
    assert text.count("«") == 1


CALLING = "{% for m in messages %}{{ m.content + m.tool_calls|tojson if m.tool_calls else m.content }}{% endfor %}"
NOT_WRITTEN = [
    ("marked", [SYSTEM, USER, ANSWER], "drops turn 1 (system)"),
    ("marked", [USER, {**CALL, "content": "x"}, RESULT, ANSWER], "drops a tool call of turn 2"),
    ("no_system", [SYSTEM, USER, ANSWER], "refuses the conversation: System role not supported"),
    ("alternating", [USER, USER, ANSWER], "refuses the conversation: After the optional system message, conversation roles"),
    ("chatml", [USER, CALL, RESULT, ANSWER], "does not write the tool calls of turn 2 (assistant)"),
    (CALLING, [USER, CALL, RESULT, ANSWER], "asks for the content of turn 2 (assistant), which calls a tool"),
    ("{{ messages[0].foo.bar }}", [USER, ANSWER], "cannot write the conversation: 'dict object' has no attribute 'foo'"),
    ("headers", [ANSWER, USER, SECOND], "cannot write the beginning of the assistant's turn without a turn before it"),
]  # fmt: skip


def test_turns_and_tools_that_do_not_reach_the_text_are_told():
    for name, turns, words in NOT_WRITTEN:
        problem = problem_with(name, turns)
        assert says(problem.what, f"the chat template {name}.jinja {words}"), problem.what
        assert "chat.template" in problem.fix
    assert problem_with("marked", [USER, ANSWER], [TOOL]).what == "the chat template marked.jinja drops tool 1"
    problem = problem_with("headers", [USER, {**CALL, "content": "I call"}, RESULT, SECOND], [TOOL])
    assert problem.what == "the chat template headers.jinja drops turn 2 (assistant)"
    assert says(problem.fix, "remove it from the conversation, or name another template")
    with pytest.raises(BadConversation, match=r"drops turn 1 \(system\)"):
        renderer("marked").prompt(conversation("system"))
    opened = TEMPLATES["chatml"].replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
    what = "turn 1 with the beginning of the next answer otherwise alone than in the whole"
    assert what in problem_with(opened, [USER, ANSWER]).what
    assert "half of a character" in problem_with("chatml", [{"role": "user", "content": "\ud83d"}, ANSWER]).what


MERGING = (
    "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}<{{ m.role }}>{% endif %}"
    "{{ m.content }}{% if loop.last or m.role != messages[loop.index0 + 1].role %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_turns_that_are_merged_are_told():
    problem = problem_with(MERGING, [SYSTEM, USER, AGAIN, ANSWER], supervise="last")
    assert problem.what.endswith("merges the turns 2 and 3 (user, user) into one")
    assert problem.expected == "a turn of its own for each"
    for supervise in ("all", "last"):
        problem = problem_with(MERGING, [USER, ANSWER, SECOND, AGAIN, ANSWER], supervise=supervise)
        assert problem.what.endswith("merges the turns 2 and 3 (assistant, assistant) into one")
    for name in ("chatml", "headers", "thinking", "no_system", "folding"):
        renderer(name, "last").learned(conversation_of([USER, ANSWER, SECOND, AGAIN, USER, ANSWER]))
    picky = "{% for m in messages %}{% if 'qz' in m.content %}{{ raise_exception('?') }}{% endif %}{% endfor %}"
    problem = problem_with(picky + MERGING, [USER, AGAIN, ANSWER], supervise="last")
    assert problem.what.endswith("merges the turns 1 and 2 (user, user) into one")


def test_a_turn_with_a_weight_is_refused_and_thoughts_that_are_dropped_are_counted():
    turns = [USER, {**ANSWER, "weight": 0}, AGAIN, {**SECOND, "weight": 1.0}]
    weighed, problem = conversation_of(turns), problem_with("chatml", turns)
    assert problem.what == "turn 2 (assistant) has the weight 0, and brim would learn it as any other"
    assert problem.fix.startswith("set chat.supervise: last")
    assert pieces(renderer("chatml", "last").learned(weighed)).endswith("«6<|im_end|>\n»")
    problem = problem_with("chatml", [USER, {**ANSWER, "weight": 0.5}], supervise="last")
    assert problem.fix.startswith("end the conversation before the turn")
    renderer("chatml").prompt(weighed)
    conversations = [*[[USER, THOUGHT]] * 2, [USER, {**ANSWER, "thinking": ""}], [USER, THOUGHT, USER, ANSWER]]
    for name, num_dropped in [("chatml", 2), ("thinking", 0)]:
        made = renderer(name, "last")
        for turns in conversations:
            made.learned(conversation_of(turns))
        assert made.num_without_thoughts == num_dropped


def test_what_a_prediction_goes_on_from_is_what_was_learned_from():
    for name in ("chatml", "headers", "alternating", "no_system", "folding"):
        learned, prompt = renderer(name).learned(conversation("two")), renderer(name).prompt(conversation("two"))
        assert [piece.text for piece in prompt] == [piece.text for piece in learned[:-1]]
    made = renderer("chatml").prompt(conversation_of([USER, ANSWER, SECOND]))
    assert [piece.text for piece in made][1:] == ["4, “surely” <b><|im_end|>\n", "<|im_start|>assistant\n"]
    (piece,) = renderer("thinking").prompt(conversation("two"))  # whole where no row like it could be learned
    (last,) = renderer("thinking", "last").prompt(conversation("two"))
    assert piece == last
    assert piece.text.endswith(" And 3+3? <|im_end|>\n<|im_start|>assistant\n")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(lambda text: f"x{text}x")


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.none() | TEXT)
def test_whatever_is_said_what_is_learned_is_the_answers(exchanges, system):
    turns = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in exchanges:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    made = RENDERER.learned(conversation_of(json.dumps(turns)))
    ends = [piece.text for piece in made if piece.supervised]
    assert ends == [f"{answer}<|im_end|>\n" for _, answer in exchanges]
    text = template("chatml").render(turns, None, add_generation_prompt=False)
    assert "".join(piece.text for piece in made) == text
