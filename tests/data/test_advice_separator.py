"""Whether the model can tell where the prompt ends."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from brim.data import check_data
from brim.data.advice.boundaries import ConstantEdges, constant_edges
from brim.data.read import read
from brim.data.tokens import load_encoder
from brim.models import locate

PLACES = ["Paris", "Rome", "Lima", "Oslo", "Cairo", "Quito", "Riga", "Bern", "Doha", "Kyiv", "Suva", "Baku"]
STATEMENTS = [f"we went to {place} on day {n} by {'train' if n % 2 else 'car'}" for n, place in enumerate(PLACES)]
ANSWERS = [f"{place} is where they went." for place in PLACES]
SAME = ["positive", "negative"] * 6


@pytest.mark.parametrize(
    "prompts",
    [
        [f"{text}\n### Answer:\n" for text in STATEMENTS],
        [f"{text} =>" for text in STATEMENTS],
        [f"{text}\nAnswer" for text in STATEMENTS],
        [f"{text}?" if n % 2 else f"{text}." for n, text in enumerate(STATEMENTS)],
        [f"<user>{text}</user>" for text in STATEMENTS],
        [f"{text}。" for text in STATEMENTS],
    ],
    ids=["heading", "arrow", "a constant word", "sentences", "tags", "another script"],
)
def test_prompts_with_a_constant_ending_or_an_end_of_their_own_are_separated(advice_on, prompts):
    assert advice_on(prompts, ANSWERS) == {}


@pytest.mark.parametrize("start", ["\n", "\nAnswer: ", " -> ", "### "])
def test_an_answer_may_bring_the_separator(advice_on, start):
    assert "no_separator" not in advice_on(STATEMENTS, [start + answer for answer in ANSWERS])


def test_free_text_that_flows_into_the_answer(advice_on):
    finding = advice_on(STATEMENTS, SAME)["no_separator"]
    assert finding.what == (
        "12 of 12 rows (100.0%) have no separator: the prompt ends in a word, and the answer goes on; "
        "in 12 not even a space stands between them"
    )
    assert finding.rows.tolist() == list(range(12))
    assert finding.fix == r'set prompt.template: "{q}\n\n### Answer:\n"'


def test_a_space_is_no_separator(advice_on):
    finding = advice_on(STATEMENTS, [f" {answer}" for answer in SAME])["no_separator"]
    assert finding.what == (
        "12 of 12 rows (100.0%) have no separator: the prompt ends in a word, and the answer goes on"
    )


def test_a_template_that_ends_in_a_column(advice_on):
    finding = advice_on(STATEMENTS, SAME, prompt__template="Judge the mood of this text: {q}")["no_separator"]
    assert finding.fix == r'end prompt.template with a line of its own, such as "\n\n### Answer:\n"'


def test_the_fix_ends_the_advice(advice_on):
    assert advice_on(STATEMENTS, SAME, prompt__template="{q}\n\n### Answer:\n") == {}


def test_a_few_odd_prompts_are_no_missing_separator(advice_on):
    prompts = [f"{text}." for text in STATEMENTS * 2]
    prompts[5] = prompts[5].rstrip(".")
    answers = [f"{answer} {n}" for n, answer in enumerate(ANSWERS * 2)]
    assert "no_separator" not in advice_on(prompts, answers)


@pytest.mark.parametrize(("end", "is_told"), [("Mood: ", True), ("Mood:", False), ("Mood:\n", False)])
def test_a_prompt_that_ends_in_a_space_which_the_tokenizer_puts_into_words(tmp_path, make_config, end, is_told):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" positive negative"] * 9, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    encoder = load_encoder(locate(str(tmp_path), initialize="random"))
    source = read({"q": STATEMENTS, "a": SAME, "split": [0] * 12})
    config = make_config(prompt__template=f"{{q}}\n{end}", preprocessing__split="fixed")
    advice = check_data(config, source, encoder, context_length=None).advice
    if is_told:
        assert [finding.what for finding in advice] == ["12 of 12 prompts (100.0%) end in a space, a token of its own"]
        assert advice[0].fix == "take the space off the end of prompt.template, and begin the answers with it"
    else:
        assert advice == ()


def test_a_space_that_is_a_token_anyway_is_no_trap(advice_on):
    assert advice_on([f"{text}: " for text in STATEMENTS], SAME) == {}


def test_edges_are_the_longest_that_nearly_all_share():
    prompts = [f"{n} things. Answer:" for n in range(9)] + ["odd"]
    assert constant_edges(prompts, ["\n- a"] * 10) == ConstantEdges(
        prompt_end="ings. Answer:"[-12:], answer_start="\n- a"
    )
    assert constant_edges([*prompts, "odder"], []) == ConstantEdges()
    assert constant_edges([], []) == ConstantEdges()
    assert constant_edges(["a x", "b x"], ["The end", "The cat"]) == ConstantEdges(prompt_end=" x")
