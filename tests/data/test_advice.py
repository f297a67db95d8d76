"""What is advised on rows: repeated ones, leaks, lengths, ends, separators, characters, conversations."""

from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.data.conftest import ALL_TRAIN
from tests.messages import refused, says

from brim.config.schema import Config
from brim.data import check_data
from brim.data.advice import Bin, Cut, Watcher
from brim.data.advice.facts import are_broken
from brim.data.advice.finding import histogram
from brim.data.advice.rows import different_answers, duplicates, one_prompt
from brim.data.read import read
from brim.data.tokens import Texts, load_encoder
from brim.errors import DataError
from brim.models.folders import locate

CAPITALS = ["Paris", "Rome", "Lima", "Oslo", "Cairo", "Santiago", "Riga", "Madrid", "Doha", "Kyiv", "Suva", "Tehran"]
QUESTIONS = [f"Which country has the capital {name}?" for name in CAPITALS]
COUNTRIES = ["France", "Italy", "Peru", "Norway", "Egypt", "Chile", "Latvia", "Spain", "Qatar", "Mali", "Fiji", "Iran"]


def check_finding(finding, what, rows, *, like=None, fix="", why=""):
    assert says(finding.what, what), finding.what
    assert says(finding.fix, fix), finding.fix
    assert says(finding.why, why), finding.why
    assert finding.rows.tolist() == list(rows)
    assert like is None or finding.like.tolist() == like


def test_rows_that_differ_give_no_advice_and_only_training_rows_count(advice_on):
    assert advice_on(QUESTIONS, COUNTRIES) == {}
    pieces = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(30)]  # learned alone, without prompts
    assert advice_on([""] * 30, pieces, split=[0] * 20 + [2] * 10).keys() == {"small_split"}
    found = advice_on([*QUESTIONS, "So?", "So?"], [*COUNTRIES, "yes", "no"], split=[0] * 12 + [2, 2])
    assert set(found) == {"small_split"}


def test_one_prompt_with_different_answers_near_and_exact_duplicates(advice_on):
    found = advice_on([*QUESTIONS, QUESTIONS[3], QUESTIONS[1]], [*COUNTRIES, "Sweden", "Italy"])
    finding = found["different_answers"]
    what = "2 of 14 rows (14.3%) ask the same … answered differently (1 prompt)"
    check_finding(finding, what, [3, 12], like=[3, 3], fix="keep one answer a prompt")
    assert finding.places == ("the given columns, row 12 (as the given columns, row 3)",)
    check_finding(found["duplicates"], "1 of 14 rows (7.1%) repeat an earlier row", [13], like=[1])
    prompts = [*QUESTIONS, "which  country has the capital\nparis?"]
    what = "2 of 13 rows (15.4%) differ from another's prompt in case or spacing alone"
    check_finding(advice_on(prompts, [*COUNTRIES, "Texas"])["nearly_the_same"], what, [0, 12], like=[0, 0])
    assert advice_on(prompts, [*COUNTRIES, "France"]) == {}


def test_a_template_without_the_rows_values_and_one_answer_in_more_than_half_of_the_rows(advice_on):
    found = advice_on(QUESTIONS, COUNTRIES, prompt__template="Which country is it?\n")
    assert set(found) == {"one_prompt"}
    what, fix = "12 of 12 rows (100.0%) have the very same prompt", "put the columns that decide the answer into"
    check_finding(found["one_prompt"], what, range(12), fix=fix)
    prompts = [f"Is {n} even?" for n in range(40)]
    assert "one_answer" not in advice_on(prompts, ["yes"] * 20 + ["no"] * 20)
    finding = advice_on(prompts, ["yes"] * 21 + ["no"] * 19)["one_answer"]
    what = "21 of 40 rows (52.5%) have one and the same answer"
    check_finding(finding, what, range(21), why="… is right in 52.5% of the rows")


