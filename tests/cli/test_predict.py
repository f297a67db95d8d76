"""`brim predict`, `brim evaluate` and `brim embed`: of runs and of base models, with labels, examples and bad rows."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from tests.cli.conftest import records, write
from tokenizers import Tokenizer

from brim.infer import Journal

pytestmark = pytest.mark.run
DATA = ("--dataset", "sums.jsonl")


# Predictions


def test_predict_counts_what_it_wrote_for_people_and_for_programs(brim, project, finished_run):
    predict = ("predict", finished_run, *DATA, "--split", "validation", "--output")
    told, rows = json.loads(brim(*predict, "new/out.jsonl", "--json").out), records("new/out.jsonl")
    assert told.pop("seconds") > 0
    assert [row["row"] for row in rows] == [7, 17, 27, 37]
    tokens = sum(row["num_response_tokens"] for row in rows)
    stopped = sum(row["finish_reason"] == "stop" for row in rows)
    assert told == {
        "output": "new/out.jsonl", "ledger": None, "summary": "new/out.jsonl.summary.json", "num_rows": 4,
        "num_new_rows": 4, "num_response_tokens": tokens, "num_stopped": stopped,
    }  # fmt: skip
    printed = brim(*predict, "out.jsonl").out
    assert printed.startswith(f"done    4 rows, {tokens:,} tokens in ")
    assert printed.endswith(f"; {stopped} ended by themselves, {4 - stopped} at max_new_tokens\nwritten out.jsonl\n")


@pytest.mark.parametrize(
    "settings",
    [
        ["num_beams=2", "early_stopping=never", "length_penalty=-1", "bad_words_ids=[]"],
        ["do_sample=true", "temperature=1.5", "top_k=null", "top_p=0.5", "eos_token_id=[0, 5]", "pad_token_id=1"],
        ["sequence_bias=[[[12, 7], -1.5]]", "bad_words_ids=[[3, 4]]", "suppress_tokens=[5]", "forced_eos_token_id=7"],
        ["guidance_scale=1.5", "exponential_decay_length_penalty=[2, 1.05]", "use_cache=false", "temperature=0"],
    ],
    ids=" ".join,
)
def test_every_generation_setting_reaches_transformers(brim, project, finished_run, settings):
    overrides = [f"generation.{each}" for each in settings]
    done = brim("predict", finished_run, *overrides, *DATA, "--split", "test", "--output", "o.csv", code=0)
    # The plan, how far it is where that takes long, and not a word of libraries.
    labels = {line[:8].strip() for line in done.err.splitlines()}
    assert labels <= {"model", "data", "batch", "memory", "time", "note", "more", "", "generati"}
    assert len(pd.read_csv("o.csv")) == 8


# A prediction as a job


@pytest.fixture
def predict(brim, untrained):
    """predict("--resume", …): of sums.jsonl to out.csv."""
    return lambda *more: brim("predict", "config.yaml", "trainer.batch_size=4", *DATA, "--output", "out.csv", *more)


def test_ctrl_c_says_how_to_go_on(predict, monkeypatch):
    append = Journal.append

    def then_ctrl_c(self, records):
        append(self, records)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", then_ctrl_c)
        done = predict()
    assert done.code == 130
    assert "\nbrim: out.csv: stopped after " in done.err
    assert done.err.endswith(f"  fix: continue with `{shlex.join(['brim', *sys.argv[1:]])} --resume`\n")


def test_scores_and_keys_are_options(predict, project, sums):
    write(project / "sums.jsonl", [{**row, "id": n} for n, row in enumerate(sums)])
    assert predict("--scores", "--key", "id", "--split", "test").code == 0
    assert (project / "out.csv").read_text().splitlines()[0].endswith(',"log_probability"')


def test_a_prediction_without_a_data_set_names_the_one_that_it_takes(brim, project):
    """The configuration's own, of which the larger part trains."""
    own = ("predict", "config.yaml", "dataset=sums.jsonl")
    told = "no data set was named (--dataset, in Python dataset=…): {} of sums.jsonl are predicted, {}"
    whole = told.format("40 rows", "all splits of the configuration's own data, those that it trains on among them")
    assert whole in " ".join(brim(*own, "--plan").out.split())
    test = told.format("8 rows", "the split test of the configuration's own data")
    assert test in " ".join(brim(*own, "--output", "test.csv", "--split", "test").err.split())
    named = brim("predict", "config.yaml", *DATA, "--split", "test", "--output", "named.csv")
    assert (named.code, "no data set was named" in named.err) == (0, False)


