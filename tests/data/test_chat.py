"""Cells as conversations, everything that is none, and rows with conversations from the data to tokens."""

import json

import pyarrow as pa
import pytest
from tests.data.conftest import BOS, CHAT_TEMPLATES as TEMPLATES, EOS, ids, jsonl, load
from tests.messages import refused, says

from brim.config.schema import Config
from brim.data import check_data, prepare, prompts_of
from brim.data.chat import chat_template
from brim.data.chat.messages import BadConversation, conversation_of, require_learnable, to_be_continued
from brim.data.read import read
from brim.errors import DataError, ModelError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def problem_with(cell, tools=None, check=lambda conversation: None):
    with pytest.raises(BadConversation) as caught:
        check(conversation_of(cell, tools))
    problem = caught.value.problem
    assert problem.where == ""
    return str(problem)


def called(*calls, **turn):
    return [USER, {"role": "assistant", "tool_calls": list(calls), **turn}]


def test_json_text_and_arrow_lists_are_the_same_conversation_without_the_nulls_of_structs():
    turns = [{"role": "system", "content": "s"}, USER, {**ANSWER, "name": "x"}]
    column = pa.array([turns])
    assert column.type == pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()}))
    arrow = conversation_of(column.to_pylist()[0])
    assert arrow == conversation_of(json.dumps(turns))
    assert arrow.messages == turns
    assert arrow.tools is None
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    without = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    assert conversation_of(turns).messages[1] == without
    assert conversation_of(json.dumps(turns)).messages[1]["tool_calls"] == calls
    function = {"name": "f", "arguments": '{"x": [{"y": "ü"}]}'}
    turns = called({"id": "1", "function": function}, {"name": "g", "arguments": ""})
    parsed = {"id": "1", "function": {"name": "f", "arguments": {"x": [{"y": "ü"}]}}}
    assert conversation_of(turns).messages[1]["tool_calls"] == [parsed, {"name": "g", "arguments": {}}]


def test_share_gpt_is_read_as_roles_parts_are_joined_and_thoughts_get_the_names_that_templates_read():
    roles = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool", "bot": "assistant"}
    made = conversation_of([{"from": name, "value": name[0], "weight": 1} for name in roles])
    assert made.was_share_gpt
    assert [(turn["role"], turn["content"]) for turn in made.messages] == [(to, name[0]) for name, to in roles.items()]
    assert made.messages[1]["weight"] == 1
    parts = [{"type": "text", "text": "one, "}, {"text": "two"}, "!"]
    assert conversation_of([{"role": "user", "content": parts}, ANSWER]).messages[0]["content"] == "one, two!"
    thoughts = dict.fromkeys(["reasoning", "thinking", "reasoning_content"], "r")
    assert conversation_of([USER, {**ANSWER, "reasoning": "r"}]).messages[1] == {**ANSWER, **thoughts}


def test_tools_are_json_schemas_and_a_cell_without_any_is_none():
    for nothing in [None, "", " ", "null", "[]", []]:
        assert conversation_of([USER, ANSWER], nothing).tools is None
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": None}}}
    assert conversation_of([USER, ANSWER], json.dumps([tool])).tools == [tool]
    del tool["function"]["parameters"]["required"]
    assert conversation_of([USER, ANSWER], [tool]).tools == [tool]
    assert says(problem_with([USER, ANSWER], [{"type": "function"}]), "tool 1 has no name")
    assert says(problem_with([USER, ANSWER], "f"), "the list of tools is a text that is not JSON (")
    assert says(problem_with([USER, ANSWER], '{"name": "f"}'), "the list of tools is an object")


