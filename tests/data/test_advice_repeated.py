"""Prompts and rows that stand in the data more than once."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from brim.data.advice import Watcher
from brim.data.advice.rows import different_answers, duplicates, one_prompt
from brim.data.tokens import Texts

CAPITALS = ["Paris", "Rome", "Lima", "Oslo", "Cairo", "Quito", "Riga", "Bern", "Doha", "Kyiv", "Suva", "Baku"]
QUESTIONS = [f"Which country has the capital {name}?" for name in CAPITALS]
COUNTRIES = ["France", "Italy", "Peru", "Norway", "Egypt", "Ecuador", "Latvia", "Switzerland", "Qatar", "Ukraine"]
COUNTRIES += ["Fiji", "Azerbaijan"]


def facts_of(prompts, answers):
    watcher = Watcher("</s>")
    watcher(Texts(keys=np.arange(len(prompts)), prompts=prompts, answers=answers))
    return watcher.facts()


def test_rows_that_differ_give_no_advice(advice_on):
    assert advice_on(QUESTIONS, COUNTRIES) == {}


def test_one_prompt_with_different_answers(advice_on):
    found = advice_on([*QUESTIONS, QUESTIONS[3], QUESTIONS[1]], [*COUNTRIES, "Sweden", "Italy"])
    finding = found["different_answers"]
    assert finding.what == "2 of 14 rows (14.3%) ask the same as another and are answered differently (1 prompt)"
    assert finding.rows.tolist() == [3, 12]
    assert finding.like.tolist() == [3, 3]
    assert finding.places == ("the given columns, row 12 (as the given columns, row 3)",)
    assert finding.fix == "keep one answer a prompt, or add to the prompt what makes them differ"
    assert found["duplicates"].rows.tolist() == [13]


def test_exact_duplicates(advice_on):
    found = advice_on(QUESTIONS + QUESTIONS[2:4], COUNTRIES + COUNTRIES[2:4])
    assert list(found) == ["duplicates"]
    finding = found["duplicates"]
    assert finding.what == "2 of 14 rows (14.3%) repeat an earlier row, prompt and answer"
    assert (finding.rows.tolist(), finding.like.tolist()) == ([12, 13], [2, 3])
    assert finding.places[0] == "the given columns, row 12 (as the given columns, row 2)"


def test_prompts_that_differ_in_case_and_spacing_alone_are_told_apart(advice_on):
    prompts = [*QUESTIONS, "which  country has the capital\nparis?"]
    finding = advice_on(prompts, [*COUNTRIES, "Texas"])["nearly_the_same"]
    assert finding.what == (
        "2 of 13 rows (15.4%) differ from another's prompt in case or spacing alone and are answered differently"
    )
    assert (finding.rows.tolist(), finding.like.tolist()) == ([0, 12], [0, 0])
    assert advice_on(prompts, [*COUNTRIES, "France"]) == {}


def test_only_training_rows_count(advice_on):
    found = advice_on([*QUESTIONS, "So?", "So?"], [*COUNTRIES, "yes", "no"], split=[0] * 12 + [2, 2])
    assert set(found) == {"small_split"}


def test_text_that_is_learned_alone_has_no_prompts_to_compare(advice_on):
    pieces = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(30)]
    assert advice_on([""] * 30, pieces) == {}
    assert advice_on([""] * 30, pieces, split=[0] * 20 + [2] * 10).keys() == {"small_split"}


def test_a_template_without_the_rows_values(advice_on):
    found = advice_on(QUESTIONS, COUNTRIES, prompt__template="Which country is it?\n")
    assert set(found) == {"one_prompt"}
    assert found["one_prompt"].what == "12 of 12 rows (100.0%) have the very same prompt, with different answers"
    assert found["one_prompt"].fix == "put the columns that decide the answer into prompt.template, as {column}"


@pytest.mark.parametrize(("num_yes", "is_told"), [(20, False), (21, True)])
def test_one_answer_in_more_than_half_of_the_rows(advice_on, num_yes, is_told):
    prompts = [f"Is {n} even?" for n in range(40)]
    found = advice_on(prompts, ["yes"] * num_yes + ["no"] * (40 - num_yes))
    assert ("one_answer" in found) == is_told
    if is_told:
        assert found["one_answer"].what == "21 of 40 rows (52.5%) have one and the same answer"
        assert found["one_answer"].why == "a model that always writes it is right in 52.5% of the rows"
        assert found["one_answer"].rows.tolist() == list(range(21))


texts = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz")), max_size=30)


@given(rows=texts)
def test_findings_equal_those_of_a_plain_count(rows):
    """The arrays against dictionaries of the texts themselves."""
    prompts, answers = [prompt for prompt, _ in rows], [answer for _, answer in rows]
    facts = facts_of(prompts, answers)
    silent = {p for p in prompts if prompts.count(p) > max(10, len(rows) / 2)}
    answers_of = {}
    for prompt, answer in rows:
        answers_of.setdefault(prompt, set()).add(answer)
    several = {prompt for prompt in answers_of if len(answers_of[prompt]) > 1}
    expected = {n for n, prompt in enumerate(prompts) if prompt in several - silent}
    exact = [finding for finding in different_answers(facts) if finding.kind == "different_answers"]
    assert {int(row) for finding in exact for row in finding.rows} == expected
    assert all(prompts[row] == prompts[like] for f in exact for row, like in zip(f.rows, f.like, strict=True))
    again = [n for n, row in enumerate(rows) if row in rows[:n]]
    assert [int(row) for finding in duplicates(facts) for row in finding.rows] == again
    alone = {n for n, prompt in enumerate(prompts) if prompt in silent & several}
    assert {int(row) for finding in one_prompt(facts) for row in finding.rows} == alone