def test_the_plan_is_a_table_or_json_before_anything_is_loaded(brim, untrained, monkeypatch):
    monkeypatch.setattr("brim.models.load.load_base", None)  # nothing is loaded
    plan = ("predict", "config.yaml", *DATA, "--plan")
    done = brim(*plan, "--device", "t4", "--verbose")
    assert re.search(
        r"^base: generate for 40 rows, on t4\n.*^rows +40: all rows together", done.out, re.DOTALL | re.MULTILINE
    )
    assert max(map(len, done.out.splitlines())) <= 80
    told = json.loads(brim(*plan, "--json", "trainer.batch_size=3").out)
    assert (told["shapes"][0]["rows"], told["fixed_rows"], told["would_take"]) == (3, 3, 40)
    assert (told["max_new_tokens"], told["engine"]) == (6, "slots")
    several = json.loads(brim(*plan, "--json", "--gpus", "12", "--device", "t4").out)
    assert (several["num_members"], several["prompts"]["num_rows"], several["shapes"][0]["rows"]) == (12, 4, 4)
    one, two = (json.loads(brim(*plan, "--json", "--gpus", number).out)["budget"] for number in ("1", "2"))
    assert abs(two["limit_bytes"] / one["limit_bytes"] - 0.5) < 0.2  # of this machine's memory, which others use, too
    card = brim(*plan, "--gpus", "12", "--device", "t4").out
    assert re.search("^runs +12 processes; memory, time and up to 4 prompts are of each$", card, re.MULTILINE)
    assert "--gpus is '0'" in brim(*plan, "--gpus", "0", code=2).err


# Figures


def test_evaluate_prints_figures_for_people_and_for_programs(brim, project, finished_run):
    people = brim("evaluate", finished_run, *DATA)
    programs = json.loads(brim("evaluate", finished_run, *DATA, "--json").out)
    low, high = programs["loss_interval"]
    assert low < programs["loss"] < high
    assert f"loss               {programs['loss']:.4f} ({low:.3f} to {high:.3f})" in people.out
    assert programs["intervals"].keys() == {"loss", "perplexity", "token_accuracy", "sequence_accuracy"}
    assert (programs["split"], programs["num_rows"]) == ("full", 40)
    command = ("evaluate", finished_run, *DATA, "--split", "test", "--texts", "--rows", "new/rows.csv", "--json")
    told = json.loads(brim(*command).out)
    assert {"bleu", "rouge1", "rouge2", "rougeL", "exact_match"} < told.keys()
    rows = pd.read_csv(project / "new" / "rows.csv")
    assert rows["row"].tolist() == [8, 9, 18, 19, 28, 29, 38, 39]
    assert rows["loss"].sum() / rows["num_supervised"].sum() == pytest.approx(told["loss"], rel=1e-12)
    none = brim("evaluate", "config.yaml", "trainer={type: none}", "adapter=null", *DATA)
    assert (none.code, "before training" in none.err) == (0, False), "it is not a run that could be trained"


def test_evaluate_compares_with_the_base_for_people_and_for_programs(brim, project, finished_run):
    command = ("evaluate", finished_run, *DATA, "--against-base")
    people, told = brim(*command), json.loads(brim(*command, "--json").out)
    against = told["against"]
    assert told["loss"] - against["metrics"]["loss"] == pytest.approx(against["differences"]["loss"])
    low, high = against["difference_intervals"]["loss"]
    assert f"  {against['differences']['loss']:+.4f} ({low:+.3f} to {high:+.3f})\n" in people.out


