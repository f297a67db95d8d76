"""Tokenizers, the tokens of rows and labels, their tables, their order, and their tensors."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.data.conftest import EOS, load
from tests.messages import refused

from brim.config import load_config
from brim.data.tokens import (
    Limit,
    Limits,
    TokenRow,
    TokenRows,
    collate,
    collate_prompts,
    label_room,
    label_tokens,
    load_encoder,
    random_order,
    rows_of_step,
)
from brim.data.tokens.tokenization import cut
from brim.errors import ModelError
from brim.models.folders import locate

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def test_a_prompt_begins_as_the_tokenizer_begins_an_answer_does_not_and_text_comes_back(encoder):
    assert encoder.encode(["a", ""], special_tokens=True) == [[0, ord("a") - 30], [0]]
    assert encoder.encode(["a", ""], special_tokens=False) == [[ord("a") - 30], []]
    assert (encoder.bos_id, encoder.eos_id, encoder.pad_id) == (0, 1, 2)
    assert (encoder.count_special("a</s>b<s><s>"), encoder.count_special("a < s > b")) == (3, 0)
    text = "Ünï\n two  spaces."
    (ids,) = encoder.encode([text], special_tokens=True)
    assert encoder.decode([*ids, 1], skip_special_tokens=True) == text
    assert encoder.decode([*ids, 1], skip_special_tokens=False) == f"<s>{text}</s>"
    texts = [str(number) for number in range(3000)]
    encoded = encoder.encode(texts, special_tokens=False)
    assert [encoder.decode(ids, skip_special_tokens=True) for ids in encoded] == texts


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_prompts_are_those_of_transformers_without_the_end(make_folder, flags):
    from transformers import AutoTokenizer

    tokenizer_class = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for template in [None, "<s> $A", "<s> $A </s>", "$A </s>", "<s> <s> $A"]:
        folder = make_folder(template=template, tokenizer_config={**NAMED, **flags, **tokenizer_class})
        theirs = AutoTokenizer.from_pretrained(folder)("one two")["input_ids"]
        if theirs[-1] == 1:
            theirs = theirs[:-1]
        assert load(folder).encode(["one two"], special_tokens=True) == [theirs]


def test_eos_is_found_in_any_of_the_files_and_limits_of_tokenizer_json_are_lifted(make_folder):
    for files in [
        {"tokenizer_config": {"eos_token": "</s>"}},
        {"tokenizer_config": {"eos_token": {"content": "</s>", "special": True}}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "</s>"}}},
        {"tokenizer_config": {"eos_token": "<unknown>"}, "generation_config": {"eos_token_id": [1, 2]}},
        {"tokenizer_config": {}, "config": {"model_type": "llama", "eos_token_id": 1}},
    ]:
        encoder = load(make_folder(**files))
        assert (encoder.eos_id, encoder.pad_id) == (1, 1)
    path = make_folder() / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fixed = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] = {**fixed, "pad_id": 2, "pad_type_id": 0, "pad_token": "<pad>"}
    path.write_text(json.dumps(content))
    assert [len(ids) for ids in load(path.parent).encode(["abcdefghijkl", "a"], special_tokens=True)] == [13, 2]


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


def test_a_tokenizer_that_cannot_be_used_is_told(make_folder, tmp_path):
    with refused('… names no end-of-sequence token … add e.g. "eos_token": "</s>"', by=ModelError):
        load(make_folder(tokenizer_config={"bos_token": "<s>"}))
    for number in (10**30, -1, True, "1"):
        with refused("… names no end-of-sequence token"):
            load(make_folder(tokenizer_config={}, config={"model_type": "llama", "eos_token_id": number}))
    for token in (3, {"content": 3}):
        with refused("… eos_token in tokenizer_config.json or … is not a token"):
            load(make_folder(tokenizer_config={"eos_token": token}))
    folder = make_folder()
    (folder / "tokenizer_config.json").write_text("{")
    with refused("… tokenizer_config.json cannot be read: "):
        load(folder)
    shutil.copy(make_folder() / "config.json", tmp_path)
    (tmp_path / "tokenizer.model").write_text("no model")
    with refused("… transformers cannot read the tokenizer: "):
        load(tmp_path)
    folder = make_folder(tokenizer_config=NAMED)  # one that breaks at its first text
    content = json.loads((folder / "tokenizer.json").read_text())
    content |= {"model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "nope"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with refused("… tokenizer.json: the tokenizer cannot be read: "):
        load(folder)


def test_a_tokenizers_own_code_runs_only_where_it_is_trusted_and_nobody_is_asked(monkeypatch, tmp_path):
    folder, trace = tmp_path / "base", tmp_path / "ran"  # which the code leaves behind when it runs
    folder.mkdir()
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    for name, content in [("config.json", {"model_type": "own"}), ("tokenizer_config.json", own)]:
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenization_own.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Own: pass\n")
    (folder / "vocab.txt").write_text("a\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    words = "the base model asks for its own code to be run (auto_map in tokenizer_config.json)"
    with refused(f"{folder / 'tokenizer_config.json'}: {words}", by=ModelError):
        load(folder)
    assert not trace.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ModelError):  # it runs, and is no tokenizer
        load_encoder(locate(str(folder), initialize="random", trust_remote_code=True), trust_remote_code=True)
    assert trace.exists()


def test_tokens_that_the_model_does_not_have(make_folder):
    def folder(vocab_size):
        return make_folder(tokenizer_config=NAMED, config={"model_type": "llama", "vocab_size": vocab_size})

    few = folder(5)
    encoder = load(few)
    with refused(f"{few / 'tokenizer.json'}: … makes the token … the base model has only tokens 0 to 4", by=ModelError):
        encoder.encode(["hello"], special_tokens=False)
    with refused("… the end-of-sequence token is 1, and the base model has only tokens 0 to 0"):
        load(folder(1))
    encoder = load(folder(2))  # padding is the end instead
    assert (encoder.eos_id, encoder.pad_id) == (1, 1)


limits = st.none() | st.integers(1, 12)


@given(st.integers(0, 10), st.none() | st.integers(0, 10), limits, limits, limits)
def test_the_first_tokens_of_parts_and_whole_are_kept_and_cuts_told(prompt, answer, of_prompt, of_answer, joined):
    parts = {"prompt": of_prompt, "answer": of_answer, "joined": joined}
    limits = Limits(**{name: Limit(num_tokens=n, why=f"of {name}") for name, n in parts.items() if n is not None})
    ids = [5] * prompt, None if answer is None else [7] * answer
    row, cuts = cut(3, *ids, eos_id=EOS, limits=limits, split_of=lambda key: f"split of {key}")
    kept_prompt = min(prompt, of_prompt or prompt)
    # Without an answer there is no target and no end; an answer that is cut ends all the same.
    expected = [5] * kept_prompt + ([] if answer is None else [7] * min(answer, of_answer or answer) + [EOS])
    assert (row.key, row.input_ids.tolist()) == (3, expected[: joined or len(expected)])
    assert row.supervised.tolist() == (np.arange(len(row.input_ids)) >= kept_prompt).tolist()
    lengths = {"prompt": prompt, "answer": answer or 0, "joined": len(expected)}
    assert [(each.event, each.split, each.why, each.tokens_before) for each in cuts] == [
        (f"cut_{name}", "split of 3", f"of {name}", length)
        for name, length in lengths.items()
        if parts[name] is not None and length > parts[name]
    ]


def token_row(key, ids, supervised):
    return TokenRow(key=key, input_ids=np.asarray(ids, np.int32), supervised=np.asarray(supervised, np.bool_))


@st.composite
def any_rows(draw):
    rows = draw(st.lists(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=9), max_size=12))
    return [token_row(key * 3, [n for n, _ in row], [mark for _, mark in row]) for key, row in enumerate(rows)]


def as_tuples(rows):
    return [(each.key, each.input_ids.tolist(), each.supervised.tolist()) for each in rows]


@given(rows=any_rows(), cut=st.integers(0, 12), data=st.data())
def test_rows_and_their_figures_survive_any_chunking_and_order(rows, cut, data):
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    taken = TokenRows.from_blocks([rows[:cut], rows[cut:]]).take(indices)
    expected = [rows[index] for index in indices]
    assert as_tuples(taken) == as_tuples(expected)
    assert taken.keys.tolist() == [each.key for each in expected]
    assert taken.lengths.tolist() == [len(each.input_ids) for each in expected]
    assert taken.num_supervised.tolist() == [each.num_supervised for each in expected]
    assert taken.num_supervised.tolist() == [sum(each.supervised.tolist()[1:]) for each in expected]
    assert taken.num_prompt_tokens.tolist() == [each.num_prompt_tokens for each in expected]
    assert as_tuples(taken.prompts()) == as_tuples(each.prompt() for each in expected)


@given(st.integers(1, 60), st.integers(0, 2**32), st.lists(st.integers(1, 25), min_size=1, max_size=40))
def test_each_epoch_holds_every_row_once_in_one_order_and_no_batch_crosses_its_end(num_rows, seed, sizes):
    consumed, epochs = 0, {}
    for size in sizes:
        epoch, rows = rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=consumed, size=size)
        assert 1 <= len(rows) <= size
        assert epoch == consumed // num_rows == (consumed + len(rows) - 1) // num_rows
        epochs.setdefault(epoch, []).extend(rows.tolist())
        consumed += len(rows)
    for epoch, rows in epochs.items():
        whole = rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=epoch * num_rows, size=num_rows)[1].tolist()
        assert sorted(whole) == list(range(num_rows))
        assert rows == whole[: len(rows)]  # however it was consumed
        assert epoch == max(epochs) or len(rows) == num_rows


def test_the_order_is_a_permutation_that_is_the_same_on_every_machine():
    assert rows_of_step(num_rows=8, seed=42, consumed_samples=0, size=8)[1].tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert rows_of_step(num_rows=8, seed=42, consumed_samples=8, size=8)[1].tolist() == [1, 2, 5, 3, 6, 0, 4, 7]
    assert random_order(1000, 3, 5).tolist() != random_order(1000, 5, 3).tolist()
    # A shuffle that left most rows near their place would still be a permutation.
    assert 300 < np.abs(random_order(1000, 1) - np.arange(1000)).mean() < 370


def positions(ids, num_prompt):
    return token_row(0, ids, np.arange(len(ids)) >= num_prompt)


def test_rows_are_padded_on_the_right_and_learned_by_position_prompts_on_the_left():
    pad_and_eos = 1
    batch = collate([positions([5, 6, 7, pad_and_eos], 2), positions([8, pad_and_eos], 1)], pad_id=pad_and_eos)
    assert batch.input_ids.dtype == batch.targets.dtype == batch.logit_positions.dtype == torch.int64
    assert batch.input_ids.tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert batch.targets.tolist() == [7, 1, 1]
    assert batch.target_rows.tolist() == [0, 0, 1]
    assert batch.num_logits == 4
    assert batch.logit_positions.tolist() == [1, 2, 4]
    batch = collate([positions([5, 6, 7, 8, 9], 3), positions([5, 6, 7, 8], 3)], pad_id=1)
    assert batch.num_logits == 3  # positions 2, 3 and 4 predict the tokens 3 and 4, and nothing
    assert batch.targets.tolist() == [8, 9, 8]
    assert batch.logit_positions.tolist() == [0, 1, 3]
    assert collate([], pad_id=0).input_ids.shape == collate_prompts([], pad_id=0).input_ids.shape == (0, 0)
    batch = collate_prompts([positions([5, 6, 7, 1], 3), positions([8, 1], 1), positions([9], 0)], pad_id=1)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 1, 1]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]


LABELS = ("positive", "negative", "very positive", "1", "ñandú", "好")
TEXTS = ["It was positive: a very positive day.", "negative. The label is negative, 1 of 2"] * 20


@pytest.fixture(scope="module", params=["words with a space", "a space before every text"])
def tokenizer(request, tiny_base, tmp_path_factory):
    """Of words with the space before them, as in GPT-2, or with a space put before every text, as in Llama 2."""
    if request.param == "words with a space":
        return load_encoder(locate(str(tiny_base)))
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["</s>", "<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    settings = {"vocab_size": 500, "special_tokens": special, "max_token_length": 9, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(**settings))
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    # Bytes are written as such, although the trainer took them for special tokens.
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load(folder)


def test_tokens_are_those_of_the_label_behind_a_prompt_and_read_as_the_label(tokenizer):
    made = label_tokens(LABELS, tokenizer)
    assert tuple(made) == LABELS
    for label, forms in made.items():
        assert len(forms) == len(set(forms)) == 2
        assert {tokenizer.decode(form, skip_special_tokens=True).strip() for form in forms} == {label}
        for prompt, space in [("ASSISTANT:", " "), ("the label is\n", ""), ("the label (", "")]:
            before, whole = tokenizer.encode([prompt, prompt + space + label], special_tokens=False)
            assert whole[: len(before)] == before
            assert tuple(whole[len(before) :]) in forms
    end = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    with refused(f"… the base model's tokenizer cannot write the label '{end}'"):
        label_tokens(["positive", end], tokenizer)


@pytest.mark.parametrize("is_constrained", [True, False])
def test_room_for_the_longest_label_and_its_end(tokenizer, is_constrained):
    rules = {label: {"type": "contains", "value": label} for label in ("very positive", "1")}
    decoder = {"match": rules, "constrain_to_vocabulary": is_constrained}
    feature = {"name": "a", "type": "category", "preprocessing": {"fallback_label": "1"}, "decoder": decoder}
    config = load_config({"base_model": "base", "output_features": [feature]}).config
    longest = max(map(len, label_tokens(["very positive"], tokenizer)["very positive"]))
    assert label_room(config, tokenizer) == (longest + 1 if is_constrained else None)


def test_rows_of_several_tables_travel_as_bytes_in_their_order_and_under_their_keys():
    ids = np.arange(40, dtype=np.int32)
    rows = [TokenRow(key=key, input_ids=ids[: 1 + key % 5], supervised=ids[: 1 + key % 5] % 3 == 0) for key in range(9)]
    every = TokenRows.from_blocks([rows[:4], [], rows[4:5], rows[5:]])
    mixed = every.take([7, 0, 4, 4, 8, 1])
    renamed = mixed.with_keys(np.arange(20, 26, dtype=np.uint64))
    for sent in (every, mixed, renamed, every.take([])):
        there = TokenRows.of_bytes(sent.to_bytes())
        assert [row.key for row in there] == sent.keys.tolist()
        for found, row in zip(there, sent, strict=True):
            assert found.input_ids.tolist() == row.input_ids.tolist()
            assert found.supervised.tolist() == row.supervised.tolist()
