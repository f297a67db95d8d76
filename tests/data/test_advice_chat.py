"""Advice on conversations: the template separates and ends the turns, repetition counts as elsewhere."""

from pathlib import Path

import pytest

from brim.config.schema import Config
from brim.data import check_data
from brim.data.read import read
from brim.errors import DataError

TEMPLATE = Path(__file__).parent / "chat_templates" / "chatml.jinja"


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def checked(rows, encoder, *, context_length=None, **keys):
    settings = {"base_model": "base", "trainer": {"type": "finetune"}, "chat": {"template": str(TEMPLATE)}}
    split = {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}}
    config = Config.model_validate({**settings, "preprocessing": split, **keys})
    return check_data(config, read({"messages": rows}), encoder, context_length=context_length)


def advice(rows, encoder):
    return checked(rows, encoder).advice


def test_the_template_is_the_separator_and_the_end(encoder):
    rows = [conversation(f"how many legs have {n} cats", f"{4 * n} legs") for n in range(40)]
    assert advice(rows, encoder) == ()


def test_conversations_repeat_as_prompts_and_answers_do(encoder):
    rows = [conversation(f"how many legs have {n} cats", f"{4 * n} legs") for n in range(40)]
    found = advice([*rows, rows[6], conversation("how many legs have 9 cats", "many")], encoder)
    assert [(each.kind, each.rows.tolist()) for each in found] == [("different_answers", [9, 41]), ("duplicates", [40])]


def test_what_is_to_be_predicted_is_checked_where_nothing_is_trained(encoder):
    asked, answered = conversation("q", "a")[:1], conversation("q", "a")
    for rows, said in [([asked, answered, asked], "2 of the 3 rows do not end with an answer"), ([answered] * 3, None)]:
        report = checked(rows, encoder, trainer={"type": "none"})
        notes = [note for note in report.notes if "as for predict" in note]
        assert notes == ([f"{said}: the prompts alone were checked, as for predict"] if said else [])
        assert sum(split.num_rows for split in report.splits) == 3
        assert (report.splits[0].num_supervised_tokens == 0) == (said is not None)
    report = checked(
        [asked, "no conversation"], encoder, trainer={"type": "none"}, preprocessing={"on_bad_row": "drop"}
    )
    assert len(report.events) == 1
    with pytest.raises(DataError, match="the last turn, 3, is of the role user"):
        checked([[*answered, *asked]], encoder)


def test_the_prompt_of_a_conversation_is_all_before_its_last_answer(encoder):
    turns = [*conversation("one", "eins"), *conversation("two", "zwei")]
    generation = {"trainer": {"type": "none"}, "generation": {"max_new_tokens": 20}}
    report = checked([turns], encoder, **generation)
    (split,) = (each for each in report.splits if each.num_rows)
    answer = len("zwei<|im_end|>\n")
    assert (split.prompt.max, split.answer.max) == (split.total.max - answer, answer)
    (finding,) = checked([turns], encoder, context_length=split.prompt.max + 19, **generation).advice
    assert (finding.kind, finding.fix) == ("no_room", "lower generation.max_new_tokens")
    assert checked([turns], encoder, context_length=split.prompt.max + 20, **generation).advice == ()