def test_figures_that_are_no_numbers_are_still_json(brim, untrained, tiny_base):
    base = shutil.copytree(tiny_base, untrained / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    done = brim("evaluate", "config.yaml", "base_model=base", *DATA, "--json")
    told = json.loads(done.out, parse_constant=pytest.fail)
    assert (told["loss"], told["perplexity"], told["loss_interval"]) == (None, None, [None, None])
    assert told["num_rows"] == 40


# Embeddings


def test_vectors_in_the_order_of_the_input_with_options_and_json(brim, project, finished_run):
    embed = ("embed", finished_run, *DATA)
    done = brim(*embed, "--output", "new/emb.parquet")
    assert (done.code, done.out.endswith("\nwritten new/emb.parquet\n")) == (0, True)
    table = pq.read_table("new/emb.parquet")
    assert (table.column_names, table["row"].to_pylist()) == (["row", "embedding"], list(range(40)))

    few = (*embed, "--split", "validation", "--output", "1.parquet")
    told = json.loads(brim(*few, "--layer", "-1", "--pooling", "last", "--normalize", "--json").out)
    assert (told.pop("num_tokens") > 4, told.pop("seconds") > 0) == (True, True)
    assert told == {
        "output": "1.parquet", "ledger": None, "layer": "-1", "pooling": "last", "normalized": True, "width": 32,
        "num_rows": 4,
    }  # fmt: skip
    vectors = np.array(pq.read_table("1.parquet")["embedding"].to_pylist())
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.ones(4), rtol=1e-5)


# Categories

CATEGORIES = """\
base_model: {base}
prompt: {{task: Say whether the sum is odd or even.}}
input_features: [{{name: question, type: text}}]
output_features:
  - name: kind
    type: category
    preprocessing: {{fallback_label: even}}
    decoder: {{match: {{odd: {{type: contains, value: odd}}, even: {{type: regex, value: \\beven\\b}}}}}}
generation: {{do_sample: false}}
trainer: {{type: none}}
"""
LABELS = ("config.yaml", "output_features.0.decoder.constrain_to_vocabulary=true", "--dataset", "rows.jsonl")


@pytest.fixture
def labelled(project, tiny_base):
    """config.yaml, and rows.jsonl with labels."""
    (project / "config.yaml").write_text(CATEGORIES.format(base=tiny_base))
    rows = [{"question": f"{a} + {b}", "kind": ("even", "odd")[(a + b) % 2]} for a in range(3) for b in range(4)]
    write(project / "rows.jsonl", rows)
    return project


def test_predictions_are_labels_and_their_accuracy_is_shown_without_being_asked(brim, labelled):
    done = brim("predict", *LABELS, "--output", "labels.jsonl", code=0)
    labels = [row["kind_predictions"] for row in records("labels.jsonl")]
    counted = sorted(((labels.count(label), label) for label in set(labels)), reverse=True)
    assert f"labels  {', '.join(f'{label} {count}' for count, label in counted)}" in done.out
    told = json.loads(brim("evaluate", *LABELS, "--rows", "each.jsonl", "--json", code=0).out)
    right = [a["label"] == b["kind"] for a, b in zip(records("each.jsonl"), records("rows.jsonl"), strict=True)]
    assert told["category_accuracy"] == sum(right) / 12
    assert "bleu" not in told
    for command in (("evaluate", *LABELS), ("train", *LABELS, "preprocessing.split=random")):
        printed = brim(*command)
        assert (printed.code, "category accuracy" in printed.out, "--texts" in printed.out) == (0, True, False)


def test_memory_and_plan_count_the_tokens_of_the_longest_label_as_predict_does(brim, labelled, tiny_base):
    """The labels `odd` and `even`; an oracle: the tokenizer itself."""
    tokenizer = Tokenizer.from_file(str(tiny_base / "tokenizer.json"))
    forms = [text for label in ("odd", "even") for text in (label, f" {label}")]
    longest = 1 + max(len(tokenizer.encode(form, add_special_tokens=False).ids) for form in forms)
    memory = ("memory", *LABELS[:2], "--phase", "generate", "--device", "t4", "--sequence-length", 16)
    done = brim(*memory, "--verbose")
    assert f"generation.max_new_tokens: {longest} (the longest label and its end)" in done.out + done.err
    given = (f"generation.max_new_tokens={longest}",)
    counted, same = (json.loads(brim(*memory, *more, "--json").out)["total_bytes"] for more in ((), given))
    assert counted == same
    for labels in ((), ("output_features.0.decoder.match=null",)):  # named, or those of the data
        plan = brim("predict", *LABELS, *labels, "--plan", "--json")
        assert json.loads(plan.out)["max_new_tokens"] == longest


# Examples from the training split


