"""Advice on conversations: the template separates and ends the turns, repetition counts as elsewhere."""

from pathlib import Path

from brim.config import Config
from brim.data import check_data, read

TEMPLATE = Path(__file__).parent / "chat_templates" / "chatml.jinja"


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def advice(rows, encoder):
    settings = {"base_model": "base", "trainer": {"type": "finetune"}, "chat": {"template": str(TEMPLATE)}}
    split = {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}}
    config = Config.model_validate({**settings, "preprocessing": split})
    return check_data(config, read({"messages": rows}), encoder, context_length=None).advice


def test_the_template_is_the_separator_and_the_end(encoder):
    rows = [conversation(f"how many legs have {n} cats", f"{4 * n} legs") for n in range(40)]
    assert advice(rows, encoder) == ()


def test_conversations_repeat_as_prompts_and_answers_do(encoder):
    rows = [conversation(f"how many legs have {n} cats", f"{4 * n} legs") for n in range(40)]
    found = advice([*rows, rows[6], conversation("how many legs have 9 cats", "many")], encoder)
    assert [(each.kind, each.rows.tolist()) for each in found] == [("different_answers", [9, 41]), ("duplicates", [40])]
