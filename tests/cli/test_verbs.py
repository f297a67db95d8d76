"""The verbs on input that is odd but right."""

import json
import re
import shutil

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

UNTRAINED = "this is the model before training; for what a run has learned, name the run's folder\n"


@pytest.fixture
def run(project, finished_run):
    """A finished run that may be written to."""
    return shutil.copytree(finished_run, project / "run")


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# check


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: (
            text.replace("question\n", "&q question\n").replace("answer\n", "answer\n    column: answer\n").encode()
        ),
        lambda text: text.replace("adapter: lora", "adapter: &a {type: lora}").encode(),
    ],
    ids=["CRLF", "byte order mark", "anchors", "flow style"],
)
def test_yaml_may_be_written_in_many_ways(brim, project, encode):
    config = project / "config.yaml"
    config.write_bytes(encode(config.read_text()))
    done = brim("check", "config.yaml", "--dataset", "sums.jsonl")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("config.yaml: the configuration is right; llama with 128 tokens of context\n")


@pytest.mark.parametrize("name", ["my data.csv", "Zahlen – größer.csv", "a'b\"c.csv", "[bold].csv", "UPPER.CSV"])
@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_data_files_may_have_odd_names_and_windows_line_ends(brim, project, name, head):
    (project / name).write_bytes(head + b"question,answer,split\r\nwhat,this,0\r\n")
    done = brim("check", "config.yaml", "--dataset", name, "--show", "1")
    assert (done.code, done.err) == (0, "")
    assert f"\n{name}: 1 row\n" in done.out
    assert "what«this<|end|>»" in done.out


def test_what_looks_like_markup_is_shown_as_it_is(brim, project):
    (project / "data.jsonl").write_text('{"question": "[red]a[/red]", "answer": "[/]", "split": 0}\n')
    done = brim("check", "config.yaml", "--dataset", "data.jsonl", "--show", "5")
    assert "[red]a[/red]«[/]<|end|>»" in done.out


