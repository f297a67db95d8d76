"""Mistakes on the command line: each is one message of the form that all errors have, and says what to write."""

from __future__ import annotations

import json

import pytest

BASE = "{base_model: m, adapter: lora, trainer: {type: finetune}}"

# Arguments, then what is said to write instead.
FLAGS = {
    "train c.yaml --epochs=1": "write trainer.epochs=1",
    "train c.yaml --epochs 1": "write trainer.epochs=1",
    "train c.yaml --learning-rate 1e-4": "write trainer.learning_rate=0.0001",
    "train c.yaml --lora_r 16": "write adapter.r=16",  # the file has an adapter
    "train --lora_r 16": "write adapter.r=16 and adapter.type=lora",
    "train c.yaml --trainer.epochs=3": "write trainer.epochs=3",
    "train c.yaml -trainer.epochs=3": "write trainer.epochs=3",
    "train --fp16 c.yaml": "write precision=fp16-mixed (left out, brim takes it where the GPU has no bfloat16)",
    "train c.yaml --precision bf17": "the key is precision: auto, fp32, bf16-true, bf16-mixed or fp16-mixed",
    "predict c.yaml --max-new-tokens 64": "write generation.max_new_tokens=64",
    "train --config c.yaml": "give it without a flag: brim train c.yaml",
    "train c.yaml --output_directory out": "did you mean --output-directory?",
    "train c.yaml --output out": "did you mean --output-directory?",
    "train c.yaml --datset x.csv": "did you mean --dataset?",
    "check c.yaml --seeds 3": "remove it: it belongs to brim compare",
    "check c.yaml --nonsense 3": "`brim check --help` lists its options; keys of the configuration are written as "
    "trainer.epochs=1",
    "train -h": "write --help",
}
OTHERS = {
    "train": ("brim train needs CONFIG_OR_RUN", "A YAML file, or the folder of a run or of a base model"),
    "upload run": ("brim upload needs ORG/NAME", "The repository"),
    "export run": ("brim export needs --output DIR", "A new or an empty folder"),
    "train c.yaml --dataset": ("--dataset is given nothing", "--dataset FILE: csv"),
    "train c.yaml --resume=true": ("--resume takes no value", "write --resume alone"),
    "check c.yaml --show x": ("--show is 'x'", "a whole number of at least 0"),
    "check c.yaml --show=-1": ("--show is '-1'", "a whole number of at least 0"),
    "plan c.yaml --rows 0": ("--rows is '0'", "a whole number of at least 1 and at most "),
    "export run --output x --max-divergence y": ("--max-divergence is 'y'", "a number"),
    "trian c.yaml": ("brim has no verb trian", "did you mean brim train?"),
    "finetune c.yaml": ("brim has no verb finetune", "did you mean brim train?"),
    "c.yaml": ("brim has no verb c.yaml", "name the verb first, such as brim train c.yaml"),
    "--dataset x.csv train c.yaml": ("brim has no option --dataset", "the verb comes first: brim train …"),
    "-h": ("brim has no option -h", "write brim --help"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(BASE)


@pytest.mark.parametrize("command", FLAGS)
def test_a_flag_that_a_verb_has_not_is_answered_with_what_to_write(brim, command):
    done = brim(*command.split())
    flag = next(each for each in command.split() if each.startswith("-")).partition("=")[0]
    verb = command.split()[0]
    assert (done.code, done.out) == (2, "")
    assert done.err == f"brim: command line: brim {verb} has no option {flag}\n  fix: {FLAGS[command]}\n"


@pytest.mark.parametrize("command", OTHERS)
def test_any_other_mistake_is_one_message(brim, command):
    done = brim(*command.split())
    what, how = OTHERS[command]
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"brim: command line: {what}\n")
    assert how in done.err


@pytest.mark.parametrize("command", [*FLAGS, *OTHERS])
def test_with_json_it_is_the_same_as_json(brim, command):
    lines, as_json = brim(*command.split()), brim(*command.split(), "--json")
    if command.endswith("--dataset"):
        return  # whose value is --json, then
    assert (as_json.code, as_json.err) == (2, "")
    error = json.loads(as_json.out)["error"]
    assert (error["kind"], error["exit_code"]) == ("InputError", 2)
    (problem,) = error["problems"]
    assert problem["where"] == "command line"
    assert f"{problem['what']}\n" in lines.err
    assert f"  fix: {problem['fix']}\n" in lines.err or not problem["fix"]


def test_all_unknown_flags_are_told_at_once(brim):
    done = brim("train", "c.yaml", "--epochs", "1", "--dataset", "x.csv", "--lr", "1e-4", "--batch-size=4")
    assert [line for line in done.err.splitlines() if "fix" in line] == [
        "  fix: write trainer.epochs=1",
        "  fix: write trainer.learning_rate=0.0001",
        "  fix: write trainer.batch_size=4",
    ]


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["trainer.epochs", "=", "1"], "write trainer.epochs=1, with = and no spaces around it"),
        (["trainer.epochs", "=1"], "write trainer.epochs=1, with = and no spaces around it"),
        (["trainer.epochs=", "1"], "write trainer.epochs=1, with = and no spaces around it"),
        (["trainer.epochs:", "1"], "write trainer.epochs=1, with = and no spaces around it"),
        (["trainer.epochs: 1"], "write trainer.epochs=1, with = and no spaces around it"),
        (["prompt.template: {q} and more"], "write 'prompt.template={q} and more', with = and no spaces around it"),
        (["'trainer.epochs=1'"], "write trainer.epochs=1; your shell hands quotes of this kind on"),
        (["“trainer.epochs=1”"], "write trainer.epochs=1; your shell hands quotes of this kind on"),
        (["–verbose"], "it begins with a long dash, as word processors write one: write --verbose"),
        (["c.yaml"], "name one configuration; `brim compare` takes several"),
    ],
)
def test_what_was_meant_as_an_override_is_told_once(brim, arguments, fix):
    done = brim("check", "c.yaml", *arguments)
    assert done.code == 2
    assert done.err.startswith(f"brim: override {' '.join(arguments)}: not an override\n  expected: KEY=VALUE")
    assert f"  fix: {fix}" in done.err
    assert done.err.count("not an override") == 1


