"""Everything that a user can get wrong: one message that says what, where and how to mend it; nothing is damaged."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

GOOD_ROW = '{"question": "add 1 and 2 =", "answer": " 3", "split": 0}\n'
HEAD = "question,answer,split\n"
TRAIN = ("train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "new")
CHECK = ("check", "config.yaml", "--dataset")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command that must fail. In `says`, {here} is the current folder; *** stands for a library's own words."""

    command: tuple[str, ...]
    says: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # written into the current folder
    edit: tuple[str, str] | None = None  # in config.yaml: replace the first by the second
    base: Callable[[Path], object] | None = None  # spoils ./base, which config.yaml then names
    run: Callable[[Path], object] | None = None  # spoils ./run, a finished run


CHOICES = r"(?:(?!brim: ).+\n)*"  # what `brim train` chooses and plans, as it tells it


def nothing(folder):
    """Spoil nothing."""


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def change(name, old, new):
    def apply(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return apply


def cut(name, num_bytes):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


def both(*spoils):
    return lambda folder: [spoil(folder) for spoil in spoils]


def remote_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text("raise SystemExit('this code must not run')\n")


STRICT = "output_features.0.preprocessing.missing_value_strategy=error"
CASES = {
    # The command line
    "no such configuration": Case(
        command=("check", "confg.yaml"),
        says=(
            "brim: no such file or folder: confg.yaml\n"
            "  expected: a YAML configuration, or the folder of a run or of a model\n"
            "  fix: did you mean config.yaml?\n"
        ),
    ),
    "a name too long for a file": Case(
        command=("check", "x" * 300),
        says=(
            "brim: no such file or folder: ***\n"
            "  expected: a YAML configuration, or the folder of a run or of a model\n"
            "  fix: check the path; it is taken from the current folder\n"
        ),
    ),
    "a folder that is no run": Case(
        command=("evaluate", "."),
        says=(
            "brim: .: this folder is not a run\n"
            "  expected: the folder that `brim train` wrote, or a configuration file\n"
            "  fix: name the run's folder (the one with plan.json and model/), or the YAML file\n"
        ),
    ),
    "train in a base model's folder": Case(
        command=("train", "base", "--dataset", "sums.jsonl"),
        base=nothing,
        says=(
            "brim: base: this folder is not a run: it has no config.yaml\n"
            "  expected: a YAML configuration, or the folder of a run\n"
            "  fix: write a configuration with base_model: base and trainer: {type: finetune}\n"
        ),
    ),
    "unknown option": Case(
        command=(*CHECK, "sums.jsonl", "--outptu", "x"),
        says=(
            "brim: command line: brim check has no option --outptu\n"
            "  fix: `brim check --help` lists its options; keys of the configuration are written as trainer.epochs=1\n"
        ),
    ),
    "unknown verb": Case(
        command=("trian", "config.yaml"),
        says=("brim: command line: brim has no verb trian\n  expected: one of ***\n  fix: did you mean brim train?\n"),
    ),
    "unknown split": Case(
        command=("evaluate", "run", "--dataset", "sums.jsonl", "--split", "tst"),
        run=nothing,
        says=("brim: there is no split 'tst'\n  expected: train, validation, test, full\n"),
    ),
    "no data set": Case(
        command=("train", "config.yaml", "--output-directory", "new"),
        says=(
            "brim: there is no data set\n"
            "  expected: --dataset FILE, the key `dataset`, or dataset=… in Python\n"
            "  fix: name a csv, tsv, json, jsonl or parquet file, or a saved datasets folder\n"
        ),
    ),
    "an empty name of a data set": Case(
        command=(*CHECK, ""),
        says="brim: an empty path was given as the data set\n  expected: a file, or a saved folder\n",
    ),
    # The configuration
    "misspelt key": Case(
        command=TRAIN,
        edit=("learning_rate", "learning_rat"),
        says=("brim: config.yaml:20: unknown key trainer.learning_rat\n  fix: did you mean trainer.learning_rate?\n"),
    ),
    "wrong type": Case(
        command=TRAIN,
        edit=("epochs: 2", "epochs: two"),
        says=("brim: config.yaml:17: trainer.epochs is 'two'\n  expected: a whole number of at least 1\n"),
    ),
    "several at once": Case(
        command=("check", "config.yaml", "trainer.epochs=-1"),
        edit=("adapter: lora", "adaptor: lora"),
        says=(
            "brim: config.yaml:9: unknown key adaptor\n"
            "  fix: did you mean adapter?\n"
            "override trainer.epochs=-1: trainer.epochs is -1\n"
            "  expected: a whole number of at least 1\n"
        ),
    ),
    "an override of an unknown key": Case(
        command=("check", "config.yaml", "trainer.epoch=1"),
        says=("brim: override trainer.epoch=1: unknown key trainer.epoch\n  fix: did you mean trainer.epochs?\n"),
    ),
    "an override without a value": Case(
        command=("check", "config.yaml", "epochs"),
        says=("brim: override epochs: not an override\n  expected: KEY=VALUE, such as trainer.epochs=1\n"),
    ),
    "not supported yet": Case(
        command=("check", "config.yaml", "quantization.backend=torchao"),
        says=(
            "brim: override quantization.backend=torchao: quantization.backend: torchao is not supported yet\n"
            "  expected: bitsandbytes\n"
        ),
    ),
    "batch arithmetic": Case(
        command=TRAIN,
        edit=("effective_batch_size: 8", "effective_batch_size: 9"),
        says=(
            "brim: config.yaml:19: trainer.effective_batch_size 9 is no multiple of batch_size 4\n"
            "  expected: effective_batch_size = batch_size × gradient_accumulation_steps × processes\n"
            "  fix: set trainer.effective_batch_size: 8 or 12\n"
        ),
    ),
    "sampling at temperature 0": Case(
        command=TRAIN,
        edit=("do_sample: false", "do_sample: true\n  temperature: 0"),
        says=(
            "brim: config.yaml:15: generation.temperature is 0 and do_sample is true\n"
            "  expected: a temperature above 0 for sampling\n"
            "  fix: set generation.do_sample: false, which always takes the likeliest token\n"
        ),
    ),
    "a tab in the YAML": Case(
        command=TRAIN,
        edit=("  split: fixed", "\tsplit: fixed"),
        says=("brim: config.yaml:11: not YAML: a tab in the indentation\n  fix: indent with spaces\n"),
    ),
    "an empty configuration": Case(
        command=TRAIN,
        files={"config.yaml": ""},
        says=("brim: config.yaml: the configuration is empty\n  fix: give at least base_model and the features\n"),
    ),
    "a configuration that is no mapping": Case(
        command=TRAIN,
        files={"config.yaml": "- a\n"},
        says=("brim: config.yaml:1: the configuration is no mapping\n  expected: lines of the form `key: value`\n"),
    ),
    "a configuration in UTF-16": Case(
        command=TRAIN,
        files={"config.yaml": "model_type: llm\n".encode("utf-16")},
        says=("brim: config.yaml:1: byte 0xff is not UTF-8\n  fix: save the file as UTF-8\n"),
    ),
    "a key given twice": Case(
        command=TRAIN,
        edit=("adapter: lora", "adapter: lora\nadapter: null"),
        says=(
            "brim: config.yaml:10: adapter is given twice\n"
            "  expected: one value; the first is at config.yaml:9\n"
            "  fix: keep one of them\n"
        ),
    ),
    # The data
    "no such data set": Case(
        command=(*CHECK, "sum.jsonl"), says=("brim: no such file: sum.jsonl\n  fix: did you mean sums.jsonl?\n")
    ),
    "a missing column in the template": Case(
        command=TRAIN,
        edit=("adapter: lora", "adapter: lora\nprompt:\n  template: '{qestion} {hint}'"),
        says=(
            "brim: sums.jsonl: no column `qestion`, which prompt.template names\n"
            "  expected: one of the columns that are there: `question`, `answer`, `split`\n"
            "  fix: did you mean `question`?\n"
            "sums.jsonl: no column `hint`, which prompt.template names\n"
            "  expected: one of the columns that are there: `question`, `answer`, `split`\n"
            "  fix: name a column of the data, or add this one\n"
        ),
    ),
    "no answer column": Case(
        command=(*CHECK, "bad.jsonl"),
        files={"bad.jsonl": '{"question": "a", "split": 0}\n'},
        says=(
            "brim: bad.jsonl: no column `answer`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `question`, `split`\n"
            "  fix: name a column of the data, or add this one\n"
        ),
    ),
    "an empty file": Case(
        command=(*CHECK, "bad.jsonl"),
        files={"bad.jsonl": ""},
        says=("brim: bad.jsonl: the file is empty\n  expected: at least one row of data\n"),
    ),
    "a csv of a header alone": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD},
        says=("brim: bad.csv: there is a header but no rows\n  expected: at least one row of data\n"),
    ),
    "one broken JSON line": Case(
        command=(*CHECK, "bad.jsonl"),
        files={"bad.jsonl": GOOD_ROW * 3 + GOOD_ROW[:30] + "\n" + GOOD_ROW},
        says=(
            "brim: bad.jsonl:4: not valid JSON: ***\n  expected: one JSON object a line\n"
            "  fix: set preprocessing.on_bad_row: drop to go on without such rows\n"
        ),
    ),
    "a csv in an encoding that is not certain": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD.encode() + "Как сбросить пароль,b,0\n".encode("cp1251")},
        says=(
            "brim: bad.csv:2: byte 0xCA (byte 22 of the file) is not UTF-8 text; the file looks like WINDOWS-1251\n"
            "  expected: a text file in UTF-8\n"
            "  fix: save it as UTF-8, e.g. `iconv -f WINDOWS-1251 -t UTF-8 bad.csv > bad-utf8.csv`\n"
        ),
    ),
    "null cells": Case(
        command=(*CHECK, "bad.jsonl", STRICT),
        files={"bad.jsonl": GOOD_ROW + GOOD_ROW.replace('" 3"', "null")},
        says=(
            "brim: bad.jsonl:2: column `answer` is empty in 1 row\n"
            "  expected: a value in every row\n"
            "  fix: fill the cells, or set output_features[0].preprocessing.missing_value_strategy to drop_row or fill_with_const\n"
        ),
    ),
    "NaN cells": Case(
        command=(*CHECK, "bad.jsonl", STRICT),
        files={"bad.jsonl": GOOD_ROW.replace('" 3"', "3.5") + GOOD_ROW.replace('" 3"', "NaN")},
        says=(
            "brim: bad.jsonl:2: column `answer` is empty in 1 row\n"
            "  expected: a value in every row\n"
            "  fix: fill the cells, or set output_features[0].preprocessing.missing_value_strategy to drop_row or fill_with_const\n"
        ),
    ),
    "two spellings of one split": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD + "a,b,0\nc,d,train\ne,f,1\n"},
        says=(
            "brim: bad.csv: column `split` writes the train split in 2 ways: '0', 'train'\n"
            "  expected: one way of writing each split\n"
            "  fix: write it the same in all rows\n"
        ),
    ),
    "unknown split values": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD + "a,b,0\nc,d,7\ne,f,trian\n"},
        says=(
            "brim: bad.csv:3: column `split` holds '7' in 1 row, which is no split\n"
            "  expected: 0, 1, 2 or train, validation, test\n"
            "  fix: correct the cells, or name another column in preprocessing.split.column\n"
            "bad.csv:4: column `split` holds 'trian' in 1 row, which is no split\n"
            "  expected: 0, 1, 2 or train, validation, test\n"
            "  fix: correct the cells, or name another column in preprocessing.split.column\n"
        ),
    ),
    "an empty split cell": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD + "a,b,0\nc,d,\n"},
        says=(
            "brim: bad.csv:3: column `split`, by which the data is split, is empty in 1 row\n"
            "  expected: a value in every row\n"
            "  fix: fill the cells, or split by another column or at random\n"
        ),
    ),
    "a column twice in a csv header": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": "question,answer,question\na,b,c\n"},
        says=(
            "brim: bad.csv:1: column names stand twice in the header: `question`\n"
            "  expected: a name of its own for each column\n"
            "  fix: rename or remove one of them\n"
        ),
    ),
    "a csv row with too many cells": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD + "a,b,0\na, and b,c,0\n"},
        says=(
            "brim: bad.csv:3: 4 fields where the header has 3\n"
            "  expected: 3 fields\n"
            '  fix: put cells that hold commas, quotes or line breaks in "double quotes"; or '
            "set preprocessing.on_bad_row: drop to go on without such rows\n"
        ),
    ),
    "a quote that is never closed": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD + 'a,b,0\n"c,d,0\n'},
        says=(
            "brim: bad.csv:3: a quoted cell begins in this row and never ends\n"
            '  expected: a closing "\n'
            '  fix: close the quote; inside a quoted cell, write a quote twice: ""; or '
            "set preprocessing.on_bad_row: drop to go on without such rows\n"
        ),
    ),
    "an unknown ending": Case(
        command=(*CHECK, "bad.xlsx"),
        files={"bad.xlsx": b"PK"},
        says=(
            "brim: bad.xlsx: the file is a spreadsheet, which is not read\n"
            "  expected: csv, tsv, json, jsonl (or ndjson), parquet (or pq), or a folder saved by `datasets`\n"
            "  fix: open it in the program that wrote it and save the sheet as csv (in Excel: Save As, CSV UTF-8)\n"
        ),
    ),
    "a folder that holds no data set": Case(
        command=(*CHECK, "base"),
        base=nothing,
        says=(
            "brim: base: the folder is no saved data set\n"
            "  expected: what `datasets` writes with save_to_disk (state.json or dataset_dict.json)\n"
            "  fix: name a file in it instead\n"
        ),
    ),
    "no rows to train on": Case(
        command=(*TRAIN[:3], "bad.csv", *TRAIN[4:]),
        files={"bad.csv": HEAD + "a,b,1\n"},
        says=(
            "brim: bad.csv: no rows are left to train on\n"
            "  expected: at least one row in the train split\n"
            "  fix: look at preprocessing.split and at what was dropped\n"
        ),
    ),
    "rows beyond the context": Case(
        command=(*CHECK, "bad.csv"),
        files={"bad.csv": HEAD + f"a,{'x ' * 200},0\nc,d,0\n"},
        says=(
            "brim: bad.csv:2 (402 tokens): 1 of 2 rows are longer than the model's context\n"
            "  expected: at most 128 tokens of prompt, answer and end of sequence\n"
            "  fix: set preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted); "
            "or set max_sequence_length of a feature to cut prompts or answers alone\n"
        ),
    ),
    # The base model
    "no weights": Case(
        command=TRAIN,
        base=remove("model.safetensors"),
        says=(
            "brim: {here}/base: the base model's folder holds no weights\n"
            "  expected: model.safetensors, or model.safetensors.index.json with its parts\n"
            "  fix: copy the weights there, or set `initialize: random` to train from scratch\n"
        ),
    ),
    "no tokenizer": Case(
        command=TRAIN,
        base=remove("tokenizer.json"),
        says=(
            "brim: {here}/base: the base model's folder holds no tokenizer\n"
            "  expected: tokenizer.json (or an older tokenizer file) beside config.json\n"
            "  fix: save it with `tokenizer.save_pretrained(folder)` or copy it from the original model\n"
        ),
    ),
    "no such folder": Case(
        command=(*TRAIN, "base_model=./bsae"),
        base=nothing,
        says=(
            "brim: base_model: no such folder: ./bsae\n"
            "  expected: a local folder or a Hub id\n"
            "  fix: did you mean base?\n"
        ),
    ),
    "a hub id without a network": Case(
        command=(*TRAIN, "base_model=some-org/some-model"),
        says=(
            "brim: base_model: some-org/some-model is not on this machine, and the Hub could not be asked (***)\n"
            "  expected: a local folder or a Hub id\n"
            "  fix: point base_model to a local folder, or connect (and unset HF_HUB_OFFLINE) and try again\n"
        ),
    ),
    "a damaged config.json": Case(
        command=TRAIN,
        base=cut("config.json", 100),
        says=(
            "brim: {here}/base/config.json: config.json cannot be read: ***\n"
            "  fix: copy it from the original model again\n"
        ),
    ),
    "a config.json that contradicts itself": Case(
        command=TRAIN,
        base=change("config.json", '"num_attention_heads": 4', '"num_attention_heads": 3'),
        says=(
            "brim: {here}/base: config.json is damaged or does not fit: *** hidden size (32) is not a multiple ***\n"
            "  fix: copy it from the original model again\n"
        ),
    ),
    "an unknown architecture": Case(
        command=TRAIN,
        base=change("config.json", '"llama"', '"lama"'),
        says=(
            "brim: {here}/base: the architecture 'lama' is not a causal language model that this version of transformers knows\n"
            "  fix: upgrade transformers, or choose another base model\n"
        ),
    ),
    "truncated weights": Case(
        command=TRAIN,
        base=cut("model.safetensors", 5000),
        says=(
            "brim: {here}/base: a safetensors file is damaged: ***\n"
            "  expected: whole safetensors files that match config.json\n"
            "  fix: copy the folder anew from where it came\n"
        ),
    ),
    "weights of another shape": Case(
        command=TRAIN,
        base=change("config.json", '"intermediate_size": 64', '"intermediate_size": 80'),
        says=(
            "brim: {here}/base: 6 weights of the base model are of another shape than config.json says: model.layers.0.mlp.down_proj.weight is 32×64, not 32×80, model.layers.0.mlp.gate_proj.weight is 64×32, not 80×32, model.layers.0.mlp.up_proj.weight is 64×32, not 80×32 …\n"
            "  expected: weights that match config.json\n"
            "  fix: copy the folder anew, or check that it holds a causal language model\n"
        ),
    ),
    "weights that are missing": Case(
        command=TRAIN,
        base=change("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3'),
        says=(
            "brim: {here}/base: 9 weights of the base model are missing: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight …\n"
            "  expected: weights that match config.json\n"
            "  fix: copy the folder anew, or check that it holds a causal language model\n"
        ),
    ),
    "a damaged tokenizer": Case(
        command=TRAIN,
        base=cut("tokenizer.json", 100),
        says=(
            "brim: {here}/base/tokenizer.json: the tokenizer cannot be read: ***\n"
            "  fix: copy tokenizer.json from the original model again\n"
        ),
    ),
    "a model that brings its own code": Case(
        command=TRAIN,
        base=remote_code,
        says=(
            "brim: {here}/base/config.json: the base model asks for its own code to be run (auto_map in config.json)\n"
            "  expected: a folder of weights and settings alone\n"
            "  fix: choose a base model that transformers has a class for; otherwise read the code, and only if you trust who wrote it, set `trust_remote_code: true`\n"
        ),
    ),
    # The adapter
    "unknown target modules": Case(
        command=(*TRAIN, "adapter.target_modules=[q_prj]"),
        says=(
            "brim: adapter.target_modules: ***q_prj***\n"
            "  expected: names of linear layers of this model: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head\n"
            "  fix: set adapter.target_modules to some of them, or to all-linear\n"
        ),
    ),
    "an adapter folder that holds none": Case(
        command=(*TRAIN, "adapter.pretrained_adapter_weights=base"),
        base=nothing,
        says=(
            "brim: base: the adapter cannot be loaded: the folder holds no adapter_config.json and no adapter_model.safetensors\n"
            "  expected: a PEFT folder (adapter_config.json, adapter_model.safetensors) made for this base model\n"
            "  fix: check adapter.pretrained_adapter_weights and base_model\n"
        ),
    ),
    "a truncated adapter": Case(
        command=("evaluate", "run", "--dataset", "sums.jsonl"),
        run=both(remove("model/manifest.json"), cut("model/adapter_model.safetensors", 500)),
        says=(
            "brim: {here}/run/model: the adapter cannot be loaded: ***\n"
            "  expected: a PEFT folder (adapter_config.json, adapter_model.safetensors) made for this base model\n"
            "  fix: check adapter.pretrained_adapter_weights and base_model\n"
        ),
    ),
    "an adapter for other layers": Case(
        command=("evaluate", "run", "--dataset", "sums.jsonl"),
        run=both(remove("model/manifest.json"), change("model/adapter_config.json", "q_proj", "query")),
        says=(
            "brim: {here}/run/model: the adapter cannot be loaded: no layer takes base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight, base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight, base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight\n"
            "  expected: a PEFT folder (adapter_config.json, adapter_model.safetensors) made for this base model\n"
            "  fix: check adapter.pretrained_adapter_weights and base_model\n"
        ),
    ),
    # The output
    "an output below a file": Case(
        command=(*TRAIN[:-1], "sums.jsonl/run"),
        says=(
            "brim: sums.jsonl/run: the output directory cannot be written: Not a directory\n"
            "  fix: choose another with --output-directory\n"
        ),
    ),
    "an output that is a file": Case(
        command=(*TRAIN[:-1], "sums.jsonl"),
        says=("brim: sums.jsonl: the output directory is a file\n  fix: choose another with --output-directory\n"),
    ),
    "an output folder that holds other things": Case(
        command=(*TRAIN[:-1], "base"),
        base=nothing,
        says=(
            "brim: base: the output directory holds other things; nothing was changed\n"
            "  expected: a new or an empty folder\n"
            "  fix: choose another with --output-directory\n"
        ),
    ),
    "an existing run": Case(
        command=(*TRAIN[:-1], "run"),
        run=nothing,
        says=(
            "brim: run: there is a run in this folder already; nothing was changed\n"
            "  fix: continue it with --resume (in Python resume=True), or choose another folder with "
            "--output-directory\n"
        ),
    ),
    "resuming with another configuration": Case(
        command=(*TRAIN[:-1], "run", "--resume", "trainer.learning_rate=0.02"),
        run=nothing,
        says=(
            "brim: run/config.yaml: trainer.learning_rate is 0.02, but this run was started with 0.01\n"
            "  fix: set it back, or train anew into another folder\n"
        ),
    ),
    "predictions with an unknown ending": Case(
        command=("predict", "run", "--dataset", "sums.jsonl", "--output", "new.xlsx"),
        run=nothing,
        says=(
            "brim: new.xlsx: the output's ending '.xlsx' is not known\n"
            "  expected: .parquet, .jsonl, .csv\n"
            "  fix: name the file predictions.parquet, say\n"
        ),
    ),
    "predictions without an ending": Case(
        command=("predict", "run", "--dataset", "sums.jsonl", "--output", "new"),
        run=nothing,
        says=(
            "brim: new: the output has no ending\n"
            "  expected: .parquet, .jsonl, .csv\n"
            "  fix: name the file predictions.parquet, say\n"
        ),
    ),
    "predictions over a file": Case(
        command=("predict", "run", "--dataset", "sums.jsonl", "--output", "sums.jsonl"),
        run=nothing,
        says=("brim: sums.jsonl: the output file exists already; nothing was changed\n  fix: name another\n"),
    ),
    "predictions below a file": Case(
        command=("predict", "run", "--dataset", "sums.jsonl", "--output", "sums.jsonl/new.csv"),
        run=nothing,
        says=(
            "brim: sums.jsonl/new.csv: the output cannot be written: its path leads through a file\n"
            "  fix: name a file in a folder that may be written to and has room\n"
        ),
    ),
    "row figures over a file": Case(
        command=("evaluate", "run", "--dataset", "sums.jsonl", "--rows", "sums.jsonl"),
        run=nothing,
        says=("brim: sums.jsonl: the output file exists already; nothing was changed\n  fix: name another\n"),
    ),
    "predicting on predictions": Case(
        command=("predict", "run", "--dataset", "bad.csv", "--output", "new.csv"),
        files={"bad.csv": "row,question,answer_response\n0,a,b\n"},
        run=nothing,
        says=(
            "brim: bad.csv: the data has columns `row`, `answer_response`, names that predictions use themselves\n"
            "  fix: rename or remove them\n"
        ),
    ),
    "an empty prompt": Case(
        command=("predict", "run", "--dataset", "bad.csv", "--output", "new.csv"),
        files={"bad.csv": 'question,split\na,0\n"",0\n'},
        run=nothing,
        says=(
            "brim: bad.csv:3: 1 prompt is empty\n"
            "  expected: at least one token to go on from\n"
            "  fix: fill or remove the rows, give the prompt a template, or, for those of a data set, "
            "set preprocessing.on_bad_row: drop to go on without such rows\n"
        ),
    ),
    "new tokens beyond the context": Case(
        command=("predict", "run", "generation.max_new_tokens=500", "--dataset", "sums.jsonl", "--output", "new.csv"),
        run=nothing,
        says=(
            "brim: generation.max_new_tokens leaves no room for a prompt: it is 500, the model's context 128 tokens\n"
            "  fix: lower generation.max_new_tokens\n"
        ),
    ),
    "generation settings that transformers refuses": Case(
        command=(
            "predict",
            "run",
            "generation.bad_words_ids=[[5000]]",
            "--dataset",
            "sums.jsonl",
            "--output",
            "new.csv",
        ),
        run=nothing,
        says=(
            "brim: generation: transformers cannot generate with these settings: ***[5000]***\n"
            "  fix: change the keys that it names\n"
        ),
    ),
    "resuming in a folder that is no run": Case(
        command=("train", ".", "--resume", "--dataset", "sums.jsonl"),
        says=(
            "brim: .: the output directory holds other things; nothing was changed\n"
            "  expected: a new or an empty folder\n"
            "  fix: choose another with --output-directory\n"
        ),
    ),
    # The run
    "a run without a model": Case(
        command=("evaluate", "run", "--dataset", "sums.jsonl"),
        run=lambda folder: shutil.rmtree(folder / "model"),
        says=("brim: run: this run has no model yet\n  fix: finish it with `brim train run --resume`\n"),
    ),
    "evaluating data without answers": Case(
        command=("evaluate", "run", "--dataset", "bad.csv"),
        files={"bad.csv": "question\na\n"},
        run=nothing,
        says=(
            "brim: bad.csv: no column `answer`, which output_features[0] names\n"
            "  expected: one of the columns that are there: `question`\n"
            "  fix: name a column of the data, or add this one\n"
        ),
    ),
    "evaluating an empty split": Case(
        command=("evaluate", "run", "--dataset", "bad.csv", "--split", "validation"),
        files={"bad.csv": HEAD + "a,b,0\n"},
        run=nothing,
        says=("brim: bad.csv: the split 'validation' has no rows\n  fix: choose another with --split\n"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_message_and_nothing_is_damaged(case, brim, project, tiny_base, finished_run, digests):
    if case.edit:
        change("config.yaml", *case.edit)(project)
    if case.base:
        case.base(shutil.copytree(tiny_base, project / "base"))
        change("config.yaml", str(tiny_base), "base")(project)
    if case.run:
        case.run(shutil.copytree(finished_run, project / "run"))
    for name, content in case.files.items():
        (project / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = digests(project, tiny_base)

    done = brim(*case.command)

    assert done.code == 2
    assert like(case.says.replace("{here}", str(project)), done.err)
    assert digests(project, tiny_base) == before


def like(expected, text):
    """Whether the texts are equal, but for what stands in place of ***, and for choices that were told before."""
    pattern = CHOICES + ".*".join(map(re.escape, expected.split("***")))
    assert re.fullmatch(pattern, text), f"expected:\n{expected}\nsaid:\n{text}"
    return True
