"""The table of mistakes: what a user types, in which project, and the decisive words of the answer.

    python -m faults --only mistakes

The suite runs it, too, in a process of its own (`tests/faults/test_bad_input.py`). Each command ends with exit code 2
and one message, and changes nothing. It is run in the workshop's project: config.yaml, rows.jsonl, base/ and run/, a
finished run of two steps.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from faults import Settings, Trial
from faults.bad_input import BadInput, Edit
from faults.cases import spread
from faults.inputs import trial
from faults.workshop import build

ROW = "mistakes"
NUM_SHORT = 3


def run(campaign: Settings) -> Iterator[Trial]:
    """Every mistake."""
    project = campaign.folder / "project"
    project.mkdir()
    build(project, campaign.brim)
    num_trials = NUM_SHORT if campaign.short else len(MISTAKES)
    for number, place in enumerate(spread(len(MISTAKES), num_trials, seed=campaign.seed)):
        if campaign.is_mine(number):
            yield trial(MISTAKES[place], "check", campaign.brim, project, campaign.folder / "copy")


def _mistake(command: str, *words: str, edits: tuple[Edit, ...] = (), about: str = "") -> BadInput:
    """One line of the table. about: what the edits make of the project."""
    name = f"{command} ({about})" if about else command
    return BadInput(row=ROW, name=name, edits=edits, words=words, arguments=tuple(shlex.split(command)))


def _file(name: str, content: str | bytes) -> Edit:
    return Edit(path=name, content=content.encode() if isinstance(content, str) else content)


def _change(path: str, old: str, new: str) -> Edit:
    return Edit(path=path, how="change", old=old.encode(), content=new.encode())


def _gone(path: str) -> Edit:
    return Edit(path=path, how="remove")


TRAIN = "train config.yaml --dataset rows.jsonl --output-directory new"
CHECK = "check config.yaml --dataset"
EVALUATE = "evaluate run --dataset rows.jsonl"
PREDICT = "predict run --dataset rows.jsonl --output"

# An option that a verb has not, and what is said to write instead.
FLAGS = {
    "train config.yaml --epochs=1": "write trainer.epochs=1",
    "train config.yaml --epochs 1": "write trainer.epochs=1",
    "train config.yaml --learning-rate 1e-4": "write trainer.learning_rate=0.0001",
    "train config.yaml --lora_r 16": "write adapter.r=16",  # the file has an adapter
    "train --lora_r 16": "write adapter.r=16 and adapter.type=lora",
    "train config.yaml --trainer.epochs=3": "write trainer.epochs=3",
    "train config.yaml -trainer.epochs=3": "write trainer.epochs=3",
    "train --fp16 config.yaml": "write precision=fp16-mixed (left out, brim takes it where the GPU has no bfloat16)",
    "train config.yaml --precision bf17": "the key is precision: auto, fp32, bf16-true, bf16-mixed or fp16-mixed",
    "predict config.yaml --max-new-tokens 64": "write generation.max_new_tokens=64",
    "train --config config.yaml": "give it without a flag: brim train config.yaml",
    "train config.yaml --output_directory out": "did you mean --output-directory?",
    "train config.yaml --output out": "did you mean --output-directory?",
    "train config.yaml --datset x.csv": "did you mean --dataset?",
    "check config.yaml --seeds 3": "remove it: it belongs to brim compare",
    "check config.yaml --nonsense 3": (
        "`brim check --help` lists its options; keys of the configuration are written as trainer.epochs=1"
    ),
    "train -h": "write --help",
}
# Any other mistake on the command line, what is said of it, and how it is done.
USAGE = {
    "train": ("brim train needs CONFIG_OR_RUN", "A YAML file, or the folder of a run or of a base model"),
    "upload run": ("brim upload needs ORG/NAME", "The repository"),
    "export run": ("brim export needs --output DIR", "A new or an empty folder"),
    "train config.yaml --dataset": ("--dataset has no value", "--dataset FILE: csv"),
    "train config.yaml --resume=true": ("--resume takes no value", "write --resume alone"),
    "check config.yaml --show x": ("--show is 'x'", "a whole number of at least 0"),
    "check config.yaml --show=-1": ("--show is '-1'", "a whole number of at least 0"),
    "plan config.yaml --rows 0": ("--rows is '0'", "a whole number of at least 1 and at most "),
    "export run --output x --max-divergence y": ("--max-divergence is 'y'", "a number"),
    "trian config.yaml": ("brim has no verb trian", "did you mean brim train?"),
    "finetune config.yaml": ("brim has no verb finetune", "did you mean brim train?"),
    "config.yaml": ("brim has no verb config.yaml", "name the verb first, such as brim train config.yaml"),
    "--dataset x.csv train config.yaml": ("brim has no option --dataset", "the verb comes first: brim train …"),
    "-h": ("brim has no option -h", "write brim --help"),
}
_SPACES = ", with = and no spaces around it"
_QUOTES = "; your shell hands quotes of this kind on"
# Arguments that are no overrides, and what is said to write instead.
OVERRIDES = {
    "trainer.epochs = 1": f"write trainer.epochs=1{_SPACES}",
    "trainer.epochs =1": f"write trainer.epochs=1{_SPACES}",
    "trainer.epochs= 1": f"write trainer.epochs=1{_SPACES}",
    "trainer.epochs: 1": f"write trainer.epochs=1{_SPACES}",
    "'trainer.epochs: 1'": f"write trainer.epochs=1{_SPACES}",
    "'prompt.template: {q} and more'": f"write 'prompt.template={{q}} and more'{_SPACES}",
    "\"'trainer.epochs=1'\"": f"write trainer.epochs=1{_QUOTES}",
    "“trainer.epochs=1”": f"write trainer.epochs=1{_QUOTES}",
    "–verbose": "it begins with a long dash, as word processors write one: write --verbose",
    "config.yaml": "name one configuration; `brim compare` takes several",
    "epochs": "",
}


def _on_the_command_line() -> Iterator[BadInput]:
    for command, fix in FLAGS.items():
        flag = next(each for each in command.split() if each.startswith("-")).partition("=")[0]
        yield _mistake(command, f"brim: command line: brim {command.split()[0]} has no option {flag}\n  fix: {fix}\n")
    for command, (what, how) in USAGE.items():
        yield _mistake(command, f"brim: command line: {what}\n", how)
    for argument, fix in OVERRIDES.items():
        told = " ".join(shlex.split(argument))
        words = (f"brim: override {told}: not an override expected: KEY=VALUE", fix)
        yield _mistake(f"check config.yaml {argument}", *words)


_BLOCK = "base_model: ./base\ntrainer:\n  type: none\n"  # a configuration, but for what is wrong with it
# config.yaml, and what is said of it.
CONFIGS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "nothing": ("", ("config.yaml: the configuration is empty", "give at least base_model and the features")),
    "a list": ("- a\n", ("config.yaml:1: the configuration is not a mapping", "lines of the form `key: value`")),
    "UTF-16": (_BLOCK.encode("utf-16"), ("config.yaml:1: byte 0xff is not UTF-8", "save the file as UTF-8")),
    "a tab": ("trainer:\n\ttype: none\n", ("config.yaml:2: not YAML: a tab", "indent with spaces")),
    "a key twice": (
        f"{_BLOCK}base_model: x\n",
        ("config.yaml:4: base_model is given twice", "the first is at config.yaml:1", "keep one of them"),
    ),
    "an open quote": ('a: "b\nc: d\n', ("close the bracket or the quote that opens in line 1",)),
    "an open brace": ("a: b\nc: {d: 1\n", ("close the bracket or the quote that opens in line 2",)),
    "no space": ("base_model:m\ntrainer:\n  type: none\n", ("a space after each key's colon",)),
}


def _in_the_configuration() -> Iterator[BadInput]:
    yield _mistake(
        "check confg.yaml",
        "brim: no such file or folder: confg.yaml expected: a YAML configuration, or the folder of a run or of a model",
        "did you mean config.yaml?",
    )
    yield _mistake(
        f"check {'x' * 300}", "no such file or folder", "check the path; it is relative to the current folder"
    )
    other_name = (_gone("config.yaml"), _file("c.yaml", _BLOCK))
    yield _mistake("check .", "name the file: c.yaml", edits=other_name)
    yield _mistake("train .", "name the run's folder, or the YAML file, such as c.yaml", edits=other_name)
    yield _mistake("check config", "did you mean config.yaml?")
    yield _mistake("train config.yml", "did you mean config.yaml?")
    table = (_file("rows.csv", "q,a\n1,2\n"),)
    yield _mistake(
        "check rows.csv", "name the configuration first: `brim train config.yaml --dataset rows.csv`", edits=table
    )
    yield _mistake("evaluate .", "brim: .: this folder is not a run", "the folder that `brim train` wrote")
    yield _mistake(
        "train base --dataset rows.jsonl",
        "brim: base: this folder is not a run: it has no config.yaml",
        "write a configuration with base_model: base and trainer: {type: finetune}",
    )
    for about, (content, words) in CONFIGS.items():
        yield _mistake(TRAIN, *words, edits=(_file("config.yaml", content),), about=about)
    for old, new, words in (
        ('"learning_rate":', '"learning_rat":', ("unknown key trainer.learning_rat", "mean trainer.learning_rate?")),
        ('"train_steps": 2', '"epochs": "two"', ("trainer.epochs is 'two' expected: a whole number of at least 1",)),
        (
            '"effective_batch_size": 8',
            '"effective_batch_size": 9',
            ("trainer.effective_batch_size 9 is not a multiple of batch_size 4", "batch_size × grad", "size: 8 or 12"),
        ),
        (
            '"do_sample": false',
            '"do_sample": true,\n  "temperature": 0',
            (
                "generation.temperature is 0 and do_sample is true",
                "above 0 for sampling",
                "generation.do_sample: false",
            ),
        ),
    ):
        edit = _change("config.yaml", old, new)
        yield _mistake(TRAIN, "brim: config.yaml:", *words, edits=(edit,), about=new.replace("\n", ""))
    yield _mistake(
        "check config.yaml trainer.epochs=-1",
        "unknown key adaptor fix: did you mean adapter?",
        "override trainer.epochs=-1: trainer.epochs is -1 expected: a whole number of at least 1",
        edits=(_change("config.yaml", '"adapter"', '"adaptor"'),),
        about="and a misspelt key",
    )
    yield _mistake("check config.yaml trainer.epoch=1", "override trainer.epoch=1: unknown key", "mean trainer.epochs?")
    yield _mistake(
        "check config.yaml quantization.backend=torchao",
        "quantization.backend: torchao is not supported yet expected: bitsandbytes",
    )


_ROW = '{"question": "add 1 and 2 =", "answer": " 3", "split": 0}\n'
_HEAD = "question,answer,split\n"
_STRICT = "output_features.0.preprocessing.missing_value_strategy=error"
_EMPTY_CELL = (
    "column `answer` is empty in 1 row",
    "a value in every row",
    "missing_value_strategy to drop_row or fill",
)
_GO_ON = "set preprocessing.on_bad_row: drop to go on without such rows"
# What `brim check` says of a data file: its name, what it holds, and the words.
DATA: dict[str, tuple[str, str | bytes, tuple[str, ...]]] = {
    "no answers": ("bad.jsonl", '{"question": "a", "split": 0}\n', ("no column `answer`, which output_features[0]",)),
    "nothing": ("bad.jsonl", "", ("bad.jsonl: the file is empty", "at least one row of data")),
    "a header": ("bad.csv", _HEAD, ("bad.csv: there is a header but no rows", "at least one row of data")),
    "a broken line": (
        "bad.jsonl",
        _ROW * 3 + _ROW[:30] + "\n" + _ROW,
        ("bad.jsonl:4: not valid JSON: ", "one JSON object a line", _GO_ON),
    ),
    "Windows-1251": (
        "bad.csv",
        _HEAD.encode() + "Как сбросить пароль,b,0\n".encode("cp1251"),
        ("bad.csv:2: byte 0xCA (byte 22 of the file) is not UTF-8 text; the file looks like WINDOWS-1251", "`iconv -f"),
    ),
    "null": ("bad.jsonl", _ROW + _ROW.replace('" 3"', "null"), ("bad.jsonl:2: ", *_EMPTY_CELL)),
    "NaN": ("bad.jsonl", _ROW.replace('" 3"', "3.5") + _ROW.replace('" 3"', "NaN"), ("bad.jsonl:2: ", *_EMPTY_CELL)),
    "two ways of a split": (
        "bad.csv",
        f"{_HEAD}a,b,0\nc,d,train\ne,f,1\n",
        ("column `split` writes the train split in 2 ways: '0', 'train'", "write it the same in all rows"),
    ),
    "no splits": (
        "bad.csv",
        f"{_HEAD}a,b,0\nc,d,7\ne,f,trian\n",
        ("bad.csv:3: column `split` holds '7' in 1 row, which is not a split", "bad.csv:4: column `split` holds 'tr"),
    ),
    "an empty split": (
        "bad.csv",
        f"{_HEAD}a,b,0\nc,d,\n",
        ("bad.csv:3: column `split`, by which the data is split, is empty in 1 row", "or split by another column"),
    ),
    "a column twice": (
        "bad.csv",
        "question,answer,question\na,b,c\n",
        ("bad.csv:1: column names stand twice in the header: `question`", "rename or remove one of them"),
    ),
    "a comma": (
        "bad.csv",
        f"{_HEAD}a,b,0\na, and b,c,0\n",
        ("bad.csv:3: 4 fields where the header has 3", 'in "double quotes"', _GO_ON),
    ),
    "an open quote": (
        "bad.csv",
        f'{_HEAD}a,b,0\n"c,d,0\n',
        ("bad.csv:3: a quoted cell begins in this row and never ends", "close the quote", _GO_ON),
    ),
    "a spreadsheet": ("bad.xlsx", b"PK", ("the file is a spreadsheet, which is not read", "Save As, CSV UTF-8")),
    "overlong": (
        "bad.csv",
        f"{_HEAD}a,{'x ' * 200},0\nc,d,0\n",
        (
            "bad.csv:2 (408 tokens): 1 of 2 rows are longer than the model's context",
            "at most 128 tokens of prompt, answer and end of sequence",
            "set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted)",
        ),
    ),
}
_PICKLE = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00]\x94(\x8c\x01x\x94\x8c\x01y\x94e."
_NOT_UTF8 = "of the file) is not UTF-8 text; the file looks like"
# Files of another kind than their name says, and what is said of them, whatever the policy for bad rows.
OTHER_KINDS: dict[str, tuple[str, str | bytes, tuple[str, ...]]] = {
    "a pickle": ("bad.jsonl", _PICKLE * 50, ("bad.jsonl:1: ", _NOT_UTF8)),
    "a pickle called csv": ("bad.csv", _PICKLE * 50, ("bad.csv:1: ", _NOT_UTF8)),
    "UTF-16": ("bad.jsonl", (_ROW * 9).encode("utf-16"), ("bad.jsonl:1: ", f"{_NOT_UTF8} UTF-16 ")),
    "UTF-16 without a mark": ("bad.tsv", ("q\ta\n" + "x\ty\n" * 50).encode("utf-16-le"), ("bad.tsv:1: ", _NOT_UTF8)),
    "UTF-16 called json": ("bad.json", "[{}]".encode("utf-16"), ("bad.json:1: ", _NOT_UTF8)),
    "csv called jsonl": ("bad.jsonl", b"q,a\n" + b"x,y\n" * 50, ("bad.jsonl: none of the first 20 rows can be read",)),
    "a short csv": ("bad.jsonl", b"q,a\nx,y\n", ("bad.jsonl: 2 of 2 rows are bad, more than preprocessing",)),
    "json called jsonl": ("bad.jsonl", b'[\n{"q": "x"},\n{"q": "y"}\n]\n', ("the file is one JSON list",)),
    "prose": ("bad.csv", b"Title\n\n" + b"Well, this is, as you see, prose.\n" * 50, ("none of the first 20 rows",)),
    "mostly broken lines": (
        "bad.jsonl",
        _ROW.encode() * 30 + b"{\n" * 31,
        ("bad.jsonl:31: not valid", "bad.jsonl: 26 more rows are bad", "bad.jsonl: 31 of 61 rows are bad"),
    ),
    "broken json": ("bad.json", b'[{"q": "x"},\n{"q": }]', ("bad.json:2: not valid JSON: Expecting value",)),
    "undecodable json": ("bad.json", b'[{"q": "x"}\xff, {"q": "y"}]', ("bad.json:1: ", _NOT_UTF8)),
    "undecodable columns": ("bad.json", b'{"q": ["x", "\xff"]}', ("bad.json:1: ", _NOT_UTF8)),
    "an undecodable header": ("bad.csv", b"caf\xe9,a\n" + "x,ä\n".encode() * 9, ("bad.csv:1: ", _NOT_UTF8)),
}


def _in_the_data() -> Iterator[BadInput]:
    drop = "preprocessing.on_bad_row=drop"
    for about, (name, content, words) in OTHER_KINDS.items():
        yield _mistake(f"{CHECK} {name} {drop}", *words, edits=(_file(name, content),), about=about)
    yield _mistake("train config.yaml --output-directory new", "brim: there is no data set", "--dataset FILE")
    yield _mistake(f"{CHECK} ''", "brim: an empty path was given as the data set", "a file, or a saved folder")
    yield _mistake(f"{CHECK} row.jsonl", "brim: no such file: row.jsonl", "did you mean rows.jsonl?")
    yield _mistake(f"{CHECK} base", "brim: base: the folder is not a saved data set", "name a file in it instead")
    for about, (name, content, words) in DATA.items():
        more = f" {_STRICT}" if about in ("null", "NaN") else ""
        yield _mistake(f"{CHECK} {name}{more}", *words, edits=(_file(name, content),), about=about)
    yield _mistake(
        f"{TRAIN} 'prompt.template=\"{{qestion}} {{hint}}\"'",
        "brim: rows.jsonl: no column `qestion`, which prompt.template names expected: one of the columns that "
        "are there: `question`, `answer`, `split` fix: did you mean `question`?",
        "rows.jsonl: no column `hint`, which prompt.template names",
        "name a column of the data, or add this one",
    )
    none_to_train = _file("bad.csv", f"{_HEAD}a,b,1\n")
    yield _mistake(
        TRAIN.replace("rows.jsonl", "bad.csv"),
        "brim: bad.csv: no rows are left to train on expected: at least one row in the train split",
        edits=(none_to_train,),
    )
    for split, words in (
        ("tst", ("brim: there is no split 'tst' expected: train, validation, test, full",)),
        ("test", ("brim: bad.csv: the split 'test' has no rows", "choose another with --split")),
    ):
        yield _mistake(f"evaluate run --dataset bad.csv --split {split}", *words, edits=(none_to_train,))
    yield _mistake(
        "evaluate run --dataset bad.csv",
        "brim: bad.csv: no column `answer`, which output_features[0] names",
        edits=(_file("bad.csv", "question\na\n"),),
    )
    yield _mistake("check config.yaml --rows rows.csv", "--rows writes rows of the data, and no data was given")
    retrieval = "'prompt={template: \"{__context__} {question}\", retrieval: {type: random, k: NUMBER}}'"
    few_shot = f"predict config.yaml {retrieval} dataset=rows.jsonl --output new.csv"
    for number, says in (
        (6, "prompts are too long: too little of the model's context is left for the answer"),
        (40, "the training split has 14 different inputs, and prompt.retrieval.k asks for 40 examples"),
    ):
        yield _mistake(few_shot.replace("NUMBER", str(number)), says)


_BASE = "base/config.json"
_WHOLE = "weights that match config.json fix: copy the folder again, or check that it holds a causal language model"
# What `brim train` says where the base model's folder is made otherwise.
BASES: dict[str, tuple[tuple[Edit, ...], tuple[str, ...]]] = {
    "no weights": (
        (_gone("base/model.safetensors"),),
        ("the base model's folder holds no weights", "set `initialize: random` to train from scratch"),
    ),
    "no tokenizer": (
        (_gone("base/tokenizer.json"),),
        ("the base model's folder holds no tokenizer", "save it with `tokenizer.save_pretrained(folder)`"),
    ),
    "half of config.json": (
        (Edit(path=_BASE, how="cut", num_bytes=100),),
        ("base/config.json: config.json cannot be read: ", "copy it from the original model again"),
    ),
    "heads that do not divide": (
        (_change(_BASE, '"num_attention_heads": 4', '"num_attention_heads": 3'),),
        ("config.json is damaged or does not fit: ", "hidden size (32) is not a multiple"),
    ),
    "an unknown architecture": (
        (_change(_BASE, '"llama"', '"lama"'),),
        (
            "the architecture 'lama' is not a causal language model",
            "upgrade transformers, or choose another base model",
        ),
    ),
    "half of the weights": (
        (Edit(path="base/model.safetensors", how="cut", num_bytes=5000),),
        ("base: a safetensors file is damaged: ", "copy the folder again from its source"),
    ),
    "weights of another shape": (
        (_change(_BASE, '"intermediate_size": 64', '"intermediate_size": 80'),),
        ("6 weights of the base model are of another shape", "mlp.down_proj.weight is 32×64, not 32×80", _WHOLE),
    ),
    "a layer too few": (
        (_change(_BASE, '"num_hidden_layers": 2', '"num_hidden_layers": 3'),),
        ("9 weights of the base model are missing: model.layers.2.input_layernorm.weight, ", _WHOLE),
    ),
    "half of the tokenizer": (
        (Edit(path="base/tokenizer.json", how="cut", num_bytes=100),),
        ("base/tokenizer.json: the tokenizer cannot be read: ", "copy tokenizer.json from the original model again"),
    ),
    "code of its own": (
        (
            _change(_BASE, '"model_type": "llama"', '"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C"}'),
            _file("base/theirs.py", "raise SystemExit('this code must not run')\n"),
        ),
        ("asks for its own code to be run (auto_map in config.json)", "read the code, and only if you trust who wrote"),
    ),
}
_ADAPTER = "the adapter cannot be loaded: "
_PEFT = "a PEFT folder (adapter_config.json, adapter_model.safetensors) made for this base model"


def _in_the_models() -> Iterator[BadInput]:
    for about, (edits, words) in BASES.items():
        yield _mistake(TRAIN, *words, edits=edits, about=about)
    yield _mistake(f"{TRAIN} base_model=./bsae", "base_model: no such folder: ./bsae", "did you mean base?")
    yield _mistake("check config.yaml base_model=rows.jsonl", "base_model is a file, not a folder", "that holds it")
    yield _mistake(
        f"{TRAIN} base_model=some-org/some-model",
        "base_model: some-org/some-model is not on this machine, and the Hub could not be asked (",
        "point base_model to a local folder, or connect (and unset HF_HUB_OFFLINE) and try again",
    )
    yield _mistake(
        f"{TRAIN} adapter.target_modules=[q_prj]",
        "adapter.target_modules: ",
        "q_prj",
        "names of linear layers of this model: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
        "or to all-linear",
    )
    yield _mistake(
        f"{TRAIN} adapter.pretrained_adapter_weights=base",
        f"brim: base: {_ADAPTER}the folder holds no adapter_config.json and no adapter_model.safetensors",
        _PEFT,
    )
    unlisted = _gone("run/model/manifest.json")
    cut = Edit(path="run/model/adapter_model.safetensors", how="cut", num_bytes=500)
    yield _mistake(EVALUATE, f"run/model: {_ADAPTER}", _PEFT, edits=(unlisted, cut), about="half of the adapter")
    other = _change("run/model/adapter_config.json", "q_proj", "query")
    yield _mistake(
        f"{EVALUATE} adapter.target_modules=null",
        f"run/model: {_ADAPTER}no layer takes base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ",
        "check adapter.pretrained_adapter_weights and base_model",
        edits=(unlisted, other),
        about="an adapter for other layers",
    )
    yield _mistake(
        EVALUATE,
        "brim: run: this run has no model yet",
        "finish it with `brim train run --resume`",
        edits=(_gone("run/model"),),
    )
    theirs = (Edit(path="theirs", how="folder"),)
    yield _mistake("chat theirs", "brim: theirs: this folder is neither a run nor a model", edits=theirs)
    yield _mistake("export config.yaml --output new", "there is no trained model to export")
    yield _mistake("verify-resume config.yaml", "brim: config.yaml: this is not the folder of a run")
    yield _mistake("verify-resume run --from-step 2", "brim: --from-step: no step is left after step 2: the run has 2")
    yield _mistake("verify-resume run --dataset none.csv", "no such file: none.csv")
    yield _mistake("verify-resume run dataset=null", "there is no data set")
    yield _mistake("verify-resume run", "run: this folder is not a run", edits=(_gone("run/config.yaml"),))
    for name, content, said in (
        ("plan.json", "{", "the run's length cannot be read from its plan"),
        ("config.yaml", "base_model: x\ntrust_remote_code: true\n", "trust_remote_code is true"),
        ("config.yaml", "base_model: x\ntrainer: {type: none}\n", "nothing can be interrupted"),
    ):
        yield _mistake("verify-resume run", said, edits=(_file(f"run/{name}", content),), about=said)
    yield _mistake("export . --output new", "brim: .: this folder is not a run")
    for verb, more in (("export", "--output new"), ("upload", "some-org/some-model"), ("verify-resume", "")):
        yield _mistake(f"{verb} nowhere {more}".rstrip(), "brim: no such file or folder: nowhere")


_ENDINGS = "expected: .parquet, .jsonl, .csv fix: name the file predictions.parquet, say"
_TAKEN = "the output file exists already; nothing was changed fix: name another"


def _in_the_output() -> Iterator[BadInput]:
    train = TRAIN.removesuffix("new")
    yield _mistake(f"{train}rows.jsonl/run", "the output directory cannot be written: Not a directory", "another with")
    yield _mistake(
        f"{train}rows.jsonl", "brim: rows.jsonl: the output directory is a file", "another with --output-dir"
    )
    for command in (f"{train}base", "train . --resume --dataset rows.jsonl"):
        words = ("the output directory holds other things; nothing was changed", "expected: a new or an empty folder")
        yield _mistake(command, *words)
    yield _mistake(
        f"{train}run",
        "brim: run: there is a run in this folder already; nothing was changed fix: continue it with --resume (in "
        "Python resume=True), or choose another folder with --output-directory",
    )
    yield _mistake(
        f"{train}run --resume trainer.learning_rate=0.02 random_seed=1",
        "run/config.yaml: trainer.learning_rate is 0.02, but this run was started with 0.01",
        "set it back, or train into another folder",
        "run/config.yaml: random_seed is 1, but this run was started with 42",
    )
    other = (_change("rows.jsonl", '"answer": "', '"answer": "9'),)
    rows = "the training or validation rows are not those that this run was started with"
    yield _mistake("train run --resume --dataset rows.jsonl", rows, edits=other, about="other rows")
    yield _mistake(f"{PREDICT} new.xlsx", f"brim: new.xlsx: the output's ending '.xlsx' is not known {_ENDINGS}")
    yield _mistake(f"{PREDICT} new", f"brim: new: the output has no ending {_ENDINGS}")
    yield _mistake(f"{PREDICT} rows.jsonl", f"brim: rows.jsonl: {_TAKEN}")
    yield _mistake(
        f"{PREDICT} rows.jsonl/new.csv",
        "the output cannot be written: its path leads through a file",
        "name a file in a folder that can be written to, on a disk with free space",
    )
    yield _mistake(f"{EVALUATE} --rows rows.jsonl", f"brim: rows.jsonl: {_TAKEN}")
    for target, said in (
        ("run", "lies in the run"),
        ("run/model/merged", "lies in the run"),
        ("rows.jsonl", "is a file"),
        ("rows.jsonl/below", "no new folder can be made"),
        ("base", "holds other things; nothing was changed"),
    ):
        yield _mistake(f"export run --output {target}", said)
        yield _mistake(f"export run --output {target} --merge", said)
    folder = (Edit(path="folder.png", how="folder"),)
    yield _mistake("memory config.yaml --plot folder.png", "the picture cannot be written", edits=folder)
    job = "the folder that the job would be kept in holds other files; nothing was changed"
    theirs = _file("theirs/theirs.txt", "precious")
    link = Edit(path=".new.csv.job", how="link", target="theirs")
    for about, edits in (("a link", (theirs, link)), ("a folder", (_file(".new.csv.job/theirs.txt", "precious"),))):
        yield _mistake(f"{PREDICT} new.csv --resume", job, edits=edits, about=about)
    taken = _file("new.csv.ledger.parquet", "mine")
    drop = "preprocessing.on_bad_row=drop"
    yield _mistake(
        f"predict run {drop} --dataset bad.csv --output new.csv",
        f"new.csv.ledger.parquet: {_TAKEN}",
        edits=(taken, _file("bad.csv", 'question,split\na,0\nb,0\nc,0\n"",0\n')),
    )


# What is typed after a verb and its first arguments, and what is said of it.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "predict run --dataset rows.jsonl --output new.csv": {
        "generation.max_new_tokens=500": (
            "generation.max_new_tokens leaves no room for a prompt: it is 500, the model's context 128 tokens",
            "lower generation.max_new_tokens",
        ),
        "generation.max_new_tokens=128": ("generation.max_new_tokens leaves no room for a prompt: it is 128, the ",),
        "generation.bad_words_ids=[[5000]]": (
            "generation: transformers cannot generate with these settings: ",
            "[5000]",
        ),
        "--on-error ignore": ("--on-error: 'ignore' is not known expected: stop, skip",),
        "--on-overlong drop": ("--on-overlong: 'drop' is not known expected: error, truncate_left, skip",),
        "--key id": ("rows.jsonl: there is no column `id` to identify rows by",),
        "--key split": ("a value in `split` that an earlier row has, too: '0' stands in rows.jsonl:1 first",),
        "--split dev": ("there is no split 'dev'",),
        "--device t4": ("--device and --memory are for --plan",),
    },
    "predict run --dataset rows.jsonl": {
        "": ("no output is named",),
        "--plan --device t4 --memory 14GiB": ("both --device and --memory are given",),
    },
    "embed run --dataset rows.jsonl": {
        "--output new.csv": ("vectors are written as parquet alone",),
        "--output config.yaml": ("vectors are written as parquet alone",),
        "--output new.parquet --layer layers.9": ("the model has no layer 'layers.9'",),
        "--output new.parquet --layer 7": ("0 to 1, or -1 to -2 counted from the end",),
        "--output new.parquet --pooling max": ("there is no pooling 'max'",),
        "--output new.parquet --split dev": ("there is no split 'dev'",),
    },
    "export run --output new": {
        "--format onnx": ("brim does not write the format 'onnx'", "optimum-cli export onnx"),
        "--format gguf": ("brim does not write the format 'gguf'", "convert_hf_to_gguf.py"),
        "--merge --dtype int4": ("there is no dtype 'int4' expected: bf16, fp16, fp32",),
        "--merge --max-divergence -1": ("--max-divergence is -1",),
        "--merge --max-divergence nan": ("--max-divergence is nan",),
        "--dtype fp16": ("--dtype applies to merged weights, and nothing is merged",),
        "--max-divergence 1": ("--max-divergence applies to merged weights, and nothing is merged",),
        "--merge --dataset no-such.jsonl": ("no such file: no-such.jsonl",),
        "no.such.key=1": ("override no.such.key=1: unknown key",),
    },
    "compare": {
        "config.yaml": (
            "brim: there is nothing to compare: one configuration",
            "name another one; one alone is trained",
        ),
        "config.yaml config.yaml --seeds 0": ("--seeds is '0'",),
    },
    "evaluate run --dataset rows.jsonl": {
        "--against-base --against run": ("brim: --against and --against-base name two models", "leave out one of them"),
    },
    "plan config.yaml --dataset rows.jsonl": {
        "--device t4 --memory 14GiB": ("command line: both --device and --memory are given", "memory is known by its"),
        "--memory 14": ("brim: --memory: '14' is not a number of bytes with a unit",),
        "--device a1000": ("brim: unknown device 'a1000'",),
        "memory.budget=14": ("brim: override memory.budget=14: memory.budget is 14",),
        "trainer=none": ("trainer.type: there is nothing to plan: this configuration does not train",),
        "--rows 9 --sequence-length 9": ("command line: both a data set and the size of one are",),
    },
    "plan config.yaml": {
        "": ("there is no data set, and a plan depends on", "how large it will be with --rows N --sequence-length N"),
        "--rows 9": ("command line: --rows is given without --sequence-length",),
        "--sequence-length 9": ("command line: --sequence-length is given without --rows",),
        "--rows 9 --sequence-length 99999": ("sequence_length is 99,999, but the model's context is",),
    },
    "memory config.yaml": {
        "--device a100-80bg": ("unknown device 'a100-80bg'", "a100-80gb"),
        "--device t4 --memory 14GiB": ("both --device and --memory are given", "keep one"),
        "--memory 14": ("'14' is not a number of bytes with a unit", "such as 14GiB"),
        "--memory 0GiB": ("the device has no memory", "such as 14GiB"),
        "--memory 9999999TiB": ("no device has that much memory", "at most 1024.0 TiB"),
        "--batch-size 1048577": ("--batch-size", "at most 1,048,576"),
        "--world-size 65537": ("--world-size", "at most 65,536"),
        "--phase trian": ("unknown phase 'trian'", "did you mean train?"),
        "--plot memory.jpeg": ("the picture's ending '.jpeg' is not known", ".png or .html"),
        "--plot memory": ("the picture has no ending", ".png or .html"),
        "--plot config.yaml/a.png": ("the picture cannot be written", "in a folder that you can write to"),
        "--steps 5": ("--steps is for measuring, but --measure is not given", "add --measure"),
        "--layers 1": ("--layers is for measuring, but --measure is not given", "add --measure"),
        "--measure --layers 1 --steps 5": ("--steps measures the whole model", "keep one"),
        "--measure --device t4": ("--measure runs on this machine's device", "remove one"),
        "--measure --world-size 2": ("--measure runs on one device", "remove one"),
        "--measure --steps 3 --phase generate": ("--steps is for training", "remove one"),
        "--offload disk": ("unknown --offload 'disk'", "none, optimizer or weights"),
        "--measure --offload weights": ("everything on the device", "remove --offload"),
        "--compare --measure": ("--compare is for several configurations, --measure for one", "remove"),
        "--compare --explain": ("--compare is for several configurations, --explain for one", "remove"),
        "--compare --phase generate": ("--compare is for training, but --phase is generate", "remove one"),
        "--batch-size 0": ("--batch-size is '0'", "a whole number of at least 1"),
        "--sequence-length -5": ("--sequence-length is '-5'", "a whole number of at least 2"),
        "--sequence-length 129": ("the model's context is 128 tokens",),
        "--world-size 0": ("--world-size is '0'", "a whole number of at least 1"),
        "quantization.bits=4 adapter=null": ("without an adapter there is nothing to train", "set adapter: lora"),
        "trainer=none --phase train": ("the configuration does not train", "trainer.type: finetune"),
        "base_model=no/such/folder": ("no such folder", "check the path"),
    },
}


def _in_the_options() -> Iterator[BadInput]:
    for begin, ends in OPTIONS.items():
        for end, words in ends.items():
            yield _mistake(f"{begin} {end}".rstrip(), *words)
    for about, columns, words in (
        (
            "the columns of predictions",
            ["row,question,answer_response", "0,a,b"],
            (
                "the data has columns `row`, `answer_response`, names that predictions use themselves",
                "rename or remove",
            ),
        ),
        (
            "an empty prompt",
            ["question,split", "a,0", '"",0'],
            ("bad.csv:3: 1 prompt is empty", "at least one token to go on from", "give the prompt a template"),
        ),
    ):
        command = "predict run 'prompt.template=\"{question}\"' --dataset bad.csv --output new.csv"
        yield _mistake(command, *words, edits=(_file("bad.csv", "\n".join([*columns, ""])),), about=about)
    newcomer = _file("newcomer/config.json", json.dumps({"model_type": "newcomer", "hidden_size": 8}))
    yield _mistake(
        "memory config.yaml base_model=newcomer",
        "the architecture 'newcomer' is not a causal language model",
        edits=(newcomer,),
    )


MISTAKES = (
    *_on_the_command_line(),
    *_in_the_configuration(),
    *_in_the_data(),
    *_in_the_models(),
    *_in_the_output(),
    *_in_the_options(),
)