@pytest.mark.parametrize("override", ["trainer.epochs = 2", "trainer.epochs =2", "adapter="])
def test_one_argument_with_spaces_and_one_without_a_value_stay_what_they_are(override):
    from brim.config import load_config

    config = load_config("c.yaml", [override, "trainer.batch_size=2"]).config
    assert (config.trainer.epochs == 2) is (override != "adapter=")
    assert (config.adapter is None) is (override == "adapter=")


FILES = {
    "rows.csv": ("q,a\n1,2\n", "name the configuration first: `brim train config.yaml --dataset rows.csv`"),
    "quote.yaml": ('a: "b\nc: d\n', "close the bracket or the quote that opens in line 1"),
    "brace.yaml": ("a: b\nc: {d: 1\n", "close the bracket or the quote that opens in line 2"),
    "nospace.yaml": ("base_model:m\ntrainer:\n  type: none\n", "a space after each key's colon"),
    "tab.yaml": ("trainer:\n\ttype: none\n", "indent with spaces"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration_is_answered_with_what_to_do(brim, tmp_path, name):
    text, fix = FILES[name]
    (tmp_path / name).write_text(text)
    done = brim("check", name)
    assert done.code == 2
    assert fix in done.err


@pytest.mark.parametrize(
    ("verb", "path", "fix"),
    [
        ("check", ".", "name the file: c.yaml"),
        ("train", ".", "name the run's folder, or the YAML file, such as c.yaml"),
        ("check", "c", "did you mean c.yaml?"),
        ("train", "c.yml", "did you mean c.yaml?"),
    ],
)
def test_a_folder_or_a_name_beside_the_file_leads_to_it(brim, verb, path, fix):
    done = brim(verb, path)
    assert done.code == 2
    assert done.err.endswith(f"  fix: {fix}\n")