ROLES = "one of system, developer, user, assistant, tool, function, ipython"
A_LIST = 'a list of turns such as {"role": "user", "content": "…"}'
NO_CONTENT = "content as text; only an assistant's turn with tool_calls goes without"
NO_CONVERSATIONS = [
    (None, f"the conversation is missing … {A_LIST}"),
    ("hello", f"the conversation is a text that is not JSON (Expecting value: … {A_LIST}"),
    ('[{"role": "user", "role": "user"}]', "the conversation … not JSON (the key 'role' stands twice in one object)"),
    ("3", "the conversation is a number"), ('{"messages": []}', "the conversation is an object"),
    ("null", "the conversation is null"), (True, "the conversation is true or false"),
    ("[]", "the conversation is empty … at least one turn"),
    ([{"role": "user", "content": "x" * 5_000_000}], "the conversation is longer than 4,194,304 characters"),
    ([USER, "a"], "turn 2 is text … an object with role and content"),
    ([{"content": "q"}], f"turn 1 has no role … {ROLES}"), ([{"role": None, "content": "q"}], "turn 1 has no role"),
    ([{"role": 1, "content": "q"}], "turn 1 has a role that is a number"),
    ([USER, {"role": "asistant", "content": "a"}], f"turn 2 has the role 'asistant' … {ROLES} … write assistant"),
    ([{"role": "User", "content": "a"}], "turn 1 has the role 'User' … write user"),
    ([{"role": "gpt", "content": "a"}], "turn 1 has the role 'gpt' … write assistant"),
    ([{"role": "narrator", "content": "a"}], "turn 1 has the role 'narrator'"),
    ([{"role": "user"}], f"turn 1 (user) has no content … {NO_CONTENT}"),
    (called(content=None), f"turn 2 (assistant) has no content … {NO_CONTENT}"),
    ([{"role": "user", "content": 3}], "the content of turn 1 is a number … text, or a list of texts"),
    ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "the content of turn 1 … of the type 'image' … type text"),
    ([USER, {**ANSWER, "reasoning": {"steps": 2}}], "the reasoning of turn 2 is an object … text"),
    ([{"role": "user", "content": [{"type": "text"}]}], "a part of the content of turn 1 is an object without text"),
    ([{**USER, "tool_calls": [{"name": "f"}]}], "turn 1 calls a tool and is of the role user … assistant"),
    ([USER, {**ANSWER, "tool_calls": {"name": "f"}}], "the tool_calls of turn 2 is an object … a list such as"),
    (called({"name": "f", "arguments": "{x"}), "the tool_calls of turn 2: the arguments of f are not JSON (Expecting"),
    (called({"name": "f", "arguments": "[1]"}), "the tool_calls of turn 2: the arguments of f are a list … names and values"),
    ([{"from": "human", "value": "q"}, ANSWER], "turn 2 is written in another form than the turns with `from` and `value` … one form"),
    ([{"from": "function_call", "value": "q"}], "turn 1 is from 'function_call' … one of human, gpt, … rewrite the turn"),
]  # fmt: skip


def test_what_is_no_conversation_is_told_with_the_turn():
    for cell, words in NO_CONVERSATIONS:
        assert says(problem_with(cell), words), problem_with(cell)


def test_there_must_be_something_to_learn_at_the_end_and_something_to_go_on_from():
    last = "the last turn, 3, is of the role user … ends with the assistant's … add the assistant's"
    nothing = "nothing stands before the assistant's turn"
    for turns, words in [([USER], "no turn is the assistant's"), ([ANSWER], nothing), ([USER, ANSWER, USER], last)]:
        assert says(problem_with(turns, check=require_learnable), words)
    assert to_be_continued(conversation_of([USER, ANSWER])).messages == [USER]
    assert to_be_continued(conversation_of([USER, ANSWER, USER])).messages == [USER, ANSWER, USER]
    assert says(problem_with([ANSWER], check=to_be_continued), nothing)


