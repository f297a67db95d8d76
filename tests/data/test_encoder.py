"""The tokenizer of a base model's folder, without transformers, does what transformers would do."""

import json
import shutil

import pytest

from brim.data.tokens import load_encoder
from brim.errors import ModelError
from brim.models import locate

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def load(folder):
    return load_encoder(locate(str(folder), initialize="random"))


def test_a_prompt_begins_as_the_tokenizer_begins_and_an_answer_does_not(encoder):
    assert encoder.encode(["a", ""], special_tokens=True) == [[0, ord("a") - 30], [0]]
    assert encoder.encode(["a", ""], special_tokens=False) == [[ord("a") - 30], []]
    assert encoder.encode([], special_tokens=True) == []
    assert (encoder.bos_id, encoder.eos_id, encoder.pad_id) == (0, 1, 2)


def test_text_comes_back(encoder):
    text = "Ünï\n two  spaces."
    (ids,) = encoder.encode([text], special_tokens=True)
    assert encoder.decode([*ids, 1], skip_special_tokens=True) == text
    assert encoder.decode([*ids, 1], skip_special_tokens=False) == f"<s>{text}</s>"


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>", "$A </s>", "<s> <s> $A"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_prompts_are_those_of_transformers_without_the_end(make_folder, template, flags):
    from transformers import AutoTokenizer

    tokenizer_class = {"tokenizer_class": "PreTrainedTokenizerFast"}
    folder = make_folder(template=template, tokenizer_config={**NAMED, **flags, **tokenizer_class})
    theirs = AutoTokenizer.from_pretrained(folder)("one two")["input_ids"]
    if theirs[-1] == 1:
        theirs = theirs[:-1]
    assert load(folder).encode(["one two"], special_tokens=True) == [theirs]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "</s>"}},
        {"tokenizer_config": {"eos_token": {"content": "</s>", "special": True}}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": "</s>"}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "</s>"}}},
        {"tokenizer_config": {"eos_token": "<unknown>"}, "generation_config": {"eos_token_id": 1}},
        {"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": [1, 2]}},
        {"tokenizer_config": {}, "config": {"model_type": "llama", "eos_token_id": 1}},
    ],
)
def test_eos_is_found_in_any_of_the_files_and_stands_in_for_padding(make_folder, files):
    encoder = load(make_folder(**files))
    assert (encoder.eos_id, encoder.pad_id) == (1, 1)


def test_limits_within_tokenizer_json_are_lifted(make_folder):
    folder = make_folder()
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert [len(ids) for ids in load(folder).encode(["abcdefghijkl", "a"], special_tokens=True)] == [13, 2]


def test_special_tokens_in_text_are_counted(encoder):
    assert encoder.count_special("a</s>b<s><s>") == 3
    assert encoder.count_special("a < s > b") == 0


def test_many_texts_are_encoded_in_order(encoder):
    texts = [str(number) for number in range(3000)]
    encoded = encoder.encode(texts, special_tokens=False)
    assert [encoder.decode(ids, skip_special_tokens=True) for ids in encoded] == texts


def test_a_tokenizer_without_eos_is_an_error(make_folder):
    with pytest.raises(ModelError, match="the tokenizer names no end-of-sequence token") as caught:
        load(make_folder(tokenizer_config={"bos_token": "<s>"}))
    assert caught.value.problems[0].fix == (
        'add e.g. "eos_token": "</s>" to tokenizer_config.json, or set eos_token_id in config.json'
    )


def test_a_damaged_tokenizer_is_an_error(make_folder):
    folder = make_folder()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer cannot be read: "):
        load(folder)
    folder = make_folder()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read: "):
        load(folder)