def test_check_shows_rows_with_their_examples_and_loads_no_model_of_sentences(brim, untrained, sums):
    with (untrained / "config.yaml").open("a") as file:
        file.write('dataset: sums.jsonl\nprompt:\n  template: "{__context__} {question}"\n')
    done = brim("check", "config.yaml", "prompt.retrieval={type: random, k: 2}", "--show", "1")
    assert (done.code, done.err) == (0, "")
    (context,) = re.findall(r"^\[.*\](?= add 0 and 0 =« 0<\|end\|>»$)", done.out, re.MULTILINE)
    labelled = {row["question"]: row["answer"] for row in sums if row["split"] == 0}
    examples = ast.literal_eval(context)
    assert len(examples) == 2
    assert all(labelled[example["question"]] == example["answer"] for example in examples)
    done = brim("check", "config.yaml", "prompt.retrieval={type: semantic, k: 2, model_name: /no/model}")
    assert (done.code, done.err) == (0, "")
    assert "prompt.retrieval is semantic, and its model is not loaded for a check" in done.out
    done = brim("check", "config.yaml", "prompt={task: Add.}", "--show", "1")
    assert "SAMPLE INPUT: add 0 and 0 =\n\nUSER: Complete the following task: Add.\n\nASSISTANT:\n« 0" in done.out


def test_a_run_with_examples_is_trained_evaluated_and_asked_anew(brim, project):
    prompt = 'prompt={template: "{__context__} {question}", retrieval: {type: random, k: 1}}'
    assert brim("train", "config.yaml", prompt, "trainer.train_steps=1", *DATA, "--output-directory", "run").code == 0
    (project / "new.jsonl").write_text('{"question": "add 9 and 9 ="}\n')
    assert brim("predict", "run", "--dataset", "new.jsonl", "--output", "new.parquet").code == 0
    assert pd.read_parquet(project / "new.parquet")["num_prompt_tokens"].item() > 40
    assert json.loads(brim("evaluate", "run", "--split", "test", "--json").out)["num_rows"] == 8


# Bad rows; each kind of them in each format stands in faults/rows.py

DROP = "preprocessing.on_bad_row=drop"
BROKEN = "bad.jsonl:{line}: not valid JSON: Expecting property name enclosed in double quotes at character 2"
DROPPED = [
    (3, BROKEN.format(line=4)),
    (21, BROKEN.format(line=22)),
    (32, "bad.jsonl:33: column `question` holds a number here and text in most rows"),
]
SUMMARY = f"3 of 42 rows were dropped, since they cannot be read or used ({'; '.join(why for _, why in DROPPED)})"


def ledger(path):
    return [(entry["key"], entry["event"], entry["why"]) for entry in pq.read_table(path).to_pylist()]


@pytest.fixture
def bad_file(project, sums):
    """The 40 sums with a broken line before each of rows 3 and 20 (lines 4 and 22), a number for a text in row 30."""
    lines = [json.dumps(row) for row in sums]
    lines[30] = json.dumps({**sums[30], "question": 3})
    lines.insert(20, "{broken")
    lines.insert(3, "{broken")
    (project / "bad.jsonl").write_text("\n".join(lines) + "\n")
    return project / "bad.jsonl"


def test_where_they_are_to_be_dropped_every_verb_goes_on_and_names_them(brim, project, bad_file, sums):
    bad = ("config.yaml", DROP, "--dataset", bad_file.name)
    expected = [(key, "dropped_bad", why) for key, why in DROPPED]
    assert SUMMARY in " ".join(brim("check", *bad, code=0).out.split())  # wrapped at the terminal's width
    done = brim("evaluate", *bad, "--split", "full", "--json", "--verbose")
    assert (done.code, SUMMARY in done.err, json.loads(done.out)["num_rows"]) == (0, True, 39)
    done = brim("predict", *bad, "--output", "out.jsonl")
    in_short = f"3 of 42 rows dropped: {DROPPED[0][1]} and 2 more"
    assert (done.code, in_short in " ".join(done.err.split())) == (0, True)
    assert done.out.endswith("written out.jsonl\nledger  out.jsonl.ledger.parquet (rows that were cut or left out)\n")
    assert ledger("out.jsonl.ledger.parquet") == expected
    rows = records("out.jsonl")
    assert [row["row"] for row in rows] == [key for key in range(42) if key not in dict(DROPPED)]
    assert [row["question"] for row in rows] == [row["question"] for number, row in enumerate(sums) if number != 30]
    done = brim("train", *bad, "trainer.epochs=1", "--output-directory", "run")
    assert (done.code, in_short in " ".join(done.err.split())) == (0, True)
    assert SUMMARY in (project / "run/notes.txt").read_text()
    assert ledger("run/ledger.parquet") == expected
    assert json.loads((project / "run" / "plan.json").read_text())["rows"] == {"train": 27, "validation": 4, "test": 8}