TURNS = [{**USER, "content": "one"}, {**ANSWER, "content": "eins"}]
TURNS += [{**USER, "content": "two"}, {**ANSWER, "content": "zwei"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
SHORT = (
    "{% for m in messages %}{{ '<s>' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else ':' }}{% endfor %}"
)


@pytest.fixture
def chat_encoder(make_folder):
    def make(template=SHORT):
        folder = make_folder()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return load(folder)

    return make


def config(preprocessing=None, **chat):
    preprocessing = {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}, **(preprocessing or {})}
    keys = {"chat": chat, "trainer": {"type": "finetune"}, "preprocessing": preprocessing}
    return Config.model_validate({"base_model": "base", **keys})


def prepared(encoder, columns, **settings):
    return prepare(read(columns), config(**settings), encoder, context_length=None)


def test_each_answer_is_learned_and_nothing_is_added_to_the_template(chat_encoder):
    made = prepared(chat_encoder(), {"messages": [TURNS]})
    (row,) = made.splits["train"]
    answers = [*ids("eins"), EOS], [*ids("zwei"), EOS]
    assert row.input_ids.tolist() == [BOS, *ids("one:"), *answers[0], BOS, *ids("two:"), *answers[1]]
    assert row.supervised.tolist() == [False] * 5 + [True] * 5 + [False] * 5 + [True] * 5
    assert made.notes == ("the validation split has no rows", "the test split has no rows")
    (last,) = prepared(chat_encoder(), {"messages": [TURNS]}, supervise="last").splits["train"]
    assert last.supervised.tolist() == [False] * 15 + [True] * 5
    made = prompts_of(read({"messages": [TURNS, TURNS[:3]]}), config(), chat_encoder())
    assert [prompt.input_ids.tolist() for prompt in made.rows] == [row.input_ids[:15].tolist()] * 2
    assert made.rows.num_supervised.tolist() == [0, 0]


def test_all_forms_of_a_conversation_are_the_same_row(chat_encoder, tmp_path):
    rows = [TURNS, TURNS[:2]]
    (tmp_path / "rows.jsonl").write_text(jsonl(*({"messages": row} for row in rows)))
    names = {"user": "human", "assistant": "gpt"}
    share_gpt = {"messages": [[{"from": names[t["role"]], "value": t["content"]} for t in row] for row in rows]}
    texts = {"messages": [json.dumps(row) for row in rows]}
    for data in (tmp_path / "rows.jsonl", texts, pa.table({"messages": rows}), share_gpt):
        made = prepared(chat_encoder(), data)
        assert made.splits["train"].lengths.tolist() == [20, 10]
        said = "2 rows are in the ShareGPT form (`from`, `value`) and read as role and content"
        assert (said in made.notes) == (data is share_gpt)


def test_the_column_of_tools_is_found_and_named(chat_encoder):
    template = "{{ tools | map(attribute='function') | map(attribute='name') | join if tools else '-' }}" + SHORT
    columns = {"messages": [TURNS[:2]] * 2, "tools": [json.dumps([TOOL]), None], "mine": ["[]", json.dumps([TOOL])]}
    made = prepared(chat_encoder(template), columns)
    assert made.splits["train"].lengths.tolist() == [13, 11]
    assert "the column `tools` gives the conversations their tools (to use another, set chat.tools)" in made.notes
    assert prepared(chat_encoder(template), columns, tools="mine").splits["train"].lengths.tolist() == [11, 13]
    with pytest.raises(DataError, match="drops tool 1"):
        prepared(chat_encoder(), columns)


def test_rows_that_are_no_conversations_are_told_with_their_places_or_left_out(chat_encoder):
    columns = {"messages": [json.dumps(TURNS), None, "[]", json.dumps(TURNS[:1]), *[json.dumps(TURNS)] * 2]}
    with refused(
        "the given columns, row 1: the conversation is missing",
        "the given columns, row 2: the conversation is empty",
        "the given columns, row 3: no turn is the assistant's … preprocessing.on_bad_row: drop",
        by=DataError,
    ):
        prepared(chat_encoder(), columns)
    made = prepared(chat_encoder(), columns, preprocessing={"on_bad_row": "drop"})
    assert made.splits["train"].keys.tolist() == [0, 4, 5]
    assert [(entry.key, entry.event) for entry in made.ledger] == [(row, "dropped_bad") for row in (1, 2, 3)]
    cells = [json.dumps(TURNS)] * 200
    cells[3], cells[150] = json.dumps(TURNS[:1]), "[]"
    made = prepared(chat_encoder(), {"messages": cells})
    assert len(made.splits["train"]) == 198
    (line,) = made.ledger.summary()
    assert says(line, "2 of 200 rows were dropped … row 3: … row 150: … max_dropped_fraction 0.01 leaves out up to 2)")
    cells[151] = "[]"
    with pytest.raises(DataError, match="max_dropped_fraction leaves out up to 2"):
        prepared(chat_encoder(), {"messages": cells})


def test_a_conversation_is_cut_as_a_whole_its_day_is_settled_and_samples_mark_every_answer(chat_encoder):
    made = prepared(chat_encoder(), {"messages": [TURNS]}, preprocessing={"global_max_sequence_length": 12})
    assert made.splits["train"][0].supervised.tolist() == [False] * 5 + [True] * 5 + [False] * 2
    assert [(e.event, e.tokens_before, e.tokens_after) for e in made.ledger] == [("cut_joined", 20, 12)]
    template = "{{ strftime_now('%d.%m.') }}" + SHORT
    (row,) = prepared(chat_encoder(template), {"messages": [TURNS[:2]]}, date="2026-01-31").splits["train"]
    assert row.input_ids[:6].tolist() == ids("31.01.")
    report = check_data(config(), read({"messages": [TURNS]}), chat_encoder(), context_length=None, show=1)
    segments = [(segment.text, segment.supervised) for segment in report.samples[0].segments]
    assert segments == [("<s>one:", False), ("eins</s>", True), ("<s>two:", False), ("zwei</s>", True)]


def test_what_is_noted_on_conversations(chat_encoder):
    def notes(*rows, template=SHORT):
        return prepared(chat_encoder(template), {"messages": list(rows)}).notes

    spelled = [{"role": "user", "content": "one</s>"}, TURNS[1]]  # the template writes special tokens anyway
    (note,) = [note for note in notes(TURNS, spelled) if "special tokens" in note]
    assert says(note, "the text of 1 row spells out special tokens … the given columns, row 1")
    empty = [TURNS[0], {"role": "assistant", "content": ""}]
    assert any("the answer of 1 row is empty" in note for note in notes(empty))
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "{}"}]}
    template = SHORT.replace("m.content", "m.content or m.tool_calls[0].name")
    assert not any("empty" in note for note in notes([TURNS[0], call], template=template))
    thinking = [TURNS[0], {**TURNS[1], "reasoning": "thought"}]
    dropped = "the chat template drops the thoughts (reasoning_content) of the last answer of 2 rows"
    assert dropped in notes(thinking, thinking)
    endless = notes(TURNS, template=SHORT.replace("</s>", ";"))
    assert any(note.startswith("THE MODEL DOES NOT LEARN TO STOP: the chat template ") for note in endless)
    assert not any("not used" in note for note in notes(TURNS, json.dumps(TURNS)))  # in two forms


