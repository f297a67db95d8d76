"""Rows with conversations from the data to tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.config.schema import Config
from brim.data import check_data, prepare, prompts_of
from brim.data.chat import chat_template, end_ids_of_turns
from brim.data.check import Segment
from brim.data.read import read
from brim.data.tokens import load_encoder
from brim.errors import ConfigError, DataError, ModelError
from brim.models import locate

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "eins"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "zwei"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
BOS, EOS = 0, 1
SHORT = (
    "{% for m in messages %}{{ '<s>' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else ':' }}{% endfor %}"
)


def ids(text):
    return [ord(character) - 30 for character in text]


@pytest.fixture
def encoder(make_folder):
    def make(template=SHORT):
        folder = make_folder(tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return load_encoder(locate(str(folder), initialize="random"))

    return make


def config(**chat):
    changes = {name: chat.pop(name) for name in list(chat) if name == "preprocessing"}
    preprocessing = {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}, **changes.get("preprocessing", {})}
    return Config.model_validate(
        {"base_model": "base", "chat": chat, "trainer": {"type": "finetune"}, "preprocessing": preprocessing}
    )


def prepared(encoder, columns, **settings):
    return prepare(read(columns), config(**settings), encoder, context_length=settings.pop("context_length", None))


def test_each_answer_is_learned_and_nothing_is_added_to_the_template(encoder):
    made = prepared(encoder(), {"messages": [TURNS]})
    (row,) = made.splits["train"]
    answers = [*ids("eins"), EOS], [*ids("zwei"), EOS]
    assert row.input_ids.tolist() == [BOS, *ids("one:"), *answers[0], BOS, *ids("two:"), *answers[1]]
    assert row.supervised.tolist() == [False] * 5 + [True] * 5 + [False] * 5 + [True] * 5
    assert made.notes == ("the validation split has no rows", "the test split has no rows")


def test_the_last_answer_alone_is_learned_if_asked_for(encoder):
    (row,) = prepared(encoder(), {"messages": [TURNS]}, supervise="last").splits["train"]
    assert row.supervised.tolist() == [False] * 15 + [True] * 5


def test_a_prediction_goes_on_from_the_tokens_before_the_last_answer(encoder):
    source = read({"messages": [TURNS, TURNS[:3]]})
    made = prompts_of(source, config(), encoder())
    (row,) = prepared(encoder(), {"messages": [TURNS]}).splits["train"]
    assert [prompt.input_ids.tolist() for prompt in made.rows] == [row.input_ids[:15].tolist()] * 2
    assert made.rows.num_supervised.tolist() == [0, 0]


@pytest.mark.parametrize("form", ["jsonl", "json text", "parquet", "arrow", "share gpt"])
def test_all_forms_of_a_conversation_are_the_same_row(encoder, tmp_path, form):
    rows = [{"messages": TURNS}, {"messages": TURNS[:2]}]
    if form == "jsonl":
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json text":
        data = {"messages": [json.dumps(row["messages"]) for row in rows]}
    elif form == "share gpt":
        names = {"user": "human", "assistant": "gpt"}
        data = {"messages": [[{"from": names[t["role"]], "value": t["content"]} for t in r["messages"]] for r in rows]}
    else:
        data = pa.table({"messages": [row["messages"] for row in rows]})
        if form == "parquet":
            pq.write_table(data, tmp_path / "rows.parquet")
            data = tmp_path / "rows.parquet"
    made = prepared(encoder(), data)
    assert made.splits["train"].lengths.tolist() == [20, 10]
    said = "2 rows are in the ShareGPT form (`from`, `value`) and read as role and content"
    assert (said in made.notes) == (form == "share gpt")


def test_the_column_of_tools_is_found_and_named(encoder):
    template = "{{ tools | map(attribute='function') | map(attribute='name') | join if tools else '-' }}" + SHORT
    columns = {"messages": [TURNS[:2]] * 2, "tools": [json.dumps([TOOL]), None], "mine": ["[]", json.dumps([TOOL])]}
    made = prepared(encoder(template), columns)
    assert made.splits["train"].lengths.tolist() == [13, 11]
    assert "the column `tools` gives the conversations their tools (to use another, set chat.tools)" in made.notes
    assert prepared(encoder(template), columns, tools="mine").splits["train"].lengths.tolist() == [11, 13]
    assert "drops tool 1" in str(told(lambda: prepared(encoder(), columns)))


def told(act):
    with pytest.raises(DataError) as caught:
        act()
    return caught.value


def test_rows_that_are_no_conversations_are_told_with_their_places_or_left_out(encoder):
    columns = {"messages": [json.dumps(TURNS), None, "[]", json.dumps(TURNS[:1]), json.dumps(TURNS), json.dumps(TURNS)]}
    problems = told(lambda: prepared(encoder(), columns)).problems
    assert [(problem.where, problem.what) for problem in problems] == [
        ("the given columns, row 1", "the conversation is missing"),
        ("the given columns, row 2", "the conversation is empty"),
        ("the given columns, row 3", "no turn is the assistant's, so there is nothing to learn"),
    ]
    assert "preprocessing.on_bad_row: drop" in problems[-1].fix
    made = prepared(encoder(), columns, preprocessing={"on_bad_row": "drop"})
    assert made.splits["train"].keys.tolist() == [0, 4, 5]
    assert [(entry.key, entry.event) for entry in made.ledger] == [(row, "dropped_bad") for row in (1, 2, 3)]


def test_a_few_bad_conversations_of_many_are_left_out_as_other_unusable_rows_are(encoder):
    cells = [json.dumps(TURNS)] * 200
    cells[3], cells[150] = json.dumps(TURNS[:1]), "[]"
    made = prepared(encoder(), {"messages": cells})
    assert len(made.splits["train"]) == 198
    assert made.ledger.summary() == [
        "2 of 200 rows were dropped, since they cannot be read or used (the given columns, row 3: no turn is the "
        "assistant's, so there is nothing to learn; the given columns, row 150: the conversation is empty; "
        "preprocessing.max_dropped_fraction 0.01 leaves out up to 2)"
    ]
    cells[151] = "[]"
    problems = told(lambda: prepared(encoder(), {"messages": cells})).problems
    assert [problem.where for problem in problems] == [f"the given columns, row {row}" for row in (3, 150, 151)]
    assert problems[-1].fix.endswith("(preprocessing.max_dropped_fraction leaves out up to 2)")


def test_a_conversation_is_cut_as_a_whole(encoder):
    made = prepared(encoder(), {"messages": [TURNS]}, preprocessing={"global_max_sequence_length": 12})
    (row,) = made.splits["train"]
    assert row.supervised.tolist() == [False] * 5 + [True] * 5 + [False] * 2
    assert [(e.event, e.tokens_before, e.tokens_after) for e in made.ledger] == [("cut_joined", 20, 12)]


def test_what_the_data_says_may_spell_out_special_tokens_the_template_does_so_anyway(encoder):
    turns = [{"role": "user", "content": "one</s>"}, TURNS[1]]
    notes = prepared(encoder(), {"messages": [TURNS, turns]}).notes
    (note,) = [note for note in notes if "special tokens" in note]
    assert note.startswith("the text of 1 row spells out special tokens")
    assert note.endswith("the given columns, row 1")


def test_an_empty_answer_is_noted(encoder):
    turns = [TURNS[0], {"role": "assistant", "content": ""}]
    assert any("the answer of 1 row is empty" in note for note in prepared(encoder(), {"messages": [turns]}).notes)


def test_a_call_without_words_is_no_empty_answer(encoder):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "{}"}]}
    template = SHORT.replace("m.content", "m.content or m.tool_calls[0].name")
    notes = prepared(encoder(template), {"messages": [[TURNS[0], call]]}).notes
    assert not any("empty" in note for note in notes)


def test_thoughts_that_the_template_drops_are_noted(encoder):
    rows = [[TURNS[0], {**TURNS[1], "reasoning": "thought"}]] * 2
    notes = prepared(encoder(), {"messages": rows}).notes
    assert "the chat template drops the thoughts (reasoning_content) of the last answer of 2 rows" in notes


def test_the_tokens_that_end_a_turn_are_those_of_the_template(encoder):
    for template, ends in [
        (SHORT, [EOS]),
        (TEMPLATES["headers"].replace("<|eot_id|>", "</s>").replace("<|eom_id|>", "<pad>"), [EOS, 2]),
        (TEMPLATES["folding"], [EOS]),
        ("{{ raise_exception('no') if messages[0].role != 'system' }}" + SHORT, [EOS]),
        (SHORT.replace("</s>", ";"), []),
        ("{{ raise_exception('never') }}", []),
        ("{% if tools %}{{ tools[0].function.name }}<pad>{% endif %}" + SHORT, [EOS]),  # which writes no calls
    ]:
        made = encoder(template)
        assert end_ids_of_turns(chat_template(config().chat, made), made) == ends


def test_a_template_without_an_end_is_said_loudly(encoder):
    notes = prepared(encoder(SHORT.replace("</s>", ";")), {"messages": [TURNS]}).notes
    assert any(note.startswith("THE MODEL DOES NOT LEARN TO STOP: the chat template ") for note in notes)


def test_a_day_that_is_set_is_the_templates_today(encoder):
    (row,) = prepared(
        encoder("{{ strftime_now('%d.%m.') }}" + SHORT), {"messages": [TURNS[:2]]}, date="2026-01-31"
    ).splits["train"]
    assert row.input_ids[:6].tolist() == ids("31.01.")


def test_samples_mark_every_answer(encoder):
    report = check_data(config(), read({"messages": [TURNS]}), encoder(), context_length=None, show=1)
    assert report.samples[0].segments == (
        Segment(text="<s>one:", supervised=False),
        Segment(text="eins</s>", supervised=True),
        Segment(text="<s>two:", supervised=False),
        Segment(text="zwei</s>", supervised=True),
    )


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_before_a_piece(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["one two eins zwei [INST] [/INST] \n"] * 9, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["alternating"])
    made = load_encoder(locate(str(tmp_path), initialize="random"))
    done = prepared(made, {"messages": [TURNS]})
    (row,) = done.splits["train"]
    whole = "<s> [INST] one [/INST] eins</s> [INST] two [/INST] zwei</s>"
    assert row.input_ids.tolist() == tokenizer.encode(whole).ids
    assert not any("encoded at once" in note for note in done.notes)


def test_rows_whose_pieces_have_other_tokens_together_are_counted(tmp_path, make_folder):
    from tokenizers import Tokenizer

    folder = make_folder()
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"]["vocab"]["::"] = len(stored["model"]["vocab"])
    stored["model"]["merges"] = [[":", ":"]]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("::", add_special_tokens=False).ids) == 1
    (folder / "chat_template.jinja").write_text(SHORT)
    made = load_encoder(locate(str(folder), initialize="random"))
    notes = prepared(made, {"messages": [TURNS, [TURNS[0], {"role": "assistant", "content": ":x"}]]}).notes
    assert any(note.startswith("the tokens of 1 row are others") and note.endswith("row 1") for note in notes)


@pytest.mark.parametrize(
    ("template", "chat", "error", "message"),
    [
        (SHORT, {"messages": "turns"}, DataError, r"no column `turns`, which chat\.messages names"),
        (SHORT, {"tools": "tool"}, DataError, r"no column `tool`, which chat\.tools names"),
        (None, {}, ModelError, r"the tokenizer has no chat template"),
        (SHORT, {"template": "none.jinja"}, ConfigError, r"chat\.template: there is no such file: none\.jinja"),
        ("{{ ''.__class__ }}", {}, ModelError, r"chat_template\.jinja: the chat template cannot be used: it reaches"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {}, ModelError, "come to an end"),
    ],
)  # fmt: skip
def test_what_cannot_begin_is_told_at_once(encoder, template, chat, error, message):
    with pytest.raises(error, match=message):
        prepared(encoder(template), {"messages": [TURNS]}, **chat)


def test_lines_that_cannot_be_read_are_left_out_beside_those_that_are_no_conversation(tmp_path, encoder):
    rows = [json.dumps({"messages": TURNS})] * 4
    lines = [rows[0], "{broken", rows[1], json.dumps({"messages": "hello"}), *rows[2:]]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    made = prepared(encoder(), tmp_path / "data.jsonl", preprocessing={"on_bad_row": "drop"})
    assert made.splits["train"].keys.tolist() == [0, 2, 4, 5]
    assert [(entry.key, entry.split, entry.why.split(": ")[0]) for entry in made.ledger] == [
        (1, None, "data.jsonl:2"),
        (3, "train", "data.jsonl:4"),
    ]


def test_conversations_of_two_forms_are_not_called_unused(encoder):
    done = prepared(encoder(), {"messages": [TURNS, json.dumps(TURNS)]})
    assert sum(map(len, done.splits.values())) == 2
    assert not any("not used" in note for note in done.notes)
