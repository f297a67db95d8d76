"""brim.Model: a model that is saved and loaded is the same model."""

import gc
import json
import shutil
import weakref

import numpy as np
import pandas as pd
import pytest

import brim
from brim.data import check_split
from brim.infer import ratio

PROMPTS = ["add 1 and 2 =", "add", "add 20 and 3 = 23; the sum of 20 plus 3"]


def same(one, other, data):
    """Equal figures and equal texts."""
    assert one.evaluate(data).metrics == other.evaluate(data).metrics
    assert one.generate(PROMPTS) == other.generate(PROMPTS)
    return True


@pytest.mark.parametrize("adapter", [{"type": "lora", "dropout": 0.0}, None], ids=["lora", "full"])
def test_a_run_is_loaded_as_it_was_trained(config, sums_file, tmp_path, adapter):
    model = brim.Model({**config, "adapter": adapter})
    model.train(sums_file, output_directory=tmp_path / "run")
    base = brim.Model({**config, "adapter": None})
    assert model.evaluate(sums_file).metrics["loss"] != base.evaluate(sums_file).metrics["loss"]
    loaded = brim.Model.load(tmp_path / "run")
    assert loaded.notes == ()
    assert same(loaded, model, sums_file)


@pytest.mark.parametrize("adapter", [{"type": "lora", "dropout": 0.0}, None], ids=["lora", "full"])
def test_what_save_writes_is_loaded_from_anywhere(config, sums_file, tmp_path, monkeypatch, adapter):
    model = brim.Model({**config, "adapter": adapter})
    model.train(sums_file, output_directory=tmp_path / "run")
    model.save(tmp_path / "saved")
    loaded = brim.Model.load(tmp_path / "saved")
    loaded.save(tmp_path / "again")
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(brim.Model.load("../again"), model, sums_file)


def test_saving_before_training_saves_the_base_model(config, sums_file, tmp_path):
    model = brim.Model(config)
    model.save(tmp_path / "saved")
    assert same(brim.Model.load(tmp_path / "saved"), model, sums_file)


def test_a_model_that_started_from_random_weights_is_loaded_with_them(config, sums_file, tmp_path, tiny_base):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "model.safetensors").unlink()
    model = brim.Model({**config, "base_model": str(base), "initialize": "random", "adapter": None})
    model.train(sums_file, output_directory=tmp_path / "run")
    assert same(brim.Model.load(tmp_path / "run"), model, sums_file)


def test_training_goes_on_from_a_loaded_run(config, teachable_base, sums_file, tmp_path):
    first = brim.Model({**config, "base_model": str(teachable_base)})
    first.train(sums_file, output_directory=tmp_path / "first")
    before = first.evaluate(sums_file, split="train").metrics["loss"]
    changes = ["trainer.train_steps=40", "trainer.learning_rate=0.01"]
    second = brim.Model.load(tmp_path / "first", overrides=changes)
    second.train(sums_file, output_directory=tmp_path / "second")
    assert second.evaluate(sums_file, split="train").metrics["loss"] < 0.9 * before
    assert same(brim.Model.load(tmp_path / "second"), second, sums_file)


@pytest.mark.parametrize("adapter", [{"type": "lora"}, None], ids=["lora", "full"])
def test_other_tools_open_the_model_folder_and_stop_where_brim_does(config, sums_file, tmp_path, tiny_base, adapter):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    brim.Model({**config, "adapter": adapter}).train(sums_file, output_directory=tmp_path / "run")
    folder = tmp_path / "run" / "model"
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|end|>"
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.pad_token_id, generation.max_new_tokens) == ([0], 1, 6)
    if adapter is None:
        assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [0]


def test_a_runs_base_model_can_be_evaluated_as_it_was(config, sums_file, tmp_path):
    brim.Model(config).train(sums_file, output_directory=tmp_path / "run")
    said = []
    base = brim.Model.load(tmp_path / "run", overrides=["adapter=null"])
    assert same(base, brim.Model({**config, "adapter": None}), sums_file)
    base.evaluate(sums_file, say=said.append)
    note, plan = said
    assert note == "this is the model before training; for what a run has learned, name the run's folder"
    assert plan.startswith("evaluation: 1 batch of up to 40 × ")


def test_a_fully_trained_model_can_be_given_an_adapter(config, sums_file, tmp_path):
    brim.Model({**config, "adapter": None}).train(sums_file, output_directory=tmp_path / "full")
    model = brim.Model.load(tmp_path / "full", overrides=["adapter=lora"])
    model.train(sums_file, output_directory=tmp_path / "adapted")
    assert (tmp_path / "adapted" / "model" / "adapter_model.safetensors").exists()
    assert same(brim.Model.load(tmp_path / "adapted"), model, sums_file)