def test_without_tokenizer_json_transformers_reads_the_tokenizer(make_folder, tmp_path):
    whole = make_folder(template=None)
    model = json.loads((whole / "tokenizer.json").read_text())["model"]
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", **NAMED, "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    old, new = load(tmp_path), load(whole)
    assert (old.bos_id, old.eos_id, old.pad_id) == (0, 1, 2)
    for texts in ([], ["one two", "", "</s>x"]):
        assert old.encode(texts, special_tokens=True) == new.encode(texts, special_tokens=True)
        assert old.encode(texts, special_tokens=False) == new.encode(texts, special_tokens=False)
    assert old.decode([1, 70], skip_special_tokens=False) == new.decode([1, 70], skip_special_tokens=False)
    assert old.count_special("</s><pad>") == 2


def test_a_tokenizer_that_transformers_cannot_read_is_an_error(make_folder, tmp_path):
    shutil.copy(make_folder() / "config.json", tmp_path)
    (tmp_path / "tokenizer.model").write_text("no model")
    with pytest.raises(ModelError, match="transformers cannot read the tokenizer: "):
        load(tmp_path)


@pytest.fixture
def with_code(tmp_path):
    """A folder whose tokenizer is its own Python code, and the file that this code leaves behind when it runs."""
    trace = tmp_path / "ran"
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "own"}')
    (folder / "vocab.txt").write_text("a\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}})
    )
    (folder / "tokenization_own.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Own: pass\n")
    return folder, trace


def test_a_tokenizers_own_code_is_not_run_and_nobody_is_asked(with_code, monkeypatch):
    folder, trace = with_code
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError) as caught:
        load(folder)
    (problem,) = caught.value.problems
    assert problem.what == "the base model asks for its own code to be run (auto_map in tokenizer_config.json)"
    assert problem.where == str(folder / "tokenizer_config.json")
    assert not trace.exists()


def test_a_tokenizers_own_code_runs_where_it_is_trusted(with_code, monkeypatch, tmp_path):
    folder, trace = with_code
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ModelError):  # it runs, and is no tokenizer
        load_encoder(locate(str(folder), initialize="random", trust_remote_code=True), trust_remote_code=True)
    assert trace.exists()


def test_tokens_that_the_model_does_not_have(make_folder):
    folder = make_folder(tokenizer_config=NAMED, config={"model_type": "llama", "vocab_size": 5})
    encoder = load(folder)
    assert encoder.encode([""], special_tokens=False) == [[]]
    with pytest.raises(ModelError, match=r"makes the token \d+, and the base model has only tokens 0 to 4") as caught:
        encoder.encode(["hello"], special_tokens=False)
    assert caught.value.problems[0].where == str(folder / "tokenizer.json")


def test_an_end_that_the_model_does_not_have(make_folder):
    with pytest.raises(ModelError, match="the end-of-sequence token is 1, and the base model has only tokens 0 to 0"):
        load(make_folder(tokenizer_config=NAMED, config={"model_type": "llama", "vocab_size": 1}))


def test_padding_that_the_model_does_not_have_is_the_end_instead(make_folder):
    encoder = load(make_folder(tokenizer_config=NAMED, config={"model_type": "llama", "vocab_size": 2}))
    assert (encoder.eos_id, encoder.pad_id) == (1, 1)


@pytest.mark.parametrize("token", [3, [], {"content": 3}, {"text": "x"}, True])
def test_special_tokens_that_are_none(make_folder, token):
    folder = make_folder(tokenizer_config={"eos_token": token or ["x"]})
    with pytest.raises(ModelError, match=r"eos_token in tokenizer_config\.json or .* is no token"):
        load(folder)


@pytest.mark.parametrize("number", [10**30, -1, True, "1"])
def test_numbers_of_tokens_that_are_none(make_folder, number):
    with pytest.raises(ModelError, match="names no end-of-sequence token"):
        load(make_folder(tokenizer_config={}, config={"model_type": "llama", "eos_token_id": number}))


def test_a_tokenizer_that_breaks_at_its_first_text(make_folder):
    folder = make_folder(tokenizer_config=NAMED)
    content = json.loads((folder / "tokenizer.json").read_text())
    content |= {"model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "nope"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer cannot be read: "):
        load(folder)