def test_check_takes_a_run_too_and_tells_json(brim, run, digests):
    before = digests(run)
    done = brim("check", run, "--dataset", "sums.jsonl", "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["config"] == str(run / "config.yaml")
    assert [split["num_rows"] for split in told["data"]["splits"]] == [28, 4, 8]
    assert digests(run) == before


# train


def test_a_start_that_failed_can_be_repeated_in_the_same_folder(brim, project):
    command = ("train", "config.yaml", "trainer.train_steps=1", "--dataset", "sums.jsonl", "--output-directory", "new")
    assert brim(*command, "adapter.target_modules=[q_prj]").code == 2
    assert brim(*command, "adapter.target_modules=[q_proj]").code == 0


def test_the_run_knows_its_data(brim, project):
    done = brim("train", "config.yaml", "trainer.train_steps=1", "--dataset", "sums.jsonl", "--output-directory", "new")
    assert done.code == 0
    (project / "config.yaml").unlink()
    evaluated = brim("evaluate", "new", "--json")
    assert json.loads(evaluated.out)["split"] == "test"
    assert json.loads(evaluated.out)["num_rows"] == 8


def test_a_run_whose_data_moved_can_be_resumed(brim, project):
    command = ("train", "config.yaml", "trainer.train_steps=1", "--output-directory", "new", "--dataset")
    assert brim(*command, "sums.jsonl").code == 0
    (project / "sums.jsonl").rename(project / "moved.jsonl")
    assert brim(*command, "moved.jsonl", "--resume").code == 0


def test_resume_starts_anew_with_any_configuration_where_no_step_was_saved(brim, project):
    command = ("train", "config.yaml", "trainer.train_steps=1", "--dataset", "sums.jsonl", "--output-directory", "new")
    assert brim(*command).code == 0
    shutil.rmtree(project / "new" / "checkpoints")
    done = brim(*command, "trainer.learning_rate=0.5", "--resume")
    assert done.code == 0
    assert "nothing to continue in new: the run starts anew\n" in done.err
    assert "learning_rate: 0.5\n" in (project / "new" / "config.yaml").read_text()


def test_a_finished_run_says_so_and_a_continued_one_counts_its_own_steps(brim, project):
    command = ("train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "new")
    first = brim(*command, "trainer.train_steps=2")
    assert re.search(r"^2 steps in \d", first.out, re.MULTILINE)

    again = brim("train", "new", "--resume")
    assert again.code == 0
    assert "no step was left to make: the run had ended after step 2\n" in again.out
    assert " steps in " not in again.out
    assert (
        "nothing is left to train: the run ended after step 2 (16 samples), and its model and figures are written "
        "once more; `brim train new --resume trainer.train_steps=4` trains it for longer\n"
    ) in again.err
    assert "continuing" not in again.err

    longer = brim("train", "new", "--resume", "trainer.train_steps=3", "--json")
    told = json.loads(longer.out)
    assert (told["num_steps"], told["num_new_steps"]) == (3, 1)
    assert "continuing after step 2 (16 samples)" in longer.err
    last = brim("train", "new", "--resume", "trainer.train_steps=4")
    assert re.search(r"^1 step in \d.*, 4 in all$", last.out, re.MULTILINE)


def test_a_function_that_prints_does_so_once_an_epoch_and_never_on_stdout(brim, project):
    (project / "brim_test_printing.py").write_text(
        "def increase(epoch, current_batch_size):\n    print('asked', epoch)\n    return 2\n"
    )
    done = brim(
        "train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "new", "--json",
        "trainer.batch_size=auto", "trainer.batch_increase_function=brim_test_printing:increase",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["num_steps"] > 0
    assert [line for line in done.err.splitlines() if "asked" in line] == ["asked 0", "asked 1"]


def test_a_run_that_ended_early_says_so(brim, project):
    early = ("trainer.early_stop=1", "trainer.train_steps=12", "trainer.learning_rate=1e-30")
    brim("train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "new", *early)
    again = brim("train", "new", "--resume")
    assert "the run was ended early by trainer.early_stop: 1, after step 8 (56 samples)" in again.err
    assert "`brim train new --resume trainer.early_stop=-1` trains it for longer" in again.err
    longer = brim("train", "new", "--resume", "trainer.early_stop=-1")
    assert re.search(r"^4 steps in \d.*, 12 in all$", longer.out, re.MULTILINE)


def test_one_row_is_enough_and_the_empty_splits_are_told(brim, project):
    (project / "one.csv").write_text("question,answer,split\nwhat,this,0\n")
    done = brim("train", "config.yaml", "--dataset", "one.csv", "--output-directory", "new")
    assert done.code == 0
    assert "the validation split has no rows\nthe test split has no rows\n" in done.err
    assert "2 steps in " in done.out
    assert (project / "new" / "model" / "adapter_model.safetensors").exists()


def test_an_effective_batch_beyond_the_data_is_one_step_an_epoch(brim, project):
    done = brim(
        "train", "config.yaml", "trainer.batch_size=100", "trainer.effective_batch_size=1000",
        "--dataset", "sums.jsonl", "--output-directory", "new",
    )  # fmt: skip
    assert done.code == 0
    assert "2 steps in " in done.out
    steps = [record for record in records(project / "new" / "metrics.jsonl") if "learning_rate" in record]
    assert [(step["effective_batch_size"], step["num_micro_batches"]) for step in steps] == [(28, 1), (28, 1)]


def test_train_prints_its_result_alone_and_tells_json(brim, project):
    command = ("train", "config.yaml", "trainer.train_steps=2", "--dataset", "sums.jsonl", "--output-directory")
    people = brim(*command, "one")
    assert people.code == 0
    assert [line.split()[0] for line in people.out.splitlines()] == [
        "validation", "loss", "perplexity", "token", "sequence", "rows", "supervised", "2", "run", "model:",
    ]  # fmt: skip
    programs = brim(*command, "two", "--json")
    told = json.loads(programs.out)
    seconds = told.pop("seconds")
    assert seconds > 0
    metrics = told.pop("metrics")
    assert told == {
        "output_directory": "two",
        "num_steps": 2,
        "num_new_steps": 2,
        "best_step": 2,
        "num_rows": {"train": 28, "validation": 4, "test": 8},
    }
    assert list(metrics) == ["validation", "test"]
    shown = next(line.split()[1:] for line in people.out.splitlines() if line.startswith("loss"))
    assert shown == [f"{metrics[split]['loss']:.4f}" for split in metrics]
    for done in (people, programs):
        assert "\nplan: " in done.err
        assert "step 2  validation: loss " in done.err


def test_without_training_the_splits_are_evaluated_and_nothing_is_written(brim, project, digests):
    before = digests(project)
    done = brim("train", "config.yaml", "trainer={type: none}", "adapter=null", "--dataset", "sums.jsonl")
    assert done.code == 0
    assert done.out.splitlines()[0].split() == ["validation", "test"]
    assert digests(project) == before


# evaluate


def test_evaluate_prints_figures_for_people_and_for_programs(brim, run):
    people = brim("evaluate", run, "--dataset", "sums.jsonl")
    assert people.code == 0
    assert re.fullmatch(r"evaluation: 1 batch of up to 40 × 9 tokens, .* GiB; about .*\n", people.err)
    programs = json.loads(brim("evaluate", run, "--dataset", "sums.jsonl", "--json").out)
    low, high = programs["loss_interval"]
    assert low < programs["loss"] < high
    assert f"loss               {programs['loss']:.4f} ({low:.3f} to {high:.3f})" in people.out
    assert programs["intervals"].keys() == {"loss", "perplexity", "token_accuracy", "sequence_accuracy"}
    assert (programs["split"], programs["num_rows"]) == ("full", 40)


def test_evaluate_with_texts_and_a_file_of_rows(brim, run, project):
    done = brim(
        "evaluate", run, "--dataset", "sums.jsonl", "--split", "test", "--texts", "--rows", "new/rows.csv", "--json"
    )
    assert done.code == 0
    told = json.loads(done.out)
    assert {"bleu", "rouge1", "rouge2", "rougeL", "exact_match"} < told.keys()
    rows = pd.read_csv(project / "new" / "rows.csv")
    assert rows["row"].tolist() == [8, 9, 18, 19, 28, 29, 38, 39]
    assert rows["loss"].sum() / rows["num_supervised"].sum() == pytest.approx(told["loss"], rel=1e-12)


def test_a_configuration_that_was_not_trained_is_told_from_a_run(brim, project):
    done = brim("evaluate", "config.yaml", "--dataset", "sums.jsonl")
    assert done.code == 0
    assert done.err.startswith(f"{UNTRAINED}evaluation: ")
    none = brim("evaluate", "config.yaml", "trainer={type: none}", "adapter=null", "--dataset", "sums.jsonl")
    assert none.code == 0
    assert none.err.startswith("evaluation: ")
    assert none.out == done.out


def test_evaluate_compares_with_the_base_for_people_and_for_programs(brim, run):
    people = brim("evaluate", run, "--dataset", "sums.jsonl", "--against-base")
    told = json.loads(brim("evaluate", run, "--dataset", "sums.jsonl", "--against-base", "--json").out)
    against = told["against"]
    assert told["loss"] - against["metrics"]["loss"] == pytest.approx(against["differences"]["loss"])
    low, high = against["difference_intervals"]["loss"]
    lines = people.out.splitlines()
    assert lines[0].startswith("full: 40 rows; the other model is ")
    assert re.fullmatch(r" +base +this model +difference, paired", lines[2])
    assert lines[3].startswith("loss ")
    assert lines[3].endswith(f"{against['differences']['loss']:+.4f} ({low:+.3f} to {high:+.3f})")
    both = brim("evaluate", run, "--dataset", "sums.jsonl", "--against-base", "--against", run)
    assert (both.code, both.err) == (
        2, "brim: --against and --against-base name two models\n  fix: leave one of them out\n",
    )  # fmt: skip


def test_figures_that_are_no_numbers_are_still_json(brim, project, tiny_base):
    base = shutil.copytree(tiny_base, project / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    done = brim("evaluate", "config.yaml", "base_model=base", "--dataset", "sums.jsonl", "--json")
    told = json.loads(done.out, parse_constant=pytest.fail)
    assert (told["loss"], told["perplexity"], told["loss_interval"]) == (None, None, [None, None])
    assert told["num_rows"] == 40


# predict


def test_predict_needs_no_answers_and_keeps_order_and_columns(brim, run, project):
    prompts = ["add 1 and 2 =", "x " * 40, "a", "größer? 数", "add 3 and 4 ="]
    pd.DataFrame({"id": ["e", "d", "c", "b", "a"], "question": prompts}).to_csv(project / "in put.csv", index=False)
    done = brim("predict", run, "--dataset", "in put.csv", "--output", "deep/er/out.jsonl")
    assert done.code == 0
    rows = records(project / "deep" / "er" / "out.jsonl")
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    assert "".join(row["id"] for row in rows) == "edcba"
    assert [row["question"] for row in rows] == prompts
    assert list(rows[0]) == [
        "row", "id", "question", "answer_response", "finish_reason", "num_prompt_tokens", "num_response_tokens",
    ]  # fmt: skip
    tokens = sum(row["num_response_tokens"] for row in rows)
    stopped = sum(row["finish_reason"] == "stop" for row in rows)
    assert done.out.startswith(f"5 rows, {tokens:,} tokens in ")
    assert (
        f"; {stopped} ended by themselves, {5 - stopped} at max_new_tokens\npredictions: deep/er/out.jsonl\n"
        in done.out
    )


def test_predict_takes_a_split_and_tells_json(brim, run, project):
    done = brim(
        "predict", run, "--dataset", "sums.jsonl", "--split", "validation", "--output", "new/out.jsonl", "--json"
    )
    assert done.code == 0
    told = json.loads(done.out)
    assert told.pop("seconds") > 0
    rows = records(project / "new" / "out.jsonl")
    assert [row["row"] for row in rows] == [7, 17, 27, 37]
    assert told == {
        "output": "new/out.jsonl",
        "ledger": None,
        "summary": "new/out.jsonl.summary.json",
        "num_rows": 4,
        "num_response_tokens": sum(row["num_response_tokens"] for row in rows),
        "num_stopped": sum(row["finish_reason"] == "stop" for row in rows),
    }
    wrong = brim("predict", run, "--dataset", "sums.jsonl", "--split", "dev", "--output", "other.csv")
    assert (wrong.code, wrong.out) == (2, "")
    assert "there is no split 'dev'" in wrong.err


@pytest.mark.parametrize(
    "settings",
    [
        ["num_beams=2"],
        ["num_beams=2", "early_stopping=never", "length_penalty=-1"],
        ["temperature=0"],
        ["do_sample=true", "temperature=1.5", "top_k=null", "top_p=0.5"],
        ["prompt_lookup_num_tokens=3"],
        ["sequence_bias=[[[12, 7], -1.5]]", "bad_words_ids=[[3, 4]]", "suppress_tokens=[5]"],
        ["bad_words_ids=[]"],
        ["pad_token_id=1", "eos_token_id=[0, 5]"],
        ["eos_token_id=7", "forced_eos_token_id=7", "exponential_decay_length_penalty=[2, 1.05]"],
        ["guidance_scale=1.5", "repetition_penalty=1.2", "no_repeat_ngram_size=2", "use_cache=false"],
    ],
    ids=" ".join,
)
def test_every_generation_setting_reaches_transformers(brim, run, project, settings):
    done = brim(
        "predict", run, *(f"generation.{each}" for each in settings), "--dataset", "sums.jsonl", "--output", "o.csv"
    )
    assert done.code == 0
    # The plan, and not a word of libraries.
    assert {line.split(":")[0] for line in done.err.splitlines()} <= {
        "plan",
        "memory",
        "time",
        "note",
        "launch",
        "engine",
    }
    assert len(pd.read_csv(project / "o.csv")) == 40


@pytest.mark.parametrize("elsewhere", [False, True], ids=["no checkpoint", "checkpoints of another folder"])
def test_a_given_run_that_does_not_go_on_calls_no_function_by_itself(brim, project, run, elsewhere):
    (project / "grow.py").write_text('open("called", "w").close()\ndef grow(epoch, size): return 0\n')
    config = run / "config.yaml"
    text = config.read_text().replace("gradient_accumulation_steps: 2", "gradient_accumulation_steps: auto")
    config.write_text(text.replace("batch_increase_function: null", "batch_increase_function: grow:grow"))
    if not elsewhere:
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints" / "step-1").mkdir(parents=True)
    where = ["--output-directory", "other"] if elsewhere else []
    done = brim("train", "run", "--resume", "--dataset", "sums.jsonl", *where)
    assert done.code == 2
    assert "trainer.batch_increase_function names code in the configuration of a run" in done.err
    assert not (project / "called").exists()