def test_without_bad_rows_there_is_no_ledger_and_an_earlier_one_is_not_written_over(brim, untrained, bad_file):
    predict = ("predict", "config.yaml", DROP, "--dataset")
    done = brim(*predict, "sums.jsonl", "--split", "test", "--output", "out.jsonl")
    assert (done.code, "left out" in done.out) == (0, False)
    assert not (untrained / "out.jsonl.ledger.parquet").exists()
    taken = untrained / "other.jsonl.ledger.parquet"
    taken.write_text("mine")
    done = brim(*predict, "bad.jsonl", "--output", "other.jsonl", code=2)
    assert done.err.startswith(f"brim: {taken.name}: the output file exists already; nothing was changed\n")
    assert taken.read_text() == "mine"
    assert not (untrained / "other.jsonl").exists()


# Prompts that cannot be continued: the tiny model's context is 128 tokens, and 6 new ones are asked for

PROMPTS = ["add 1 and 2 =", "", "x" * 300, "y" * 122, "z"]
PREDICT = ("predict", "config.yaml", "--dataset", "prompts.csv", "--output", "out.csv")
OVERLONG = "and the context less generation.max_new_tokens is 122 tokens"


@pytest.fixture
def prompts(project):
    rows = pd.DataFrame({"question": PROMPTS, "answer": [" 3"] * 5, "split": [2] * 5})
    rows.to_csv(project / "prompts.csv", index=False)
    return project


def test_prompts_that_cannot_be_continued_are_errors_that_name_the_policies(brim, prompts, golden):
    done = brim(*PREDICT, code=2)
    golden("cli/prompts_that_cannot_be_continued.txt", done.err[done.err.index("brim: ") :])
    assert "1 prompt is too long" in brim(*PREDICT, DROP).err
    assert "1 prompt is empty" in brim(*PREDICT, "preprocessing.on_overlong=drop").err


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_prompts_that_cannot_be_continued_are_left_out_or_cut(brim, prompts, policy):
    assert brim(*PREDICT, DROP, f"preprocessing.on_overlong={policy}").code == 0
    rows = pd.read_csv(prompts / "out.csv")
    assert rows["row"].tolist() == ([0, 3, 4] if policy == "drop" else [0, 2, 3, 4])
    assert rows["num_prompt_tokens"].max() == 122
    entries = pq.read_table(prompts / "out.csv.ledger.parquet").to_pylist()
    why = f"preprocessing.on_overlong is {policy}, {OVERLONG}"
    assert [tuple(entry[name] for name in ("key", "event", "why", "tokens_before", "tokens_after")) for entry in entries] == [
        (1, "filled_missing", "no value in `question`", None, None),
        (1, "dropped_bad", "prompts.csv:3: the prompt is empty", None, None),
        (2, "dropped_overlong", why, 300, 0) if policy == "drop" else (2, "cut_prompt", why, 300, 122),
    ]  # fmt: skip
    if policy == "truncate":
        (prompts / "cut.csv").write_text(f'question,answer,split\n"{"x" * 122}", 3,2\n')
        assert brim("predict", "config.yaml", "--dataset", "cut.csv", "--output", "alone.csv").code == 0
        assert pd.read_csv(prompts / "alone.csv")["answer_response"][0] == rows["answer_response"][1]


def test_evaluate_leaves_out_what_it_would_have_to_continue(brim, prompts):
    arguments = ("evaluate", "config.yaml", "--dataset", "prompts.csv", "preprocessing.on_overlong=drop", "--json")
    assert json.loads(brim(*arguments).out)["num_rows"] == 4  # the empty prompt has an answer to score
    with_texts = brim(*arguments, "--texts", DROP, "-v")
    assert (with_texts.code, json.loads(with_texts.out)["num_rows"]) == (0, 3)
    assert "1 of 5 rows were dropped, since they cannot be read or used (prompts.csv:3: the prompt" in with_texts.err
    assert brim(*arguments, "--texts").code == 2
