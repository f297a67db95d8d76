"""What the data tests share: a tokenizer whose tokens are bytes, so that lengths can be counted by hand."""

import json
from pathlib import Path

import pytest

from brim.config.schema import Config
from brim.data import check_data, prepare, prompter
from brim.data.read import Source, read
from brim.data.tokens import load_encoder
from brim.models.folders import locate

BOS, EOS = 0, 1
CHAT_TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
ALL_TRAIN = {  # changes of make_config
    "preprocessing__split__type": "random",
    "preprocessing__split__probabilities": [1.0, 0.0, 0.0],
}


def ids(text):
    """Return the tokens of a text of ASCII."""
    return [ord(character) - 30 for character in text]


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(folder):
    return load_encoder(locate(str(folder), initialize="random"))


def texts_of(config, source):
    """Return prompt and answer of each row that can be used."""
    asked = prompter(config, source, with_answers=True)
    batches = list(asked.texts(asked.source.usable_rows()))
    return [pair for batch in batches for pair in zip(batch.prompts, batch.answers, strict=True)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.delenv("BRIM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "brim"


def write_tokenizer_folder(folder, *, template="<s> $A", **files):
    """A base model's folder without weights: byte tokens, <s> </s> <pad> as 0, 1, 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<s>", "</s>", "<pad>"], **settings))
    if template is not None:
        special = [("<s>", BOS), ("</s>", EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    for name, content in {"config": {"model_type": "llama"}, "tokenizer_config": named, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """Bytes as tokens; a prompt begins with <s>."""
    return load(write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    return lambda **settings: write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), **settings)


@pytest.fixture(scope="session")
def make_config():
    """A configuration over the columns `q` and `a`; dotted changes with __ for the dot, input__ and output__ short."""

    def make(**changes):
        question, answer = ({"name": name, "type": "text", "preprocessing": {}} for name in "qa")
        data = {"base_model": "base", "trainer": {"type": "finetune"}, "adapter": "lora"}
        data |= {"input_features": [question], "output_features": [answer]}
        starts = {"input": question, "output": answer}
        for path, value in changes.items():
            *sections, last = path.split("__")
            section = data
            for name in sections:
                section = starts[name] if section is data and name in starts else section.setdefault(name, {})
            section[last] = value
        return Config.model_validate(data)

    return make


@pytest.fixture(scope="session")
def prepared(encoder, make_config):
    """prepared(data, …): all of its rows to train on, by a configuration with these changes."""

    def run(data, *, context_length=None, only=None, **changes):
        source = data if isinstance(data, Source) else read(data)
        config = make_config(**{**ALL_TRAIN, **changes})
        return prepare(source, config, encoder, context_length=context_length, only=only)

    return run


@pytest.fixture(scope="session")
def advice_on(encoder, make_config):
    """advice_on(questions, answers, …): the findings of `brim check` by kind. split: of each row; train by default."""

    def advise(prompts, answers, *, split=None, **changes):
        columns = {"q": prompts, "a": answers, "split": split or [0] * len(prompts)}
        config = make_config(preprocessing__split="fixed", **changes)
        report = check_data(config, read(columns), encoder, context_length=None)
        return {finding.kind: finding for finding in report.advice}

    return advise