def test_nothing_but_brim_speaks_while_a_model_is_saved(config, sums_file, tmp_path, capfd):
    brim.Model({**config, "adapter": None}).train(sums_file, output_directory=tmp_path / "run", say=None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_save_overwrites_nothing(config, tmp_path, taken):
    target = tmp_path / "taken"
    if taken == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    with pytest.raises(brim.OutputError, match=r"is a file|holds other things"):
        brim.Model(config).save(target)
    assert (target if taken == "file" else target / "notes.txt").read_text() == "mine"


def test_save_below_a_file_is_one_error(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(brim.OutputError, match="the output directory cannot be written"):
        brim.Model(config).save(tmp_path / "file" / "saved")


@pytest.mark.parametrize("place", ["file/run", "closed/new/run", "x" * 300])
def test_a_place_that_cannot_be_written_is_told_before_any_work(config, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("closed"))  # root may write anywhere
    with pytest.raises(
        brim.OutputError, match=r"the output directory cannot be written: (Not a d|Permission|File name)"
    ):
        brim.Model(config).train("no such data", output_directory=tmp_path / place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["closed", "file"]


def test_a_folder_that_is_no_run_is_not_loaded(tmp_path):
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(brim.InputError, match="this folder is not a run"):
        brim.Model.load(tmp_path)


def test_a_run_before_its_end_says_how_to_end_it(config, sums_file, tmp_path):
    brim.Model(config).train(sums_file, output_directory=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(
        brim.InputError, match=r"this run has no model yet\n  fix: finish it with `brim train .* --resume`"
    ):
        brim.Model.load(tmp_path / "run")


def test_every_kind_of_data_gives_the_same_figures(zero_shot, sums, sums_file):
    model = brim.Model(zero_shot)
    frame = pd.DataFrame(sums)
    expected = model.evaluate(sums_file).metrics
    assert model.evaluate(frame).metrics == expected
    assert model.evaluate(frame.to_dict("list")).metrics == expected


def test_splits_are_those_of_the_data_and_add_up(zero_shot, sums_file):
    model = brim.Model(zero_shot)
    parts = [model.evaluate(sums_file, split=split) for split in ("train", "validation", "test")]
    assert [part.metrics["num_rows"] for part in parts] == [28, 4, 8]
    full = model.evaluate(sums_file)
    assert full.split == "full"
    rows = pd.concat([part.rows for part in parts]).sort_values("row", ignore_index=True)
    assert rows["row"].tolist() == list(range(40))
    pd.testing.assert_frame_equal(rows, full.rows, rtol=1e-5)
    assert full.rows["loss"].sum() / full.rows["num_supervised"].sum() == pytest.approx(full.metrics["loss"])


def test_the_configurations_own_data_is_evaluated_on_its_test_split(zero_shot, sums_file):
    model = brim.Model({**zero_shot, "dataset": str(sums_file)})
    assert model.evaluate().split == "test"
    assert model.evaluate(sums_file).split == "full"


def test_an_empty_split_is_an_error(zero_shot, sums):
    frame = pd.DataFrame(sums)
    model = brim.Model(zero_shot)
    for run in (model.evaluate, model.predict):
        with pytest.raises(brim.DataError, match="the split 'test' has no rows"):
            run(frame[frame["split"] < 2], split="test")


@pytest.mark.parametrize("trainer", [{"type": "none", "batch_size": 4}, {"type": "finetune", "eval_batch_size": 4}])
def test_the_batch_size_of_a_call_is_for_that_call(zero_shot, sums_file, monkeypatch, trainer):
    from brim.workflows.prediction import evaluation

    model, score, scored, generated = brim.Model({**zero_shot, "trainer": trainer}), evaluation.score_rows, [], []

    def look_and_score(*arguments, **more):
        scored.append(getattr(more["batch_rows"], "num_rows", "planned"))
        return score(*arguments, **more)

    monkeypatch.setattr(evaluation, "score_rows", look_and_score)
    figures = [model.evaluate(sums_file, batch_size=size).metrics["loss"] for size in (7, None)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert scored == [7, trainer.get("eval_batch_size", "planned")]
    for size in (25, None):
        model.predict(sums_file, batch_size=size, on_batch=generated.append)
    assert generated == [25, 15, *[4] * 10]
    for run in (model.evaluate, model.predict):
        with pytest.raises(
            brim.ConfigError, match=r"trainer\.(eval_)?batch_size is 0\n  expected: a whole number of at"
        ):
            run(sums_file, batch_size=0)


def test_texts_are_measured_against_the_answers(zero_shot, sums):
    """The references are the answers: a model's own greedy responses, given as answers, match exactly."""
    model = brim.Model(zero_shot)
    responses = model.predict(pd.DataFrame(sums)).predictions
    # Texts that survive another round of tokenizing; six tokens are not always whole characters.
    kept = responses[~responses["answer_response"].str.contains("�|^$")].head(10)
    own = pd.DataFrame({"question": kept["question"], "answer": kept["answer_response"]})
    figures = model.evaluate(own, with_texts=True).metrics
    assert len(own) > 3
    assert figures["exact_match"] == 1.0


def test_texts_are_measured_against_whole_answers_even_where_tokens_are_cut(zero_shot, monkeypatch):
    compared, one = [], ratio(np.ones(2))
    monkeypatch.setattr(
        "brim.workflows.prediction.evaluation.text_measures", lambda *texts: compared.append(texts) or {"bleu": one}
    )
    answer = {"name": "answer", "type": "text", "preprocessing": {"max_sequence_length": 3}}
    question = {"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}
    frame = pd.DataFrame(
        {"question": ["a", None, "b"], "answer": ["größer als drei", "dropped", "12345678"], "split": [2, 2, 2]}
    )
    model = brim.Model({**zero_shot, "input_features": [question], "output_features": [answer]})
    result = model.evaluate(frame, split="test", with_texts=True)
    [(responses, references)] = compared
    assert references == ["größer als drei", "12345678"]
    assert len(responses) == len(result.rows) == 2
    assert result.metrics["bleu"] == 1.0


def test_texts_need_room_in_the_context(zero_shot, sums):
    frame = pd.DataFrame({"question": ["x" * 90, "a"], "answer": ["b", "c"]})
    model = brim.Model({**zero_shot, "generation": {"max_new_tokens": 60}})
    assert model.evaluate(frame).metrics["num_rows"] == 2
    with pytest.raises(brim.DataError, match=r"row 0 \(90 tokens\): 1 prompt is too long: .*\n  expected: at most 68 "):
        model.evaluate(frame, with_texts=True)


def test_generate_takes_one_prompt_or_many_and_settings_for_the_call(zero_shot):
    model = brim.Model(zero_shot)
    many = model.generate(PROMPTS)
    assert [model.generate(prompt) for prompt in PROMPTS] == many
    assert isinstance(many, list)
    assert model.generate([]) == []
    longer = model.generate(PROMPTS[0], max_new_tokens=12)
    assert longer.startswith(many[0])
    assert model.generate(PROMPTS) == many
    with pytest.raises(brim.ConfigError, match=r"unknown key generation.max_tokens"):
        model.generate("a", max_tokens=3)
    # Nothing set is what the configuration means by nothing set: as much as half of the context holds.
    assert len(model.generate("a", max_new_tokens=None)) > len(model.generate("a"))


def test_prompts_that_cannot_be_continued_are_named(zero_shot):
    with pytest.raises(brim.DataError) as caught:
        brim.Model(zero_shot).generate(["a", "", "x" * 200])
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("prompt 2", "1 prompt is empty"),
        ("prompt 3 (200 tokens)", "1 prompt is too long: too little of the model's context is left for the answer"),
    ]  # fmt: skip


def test_the_longest_prompts_are_named_and_the_others_counted(zero_shot):
    frame = pd.DataFrame({"question": ["x" * (122 + n % 8) for n in range(9)]})
    model = brim.Model(zero_shot)
    with pytest.raises(brim.DataError) as caught:
        model.predict(frame)
    row = "the data frame, row"
    assert str(caught.value) == (
        f"{row} 7 (129 tokens), {row} 6 (128 tokens), {row} 5 (127 tokens), {row} 4 (126 tokens), {row} 3 (125 tokens) "
        "and 2 more: 7 prompts are too long: too little of the model's context is left for the answer\n"
        "  expected: at most 122 tokens of prompt (context - generation.max_new_tokens)\n"
        "  fix: lower generation.max_new_tokens, shorten or remove the prompts, or, for those of a data set, set "
        "preprocessing.on_overlong: truncate to cut them, or drop to leave them out (each is counted); "
        "`brim predict --on-overlong truncate_left` cuts them and keeps their ends"
    )
    cut = {"name": "question", "type": "text", "preprocessing": {"max_sequence_length": 122}}
    said = []
    brim.Model({**zero_shot, "input_features": [cut]}).predict(frame, say=said.append)
    told, plan = said[0], said[1:]
    assert told.startswith("7 of 9 rows had their prompt cut: ")
    assert {line.split(":")[0] for line in plan} <= {"plan", "memory", "time", "note", "launch", "engine"}


def test_a_configuration_that_was_not_trained_says_so_once_a_call(config, sums_file, tmp_path):
    note = "this is the model before training; for what a run has learned, name the run's folder"
    model, said = brim.Model(config), []
    model.evaluate(sums_file, say=said.append)
    assert said.count(note) == 1
    model.train(sums_file, output_directory=tmp_path / "run")
    said.clear()
    model.evaluate(sums_file, say=said.append)
    model.predict(sums_file, say=said.append)
    brim.Model.load(tmp_path / "run").evaluate(sums_file, say=said.append)
    assert note not in said


def test_the_run_records_where_its_data_lies(config, sums_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    brim.Model(config).train(sums_file.name, output_directory="run")
    assert brim.Model.load("run").config.dataset == str(sums_file.resolve())


@pytest.mark.parametrize("kind", ["frame", "mapping"])
def test_data_that_is_no_file_leaves_no_path(config, sums, sums_file, tmp_path, kind):
    """Not even that of the file which the configuration names."""
    model = brim.Model({**config, "dataset": str(sums_file)})
    frame = pd.DataFrame(sums)
    model.train(frame if kind == "frame" else frame.to_dict("list"), output_directory=tmp_path / "run")
    model.save(tmp_path / "saved")
    for place in ("run", "saved"):
        assert brim.Model.load(tmp_path / place).config.dataset is None


def test_the_configurations_own_data_is_trained_on_after_a_frame_was(config, sums, sums_file, tmp_path):
    model = brim.Model({**config, "dataset": str(sums_file)})
    model.train(pd.DataFrame(sums), output_directory=tmp_path / "frame")
    model.train(output_directory=tmp_path / "file")
    assert brim.Model.load(tmp_path / "file").config.dataset == str(sums_file)


@pytest.mark.parametrize("ignored", [{"output_directory": "run"}, {"resume": True}])
def test_without_training_there_is_a_note_on_what_has_no_effect(zero_shot, sums_file, ignored):
    note = "trainer.type is none: nothing is trained, no run folder is written and none is continued"
    said = []
    brim.Model(zero_shot).train(sums_file, say=said.append, **ignored)
    assert said.count(note) == 1
    said.clear()
    brim.Model(zero_shot).train(sums_file, say=said.append)
    assert note not in said


def test_several_processes_are_refused(config, sums_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(brim.InputError, match=r"WORLD_SIZE: several processes are not supported yet.* names 2\n  fix"):
        brim.Model(config).train(sums_file, output_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    brim.Model(config).evaluate(sums_file)


def test_training_holds_one_model_in_memory(config, sums_file, tmp_path, monkeypatch):
    from brim.workflows.training import training

    model, load, alive = brim.Model(config), training.load_llm, []
    model.evaluate(sums_file)
    evaluated = weakref.ref(model._weights().model)

    def look_and_load(*arguments, **more):
        gc.collect()
        alive.append(evaluated() is not None)
        return load(*arguments, **more)

    monkeypatch.setattr(training, "load_llm", look_and_load)
    model.train(sums_file, output_directory=tmp_path / "run")
    assert alive == [False]


def test_what_was_learned_is_not_claimed_after_another_training_failed(config, sums_file, tmp_path, monkeypatch):
    model, said = brim.Model(config), []
    model.train(sums_file, output_directory=tmp_path / "run")

    def fail(*arguments, **more):
        raise brim.ModelError(brim.Problem(what="broken"))

    with monkeypatch.context() as patch:
        patch.setattr("brim.workflows.training.training.load_llm", fail)
        with pytest.raises(brim.ModelError, match="broken"):
            model.train(sums_file, output_directory=tmp_path / "other")
    model.evaluate(sums_file, say=said.append)
    note, plan = said
    assert note == "this is the model before training; for what a run has learned, name the run's folder"
    assert plan.startswith("evaluation: 1 batch of up to 40 × ")


def test_a_start_that_failed_leaves_no_folder(config, sums_file, tmp_path):
    broken = {**config, "adapter": {"type": "lora", "target_modules": ["nonsense"]}}
    with pytest.raises(brim.ModelError, match="nonsense"):
        brim.Model(broken).train(sums_file, output_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resume_does_not_take_a_folder_with_any_config_for_a_run(config, sums_file, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("mine")
    with pytest.raises(brim.OutputError, match="holds other things; nothing was changed"):
        brim.Model(config).train(sums_file, output_directory=mine, resume=True)
    assert (mine / "config.yaml").read_text() == "mine"


def test_changed_keys_are_told_as_yaml_writes_them(config, sums_file, tmp_path):
    brim.Model(config).train(sums_file, output_directory=tmp_path / "run")
    changed = {**config, "trainer": {**config["trainer"], "noise_scale_every": 5, "skip_all_evaluation": True}}
    with pytest.raises(brim.ConfigError) as caught:
        brim.Model(changed).train(sums_file, output_directory=tmp_path / "run", resume=True)
    assert sorted(problem.what for problem in caught.value.problems) == [
        "trainer.noise_scale_every is 5, but this run was started with null",
        "trainer.skip_all_evaluation is true, but this run was started with false",
    ]


@pytest.mark.parametrize("name", ["train", "validation", "test", "full", None])
def test_splits_have_names(name):
    assert check_split(name) == name


@pytest.mark.parametrize("name", ["", "Test", "dev", "all"])
def test_other_names_are_no_splits(name):
    with pytest.raises(brim.InputError, match=r"there is no split .*\n  expected: train, validation, test, full"):
        check_split(name)


def test_no_secret_reaches_the_saved_model(config, sums_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted0secret")
    brim.Model(config).train(sums_file, output_directory=tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"hf_planted0secret" not in path.read_bytes()
    json.loads((tmp_path / "run" / "environment.json").read_text())


@pytest.mark.parametrize("prompt", ["a\ud83d", [1], ["fine", None]])
def test_a_prompt_that_is_no_text_is_named(config, prompt):
    with pytest.raises(brim.InputError, match="is no text"):
        brim.Model(config).generate(prompt)


def test_a_split_that_does_not_exist_is_named(config, sums_file):
    with pytest.raises(brim.InputError, match="there is no split 'tset'"):
        brim.Model(config).evaluate(sums_file, split="tset")


def test_a_pattern_of_target_modules_that_is_none_is_named(config):
    with pytest.raises(brim.ConfigError, match=r"adapter\.target_modules"):
        brim.Model({**config, "adapter": {"type": "lora", "target_modules": "("}})


def test_a_given_run_that_is_trained_further_calls_no_function_by_itself(config, sums_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grow.py").write_text('open("called", "w").close()\ndef grow(epoch, size): return 0\n')
    trainer = {**config["trainer"], "batch_size": "auto", "effective_batch_size": 8}
    brim.Model({**config, "trainer": trainer}).train(sums_file, output_directory=tmp_path / "run")
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace("batch_increase_function: null", "batch_increase_function: grow:grow"))
    loaded = brim.Model.load(tmp_path / "run")
    loaded.generate(PROMPTS[0])
    with pytest.raises(brim.ConfigError, match="batch_increase_function names code in the configuration of a run"):
        loaded.train(sums_file, output_directory=tmp_path / "further")
    assert not (tmp_path / "called").exists()
    named = ["trainer.batch_increase_function=grow:grow"]
    brim.Model.load(tmp_path / "run", overrides=named).train(sums_file, output_directory=tmp_path / "further")
    assert (tmp_path / "called").exists()


def test_a_second_training_starts_from_the_configuration_whatever_came_between(config, sums, tmp_path):
    """Not from what was learned, and not with the batch that a smaller data set had."""
    settings = {**config, "trainer": {"type": "finetune", "epochs": 1, "learning_rate": 0.05, "early_stop": -1}}
    model, losses = brim.Model(settings), {}

    def train(rows, name):
        result = model.train(pd.DataFrame(rows), output_directory=tmp_path / name, say=None)
        losses[name] = result.history.loc[result.history["split"] == "train", "loss"].tolist()

    train(sums, "first")
    train(sums[:8] + sums[-2:], "fewer rows")
    train(sums, "after fewer rows")
    model.evaluate(pd.DataFrame(sums), against="base", say=None)
    assert model.config.adapter.pretrained_adapter_weights is None
    train(sums, "after an evaluation")
    model.export(tmp_path / "merged", merge=True, say=None)
    train(sums, "after a merge")
    assert [losses[name] for name in losses if name != "fewer rows"] == [losses["first"]] * 4