def test_the_tokens_that_end_a_turn_are_those_of_the_template(chat_encoder):
    for template, ends in [
        (SHORT, [EOS]),
        (TEMPLATES["headers"].replace("<|eot_id|>", "</s>").replace("<|eom_id|>", "<pad>"), [EOS, 2]),
        (TEMPLATES["folding"], [EOS]),
        ("{{ raise_exception('no') if messages[0].role != 'system' }}" + SHORT, [EOS]),
        (SHORT.replace("</s>", ";"), []),
        ("{{ raise_exception('never') }}", []),
        ("{% if tools %}{{ tools[0].function.name }}<pad>{% endif %}" + SHORT, [EOS]),  # which writes no calls
    ]:
        made = chat_encoder(template)
        assert chat_template(config().chat, made).end_ids(made) == ends


def test_a_space_that_a_tokenizer_puts_before_a_text_and_pieces_with_other_tokens_together(make_folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["one two eins zwei [INST] [/INST] \n"] * 9, trainer)
    folder = make_folder()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["alternating"])
    done = prepared(load(folder), {"messages": [TURNS]})
    (row,) = done.splits["train"]
    whole = "<s> [INST] one [/INST] eins</s> [INST] two [/INST] zwei</s>"
    assert row.input_ids.tolist() == tokenizer.encode(whole).ids
    assert not any("encoded at once" in note for note in done.notes)
    folder = make_folder()
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"]["vocab"]["::"] = len(stored["model"]["vocab"])
    stored["model"]["merges"] = [[":", ":"]]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("::", add_special_tokens=False).ids) == 1
    (folder / "chat_template.jinja").write_text(SHORT)
    notes = prepared(load(folder), {"messages": [TURNS, [TURNS[0], {"role": "assistant", "content": ":x"}]]}).notes
    assert any(note.startswith("the tokens of 1 row are others") and note.endswith("row 1") for note in notes)


def test_what_cannot_begin_is_told_at_once(chat_encoder):
    for template, chat, error, words in [
        (SHORT, {"messages": "turns"}, DataError, "… no column `turns`, which chat.messages names"),
        (SHORT, {"tools": "tool"}, DataError, "… no column `tool`, which chat.tools names"),
        (None, {}, ModelError, "… the tokenizer has no chat template"),
        ("{{ ''.__class__ }}", {}, ModelError, "… chat_template.jinja: the chat template cannot be used: it reaches"),
    ]:
        with refused(words, by=error):
            prepared(chat_encoder(template), {"messages": [TURNS]}, **chat)