@given(rows=st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz")), max_size=30))
def test_findings_equal_those_of_a_plain_count(encoder, rows):
    """The arrays against dictionaries of the texts themselves."""
    prompts, answers = [prompt for prompt, _ in rows], [answer for _, answer in rows]
    watcher = Watcher(encoder)
    watcher(Texts(keys=np.arange(len(prompts)), prompts=prompts, answers=answers))
    facts = watcher.facts()
    silent = {p for p in prompts if prompts.count(p) > max(10, len(rows) / 2)}
    several = {prompt for prompt, answer in rows if any((prompt, other) in rows for other in {*"xyz"} - {answer})}
    expected = {n for n, prompt in enumerate(prompts) if prompt in several - silent}
    exact = [finding for finding in different_answers(facts) if finding.kind == "different_answers"]
    assert {int(row) for finding in exact for row in finding.rows} == expected
    assert all(prompts[row] == prompts[like] for f in exact for row, like in zip(f.rows, f.like, strict=True))
    again = [n for n, row in enumerate(rows) if row in rows[:n]]
    assert [int(row) for finding in duplicates(facts) for row in finding.rows] == again
    alone = {n for n, prompt in enumerate(prompts) if prompt in silent & several}
    assert {int(row) for finding in one_prompt(facts) for row in finding.rows} == alone


ASKED, MEANINGS = [f"Define word{n}." for n in range(100)], [f"what word{n} means." for n in range(100)]


def test_prompts_and_rows_of_train_in_the_other_splits(advice_on):
    answers = [*MEANINGS, *MEANINGS[:4], "another thing.", "and another.", *MEANINGS[10:13]]
    split = [0] * 60 + [2] * 35 + [1] * 5 + [2] * 6 + [1] * 3
    found = advice_on(ASKED + ASKED[:6] + ASKED[10:13], answers, split=split)
    assert list(found) == ["leakage", "small_split"]
    what = "3 of 8 validation rows (37.5%) have a prompt that stands in train (3 with the same answer); 6 of 41 test "
    what += "rows (14.6%) … (4 with the same answer)"
    rows, like = [106, 107, 108, 100, 101, 102, 103, 104, 105], [10, 11, 12, 0, 1, 2, 3, 4, 5]
    fix = "take these rows out … or set preprocessing.split: {type: hash, column: q}"
    check_finding(found["leakage"], what, rows, like=like, fix=fix)
    split = [0] * 40 + [1] * 30 + [2] * 30
    assert advice_on(ASKED, MEANINGS, split=split) == {}
    assert advice_on(ASKED, ["yes", "no"] * 50, split=split) == {}
    leak = advice_on([""] * 101, [*MEANINGS, MEANINGS[7]], split=[0] * 60 + [2] * 41)["leakage"]
    assert (leak.rows.tolist(), leak.like.tolist()) == ([100], [7])
    assert leak.fix.endswith("set preprocessing.split: {type: hash, column: a}")


def test_the_fix_for_a_random_split_ends_the_leak(encoder, make_config):
    columns = {"q": ASKED * 3, "topic": ["words"] * 300, "a": MEANINGS * 3}

    def advice(**changes):
        config = make_config(prompt__template="{topic}: {q}\n", **changes)
        return check_data(config, read(columns), encoder, context_length=None).advice

    assert (advice()[0].kind, advice()[0].fix) == ("leakage", "set preprocessing.split: {type: hash, column: q}")
    assert "leakage" not in {each.kind for each in advice(preprocessing__split={"type": "hash", "column": "q"})}


def test_few_rows_to_measure_by(advice_on):
    small, enough, none = (advice_on(ASKED, MEANINGS, split=[0] * (100 - n) + [2] * n) for n in (29, 30, 0))
    check_finding(small["small_split"], "few rows to measure by: test has 29", [], why="… by up to ±18%")
    assert enough == none == {}


@pytest.fixture
def checked_lengths(encoder, make_config):
    """100 rows: prompts of 2 to 101 tokens (with <s>), answers of 8 with 92 of 100 and of 30 to 100 with the others."""
    answers = [f"{n:08}" if n < 92 else "y" * 10 * (n - 89) for n in range(100)]
    rows = read({"q": ["x" * (n + 1) for n in range(100)], "a": answers})

    def checked(context_length=None, **changes):
        return check_data(make_config(**ALL_TRAIN, **changes), rows, encoder, context_length=context_length)

    return checked


def found_in(report, kind):
    return next(finding for finding in report.advice if finding.kind == kind)


def test_cuts_of_rows_prompts_and_answers_count_all_rows_with_their_lengths(checked_lengths):
    limit = {"preprocessing__global_max_sequence_length": 105}
    report = checked_lengths(context_length=512, **limit)
    totals = np.array([n + 2 + (8 if n < 92 else 10 * (n - 89)) + 1 for n in range(100)])
    lost = int((totals - 105).clip(min=0).sum())
    why = "preprocessing.global_max_sequence_length is 105"
    counts = {"num_rows": 8, "num_all_rows": 100, "num_tokens_lost": lost}
    keeps = {"share_of_tokens_lost": lost / int(totals.sum()), "keeps_95": 147, "keeps_99": 191, "keeps_all": 202}
    assert report.cuts == (Cut(event="cut_joined", limit_tokens=105, why=why, **counts, **keeps),)
    whole = "(whole are 95% at 147, 99% at 191, all at 202)"
    what = f"8 of 100 rows (8.0%) are cut at 105 tokens; {lost / totals.sum():.1%} of their tokens"
    fix = f"set preprocessing.global_max_sequence_length: 191 {whole}"
    why = "… end-of-sequence token: the model does not learn there when to stop"
    check_finding(found_in(report, "no_end"), what, range(92, 100), fix=fix, why=why)
    assert report.other_events == ()
    assert report.events[0].startswith("8 of 100 rows were cut as a whole")
    for context, fix in [(150, "set preprocessing.global_max_sequence_length: 150"), (105, "shorten these rows")]:
        assert found_in(checked_lengths(context_length=context, **limit), "no_end").fix.startswith(fix)
    lengths = {"input__preprocessing__max_sequence_length": 99, "output__preprocessing__max_sequence_length": 20}
    report = checked_lengths(**lengths)
    prompt, answer = report.cuts
    assert (prompt.event, prompt.num_rows, prompt.num_tokens_lost, prompt.keeps_all) == ("cut_prompt", 2, 3, 101)
    assert (answer.event, answer.num_rows, answer.keeps_95, answer.keeps_all) == ("cut_answer", 8, 50, 100)
    assert answer.num_tokens_lost == sum(10 * n - 20 for n in range(3, 11))
    for kind, part, length in [("cut_prompt", "input", 100), ("cut_answer", "output", 90)]:
        fix = f"set {part}_features[0].preprocessing.max_sequence_length: {length} ("
        assert found_in(report, kind).fix.startswith(fix)
    report = checked_lengths(preprocessing__global_max_sequence_length=50, preprocessing__drop_unlearnable=True)
    assert (report.cuts[0].num_all_rows, report.cuts[0].keeps_all) == (100, 202)
    assert sum(each.num_rows for each in report.lengths) == 100
    assert says(report.other_events[0], "52 of 100 rows were dropped: nothing of the answer is left")
    report = checked_lengths(context_length=512)  # no limit, no cut
    assert (report.cuts, report.advice) == ((), ())


def test_bins():
    for lengths, expected in [
        ([], []),
        ([10, 11, 11, 13], [(10, 10, 1), (11, 11, 2), (12, 12, 0), (13, 13, 1)]),
        ([100, 140, 260], [(100, 149, 2), (150, 199, 0), (200, 249, 0), (250, 260, 1)]),
        ([3, 9, 70, 130], [(3, 4, 1), (5, 8, 0), (9, 16, 1), (17, 32, 0), (33, 64, 0), (65, 128, 1), (129, 130, 1)]),
    ]:
        bins = histogram(np.asarray(lengths, dtype=np.int64))
        assert bins == tuple(Bin(first=first, last=last, num_rows=rows) for first, last, rows in expected)


@given(lengths=st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_bins_hold_every_length_once_and_leave_no_gap(lengths):
    bins = histogram(np.asarray(lengths, dtype=np.int64))
    assert len(bins) <= 8
    assert bins[0].first <= min(lengths)
    assert bins[-1].last == max(lengths)
    assert all(after.first == before.last + 1 for before, after in pairwise(bins))
    assert [each.num_rows for each in bins] == [sum(b.first <= n <= b.last for n in lengths) for b in bins]


def test_data_without_answers_or_splits_is_checked_by_what_it_has(encoder, make_config):
    config = make_config(trainer={"type": "none"}, adapter=None, preprocessing__split="fixed")
    prompts = [f"Summarize dialogue {n}: {'hello ' * n}" for n in range(20)]
    report = check_data(config, read({"q": prompts}), encoder, context_length=1024)
    (split,) = report.splits
    assert (split.name, split.num_rows, split.answer, split.prompt) == ("full", 20, None, split.total)
    assert says(report.notes[0], "the data has no column `a`: the prompts alone were checked")
    columns = {"q": [f"What is {n}?" for n in range(20)] * 2, "a": [f"{n} it is." for n in range(40)]}
    report = check_data(config, read(columns), encoder, context_length=1024)
    assert [(split.name, split.num_rows) for split in report.splits] == [("full", 40)]
    assert says(report.notes[0], "the data has no column `split`: it was checked as a whole")
    assert [finding.kind for finding in report.advice] == ["different_answers"]
    with refused("… no column `a`, which output_features", by=DataError):  # where something is trained
        check_data(make_config(), read({"q": ["a"]}), encoder, context_length=None)
    config = make_config(trainer={"type": "none"}, adapter=None, generation__max_new_tokens=40)
    prompts = ["x" * n for n in (10, 80, 59, 60, 70)]
    (finding,) = check_data(config, read({"q": prompts}), encoder, context_length=100).advice
    assert finding.kind == "no_room"
    what = "3 of 5 prompts (60.0%) are too long: … 100 tokens … leaves 60, the longest has 81"
    check_finding(finding, what, [1, 4, 3], fix="lower generation.max_new_tokens, or set … max_sequence_length: 60")


STATEMENTS = [f"we went to {place} on day {n} by {'train' if n % 2 else 'car'}" for n, place in enumerate(CAPITALS)]
VISITS = [f"{place} is where they went." for place in CAPITALS]
SAME = ["positive", "negative"] * 6


def test_prompts_with_a_constant_ending_or_an_end_of_their_own_are_separated(advice_on):
    for prompts in [
        [f"{text} =>" for text in STATEMENTS],
        [f"{text}\nAnswer" for text in STATEMENTS],
        [f"{text}?" if n % 2 else f"{text}." for n, text in enumerate(STATEMENTS)],
        [f"<user>{text}</user>" for text in STATEMENTS],
        [f"{text}。" for text in STATEMENTS],
    ]:
        assert advice_on(prompts, VISITS) == {}
    for start in ["\n", "\nAnswer: ", " -> ", "### "]:  # an answer may bring the separator
        assert "no_separator" not in advice_on(STATEMENTS, [start + answer for answer in VISITS])
    prompts = [f"{text}." for text in STATEMENTS * 2]
    prompts[5] = prompts[5].rstrip(".")  # a few odd prompts are no missing separator
    assert "no_separator" not in advice_on(prompts, [f"{answer} {n}" for n, answer in enumerate(VISITS * 2)])


def test_free_text_that_flows_into_the_answer(advice_on):
    missing = "12 of 12 rows (100.0%) have no separator"
    finding = advice_on(STATEMENTS, SAME)["no_separator"]
    fix = r'set prompt.template: "{q}\n\n### Answer:\n"'
    check_finding(finding, f"{missing} … in 12 not even a space stands between them", range(12), fix=fix)
    assert advice_on(STATEMENTS, SAME, prompt__template="{q}\n\n### Answer:\n") == {}  # which ends the advice
    assert "space" not in advice_on(STATEMENTS, [f" {answer}" for answer in SAME])["no_separator"].what
    assert "no_separator" in advice_on(STATEMENTS, [f"The {place} is it." for place in CAPITALS])  # a word is no sign
    finding = advice_on(STATEMENTS, SAME, prompt__template="Judge the mood of this text: {q}")["no_separator"]
    fix = r'end prompt.template with a line of its own, such as "\n\n### Answer:\n"'
    check_finding(finding, missing, range(12), fix=fix)


def test_a_prompt_that_ends_in_a_space_which_the_tokenizer_puts_into_words(tiny_base, make_config, advice_on):
    encoder = load_encoder(locate(str(tiny_base)))
    source = read({"q": STATEMENTS, "a": ["plus", "sum"] * 6, "split": [0] * 12})

    def advice(end):
        config = make_config(prompt__template=f"{{q}}\n{end}", preprocessing__split="fixed")
        return check_data(config, source, encoder, context_length=None).advice

    (finding,) = advice("Mood: ")
    assert says(finding.what, "12 of 12 prompts (100.0%) end in a space, a token of its own")
    assert says(finding.fix, "take the space off the end of prompt.template, and begin the answers with it")
    assert advice("Mood:") == advice("Mood:\n") == ()
    assert advice_on([f"{text}: " for text in STATEMENTS], SAME) == {}  # where a space is a token anyway


ANIMALS = ["cat", "dog", "cow", "fox", "owl", "bee", "ant", "elk", "emu", "hen"]
DESCRIBE = [f"Describe animal {n}.\n" for n in range(40)]
SENTENCES = [
    f"The {ANIMALS[n % 10]} lives in a house with {n} doors and comes out at night to eat{', and to sing' * (n % 4)}."
    for n in range(40)
]


def test_answers_that_stop_in_a_sentence_among_many_that_do_not_or_at_one_length(advice_on):
    cut = [text[:-9] if n in (3, 14, 15, 29) else text for n, text in enumerate(SENTENCES)]
    finding = advice_on(DESCRIBE, cut)["unfinished"]
    assert says(finding.what, "4 of 40 answers (10.0%) stop in a word or at a comma, where 90%")
    assert finding.rows.tolist() == [3, 14, 15, 29]
    assert says(finding.fix, "look at some; complete them, or take them out")
    loose = [text[:-1] if n in (5, 9) else text for n, text in enumerate(SENTENCES)]
    long = [0, 11, 12, 13, 21, 22, 23, 31]  # cut by a limit, although the style is loose
    for n in long:
        loose[n] = f"{loose[n]} " * 3 + f"And then the {ANIMALS[n % 10]} went to the w{'o' * (n % 7)}"
    assert advice_on(DESCRIBE, loose)["unfinished"].rows.tolist() == long
    long = [f"{text} " * (1 + n % 3) for n, text in enumerate(SENTENCES)]
    assert sum(len(text) > 150 for text in long) == 23
    finding = advice_on(DESCRIBE, [text[:150] for text in long])["unfinished"]
    assert says(finding.what, "23 of 40 answers (57.5%) have exactly 150 characters, and none has more")
    for answers in [["yes " * 20] * 20 + ["no! " * 20] * 20, ["1" * 64] * 40, [f"{n:060d}" for n in range(40)]]:
        assert "unfinished" not in advice_on(DESCRIBE, answers)


def test_what_has_no_full_stop_is_not_cut_for_that(advice_on):
    address = "See https://docs.python.org/3/"
    for answers in [
        SENTENCES,
        [f"{name} {n}" for n, name in enumerate(ANIMALS * 4)],
        [f"def f{n}(value):\n    return some_module.function_of_{ANIMALS[n % 10]}(value)[{n}].name" for n in range(40)],
        [f"{text}\n- cats\n- dogs\n- {n} cows" for n, text in enumerate(SENTENCES)],
        [f'He wrote that "{text}"' for text in SENTENCES],
        [text[:-1] if n % 5 == 0 else text for n, text in enumerate(SENTENCES)],  # as a matter of style
        [text[:-1] for text in SENTENCES],
        [f"{text} {address}{n}" if n in (3, 14, 15, 29) else text for n, text in enumerate(SENTENCES)],
        [text[:-9] if n in (3, 14) else text for n, text in enumerate(SENTENCES)],  # two are chance
    ]:
        assert advice_on(DESCRIBE, answers) == {}, answers[3]


def test_end_signs_in_the_text_are_told_by_what_they_do(make_config, encoder):
    answers = [f"{text}{'</s>' if n < 5 else '<|im_end|>' if n < 7 else ''}" for n, text in enumerate(SENTENCES)]
    answers[39] = f"Yes.</s>{answers[39]}"
    source = read({"q": DESCRIBE, "a": answers})
    advice = check_data(make_config(**ALL_TRAIN), source, encoder, context_length=None).advice
    for finding, (what, rows, fix) in zip(advice, [
        ("1 of 40 answers (2.5%) have the end-of-sequence token </s> inside", [39], "take </s> out of the answers"),
        ("5 of 40 answers (12.5%) end in </s> already", [0, 1, 2, 3, 4], "take </s> off the answers"),
        ("2 of 40 answers (5.0%) end in another model's end sign", [5, 6], "take the sign off the answers"),
    ], strict=True):  # fmt: skip
        assert says(finding.what, what)
        assert finding.rows.tolist() == rows
        assert says(finding.fix, fix)


WHAT_IS_SAID = [f"What is said in text {n}?" for n in range(12)]
SAYINGS = [f"It is said that {n} is a number of some kind." for n in range(12)]


def test_broken_characters_and_prompts_that_give_their_answer_away(advice_on):
    found = advice_on([*WHAT_IS_SAID, "cafÃ©?"], [*SAYINGS, "a caf\ufffd, not a bar."])
    assert set(found) == {"broken_characters"}
    check_finding(found["broken_characters"], "1 of 13 rows (7.7%) hold characters that nobody typed", [12])

    def quoting(rows):
        return [f"{SAYINGS[n]} {WHAT_IS_SAID[n]}" if n in rows else WHAT_IS_SAID[n] for n in range(12)]

    found = advice_on(quoting(range(1, 12)), SAYINGS)
    assert set(found) == {"answer_in_prompt"}
    check_finding(found["answer_in_prompt"], "11 of 12 rows (91.7%) have their answer in the prompt", range(1, 12))
    assert advice_on([f"Is text {n} positive or negative?" for n in range(12)], SAME) == {}
    assert advice_on(quoting(range(5)), SAYINGS) == {}
    broken = ["caf\ufffd", "cafÃ©", "itâ€™s", "â€œquotedâ€\x9d", "20Â°C", "fÃ¼r", "a\x00b"]
    broken += ["\x08b", "\x7f", "donâ€\u02dct"]
    whole = ["", "plain", "café", "it’s “quoted”", "20°C", "für", "NÃO", "SÃO PAULO", "Âge", "château", "5 €", "–—…"]
    whole += ["naïve – yes", "a\tb\r\nc\x0c", "\x1b[31mred\x1b[0m", "日本語", "Ελληνικά", "🙂\u200d"]
    assert are_broken(broken).tolist() == [True] * len(broken)
    assert not are_broken(whole).any()
    letters = [chr(code) for code in range(0xA0, 0x100)]  # of Latin-1, as UTF-8 read with the wrong encoding
    assert are_broken([letter.encode().decode("cp1252", errors="replace") for letter in letters]).all()
    assert not are_broken([f"a{letter}b" for letter in letters]).any()


TEMPLATE = Path(__file__).parent / "chat_templates" / "chatml.jinja"


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def checked(rows, encoder, *, context_length=None, **keys):
    settings = {"base_model": "base", "trainer": {"type": "finetune"}, "chat": {"template": str(TEMPLATE)}}
    split = {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}}
    config = Config.model_validate({**settings, "preprocessing": split, **keys})
    return check_data(config, read({"messages": rows}), encoder, context_length=context_length)


def test_conversations_repeat_as_prompts_and_answers_do_and_their_template_separates_and_ends(encoder):
    rows = [conversation(f"how many legs have {n} cats", f"{4 * n} legs") for n in range(40)]
    assert checked(rows, encoder).advice == ()
    found = checked([*rows, rows[6], conversation("how many legs have 9 cats", "many")], encoder).advice
    assert [(each.kind, each.rows.tolist()) for each in found] == [("different_answers", [9, 41]), ("duplicates", [40])]


def test_what_is_to_be_predicted_is_checked_where_nothing_is_trained(encoder):
    asked, answered = conversation("q", "a")[:1], conversation("q", "a")
    for rows, said in [([asked, answered, asked], "2 of the 3 rows do not end with an answer"), ([answered] * 3, None)]:
        report = checked(rows, encoder, trainer={"type": "none"})
        notes = [note for note in report.notes if "as for predict" in note]
        assert notes == ([f"{said}: the prompts alone were checked, as for predict"] if said else [])
        assert sum(split.num_rows for split in report.splits) == 3
        assert (report.splits[0].num_supervised_tokens == 0) == (said is not None)
    dropping = {"trainer": {"type": "none"}, "preprocessing": {"on_bad_row": "drop"}}
    assert len(checked([asked, "no conversation"], encoder, **dropping).events) == 1
    with pytest.raises(DataError, match="the last turn, 3, is of the role user"):
        checked([[*answered, *asked]], encoder)


def test_the_prompt_of_a_conversation_is_all_before_its_last_answer(encoder):
    turns = [*conversation("one", "eins"), *conversation("two", "zwei")]
    generation = {"trainer": {"type": "none"}, "generation": {"max_new_tokens": 20}}
    report = checked([turns], encoder, **generation)
    (split,) = (each for each in report.splits if each.num_rows)
    answer = len("zwei<|im_end|>\n")
    assert (split.prompt.max, split.answer.max) == (split.total.max - answer, answer)
    for room, told in [(19, [("no_room", "lower generation.max_new_tokens")]), (20, [])]:
        report = checked([turns], encoder, context_length=split.prompt.max + room, **generation)
        assert [(finding.kind, finding.fix) for finding in report.advice] == told
