"""Answers without an end."""

import pytest

ANIMALS = ["cat", "dog", "cow", "fox", "owl", "bee", "ant", "elk", "emu", "hen"]
PROMPTS = [f"Describe animal {n}.\n" for n in range(40)]
SENTENCES = [
    f"The {ANIMALS[n % 10]} lives in a house with {n} doors and comes out at night to eat{', and to sing' * (n % 4)}."
    for n in range(40)
]


def test_sentences_that_end_give_no_advice(advice_on):
    assert advice_on(PROMPTS, SENTENCES) == {}


def test_answers_that_stop_in_a_sentence_among_many_that_do_not(advice_on):
    cut = [text[:-9] if n in (3, 14, 15, 29) else text for n, text in enumerate(SENTENCES)]
    finding = advice_on(PROMPTS, cut)["unfinished"]
    assert finding.what == (
        "4 of 40 answers (10.0%) stop in a word or at a comma, where 90% of those of their length end as sentences do"
    )
    assert finding.rows.tolist() == [3, 14, 15, 29]
    assert finding.fix == "look at some; complete them, or take them out"


@pytest.mark.parametrize(
    "answers",
    [
        [f"{name} {n}" for n, name in enumerate(ANIMALS * 4)],
        [f"def f{n}(value):\n    return some_module.function_of_{ANIMALS[n % 10]}(value)[{n}].name" for n in range(40)],
        [f"{text}\n- cats\n- dogs\n- {n} cows" for n, text in enumerate(SENTENCES)],
        [f'He wrote that "{text}"' for text in SENTENCES],
    ],
    ids=["labels", "code", "lists", "quotations"],
)
def test_what_has_no_full_stop_is_not_cut_for_that(advice_on, answers):
    assert advice_on(PROMPTS, answers) == {}


def test_full_stops_may_be_left_out_as_a_matter_of_style(advice_on):
    assert advice_on(PROMPTS, [text[:-1] if n % 5 == 0 else text for n, text in enumerate(SENTENCES)]) == {}
    assert advice_on(PROMPTS, [text[:-1] for text in SENTENCES]) == {}


def test_what_is_long_is_cut_by_a_limit_even_if_style_is_loose(advice_on):
    answers = [text[:-1] if n in (5, 9) else text for n, text in enumerate(SENTENCES)]
    cut = [0, 11, 12, 13, 21, 22, 23, 31]
    for n in cut:
        answers[n] = f"{answers[n]} " * 3 + f"And then the {ANIMALS[n % 10]} went to the w{'o' * (n % 7)}"
    assert advice_on(PROMPTS, answers)["unfinished"].rows.tolist() == cut


def test_an_address_is_an_end(advice_on):
    answers = [
        f"{text} See https://docs.python.org/3/{ANIMALS[n % 10]}" if n in (3, 14, 15, 29) else text
        for n, text in enumerate(SENTENCES)
    ]
    assert advice_on(PROMPTS, answers) == {}


def test_two_answers_without_a_full_stop_are_chance(advice_on):
    assert advice_on(PROMPTS, [text[:-9] if n in (3, 14) else text for n, text in enumerate(SENTENCES)]) == {}


def test_answers_cut_at_one_length(advice_on):
    long = [f"{text} " * (1 + n % 3) for n, text in enumerate(SENTENCES)]
    answers = [text[:150] for text in long]
    num_cut = sum(len(text) > 150 for text in long)
    assert num_cut == 23
    finding = advice_on(PROMPTS, answers)["unfinished"]
    assert finding.what.startswith("23 of 40 answers (57.5%) have exactly 150 characters, and none has more")


@pytest.mark.parametrize(
    "answers", [["yes " * 20] * 20 + ["no! " * 20] * 20, ["1" * 64] * 40, [f"{n:060d}" for n in range(40)]]
)
def test_answers_of_one_length_by_nature_are_not_cut(advice_on, answers):
    assert "unfinished" not in advice_on(PROMPTS, answers)


def test_an_end_sign_in_the_text(advice_on):
    answers = list(SENTENCES)
    answers[2] = f"One.</s>{answers[2]}"
    answers[7] += "</s>"
    answers[9] = f"Two.</s> {answers[9]}</s>\n"
    found = advice_on(PROMPTS, answers)
    assert set(found) == {"end_in_text"}


def test_end_signs_are_told_by_what_they_do(advice_on, make_config, encoder):
    from brim.data import check_data
    from brim.data.read import read

    answers = [f"{text}{'</s>' if n < 5 else '<|im_end|>' if n < 7 else ''}" for n, text in enumerate(SENTENCES)]
    answers[39] = f"Yes.</s>{answers[39]}"
    config = make_config(preprocessing__split={"type": "random", "probabilities": [1.0, 0.0, 0.0]})
    advice = check_data(config, read({"q": PROMPTS, "a": answers}), encoder, context_length=None).advice
    assert [(finding.what, finding.rows.tolist()) for finding in advice] == [
        ("1 of 40 answers (2.5%) have the end-of-sequence token </s> inside", [39]),
        ("5 of 40 answers (12.5%) end in </s> already", [0, 1, 2, 3, 4]),
        ("2 of 40 answers (5.0%) end in another model's end sign, such as </s>", [5, 6]),
    ]
    assert [finding.fix for finding in advice] == [
        "take </s> out of the answers, or split the rows",
        "take </s> off the answers",
        "take the sign off the answers",
    ]
