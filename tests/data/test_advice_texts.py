"""Characters that nobody typed, and prompts that hold their answer."""

import pytest

from brim.data.advice.boundaries import are_broken

PROMPTS = [f"What is said in text {n}?" for n in range(12)]
ANSWERS = [f"It is said that {n} is a number of some kind." for n in range(12)]


@pytest.mark.parametrize(
    "text",
    ["caf\ufffd", "cafÃ©", "itâ€™s", "â€œquotedâ€\x9d", "20Â°C", "fÃ¼r", "a\x00b", "a\x08b", "\x7f", "donâ€\u02dct"],
)
def test_broken(text):
    assert are_broken([text]).tolist() == [True]


@pytest.mark.parametrize(
    "text",
    [
        *("", "plain", "café", "it’s “quoted”", "20°C", "für", "NÃO", "SÃO PAULO", "Âge", "château", "5 €", "–—…"),
        *("naïve – yes", "a\tb\r\nc\x0c", "\x1b[31mred\x1b[0m", "日本語", "Ελληνικά", "🙂\u200d"),
    ],
)
def test_what_people_write_is_not_broken(text):
    assert are_broken([text]).tolist() == [False]


def test_each_character_that_was_read_as_windows_1252_is_found():
    """Every letter of Latin-1 above 7F, as UTF-8 read with the wrong encoding."""
    letters = [chr(code) for code in range(0xA0, 0x100)]
    wrong = [letter.encode().decode("cp1252", errors="replace") for letter in letters]
    assert are_broken(wrong).all()
    assert not are_broken([f"a{letter}b" for letter in letters]).any()


def test_rows_with_broken_characters(advice_on):
    found = advice_on([*PROMPTS, "cafÃ©?"], [*ANSWERS, "a caf\ufffd, not a bar."])
    assert set(found) == {"broken_characters"}
    assert found["broken_characters"].what == (
        "1 of 13 rows (7.7%) hold characters that nobody typed (\ufffd, Ã© for é, control codes)"
    )
    assert found["broken_characters"].rows.tolist() == [12]


def test_a_prompt_that_gives_its_answer_away(advice_on):
    finding = advice_on([f"{ANSWERS[n]} {PROMPTS[n]}" if n else PROMPTS[n] for n in range(12)], ANSWERS)
    assert set(finding) == {"answer_in_prompt"}
    assert finding["answer_in_prompt"].what == "11 of 12 rows (91.7%) have their answer in the prompt, word for word"
    assert finding["answer_in_prompt"].rows.tolist() == list(range(1, 12))


def test_choices_and_short_quotations_are_no_giveaway(advice_on):
    assert advice_on([f"Is text {n} positive or negative?" for n in range(12)], ["positive", "negative"] * 6) == {}
    quoted = [f"{ANSWERS[n]} {PROMPTS[n]}" if n < 5 else PROMPTS[n] for n in range(12)]
    assert advice_on(quoted, ANSWERS) == {}
