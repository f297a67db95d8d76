"""brim.Model: what was trained is loaded, saved, evaluated and shown as it is, and says so once."""

import gc
import json
import re
import shutil
import weakref
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import pandas as pd
import pytest
from tests.gallery import sums as some_sums
from tests.hand_made_proof import PROOF
from tests.messages import refused

import brim
from brim.infer.metrics import Measure
from brim.notes import kind_of
from brim.report import Screen, history_plot
from brim.units import format_bytes

pytestmark = pytest.mark.run
PROMPTS = ["add 1 and 2 =", "add", "add 20 and 3 = 23; the sum of 20 plus 3"]
ADAPTERS = pytest.mark.parametrize("adapter", [{"type": "lora", "dropout": 0.0}, None], ids=["lora", "full"])
UNTRAINED = "this is the model before training; for what a run has learned, name the run's folder"
SECRET = "hf_planted0secret"


@pytest.fixture
def with_gaps(sums):
    """The sums, of which three cannot be used."""
    frame = pd.DataFrame(sums)
    frame.loc[[3, 13, 23], "question"] = None
    return frame


@pytest.fixture
def dropping(config):
    features = [{"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}]
    return {**config, "input_features": features, "trainer": {**config["trainer"], "train_steps": 1}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, config):
    """What came of a training of four steps with two evaluations."""
    config = {**config, "trainer": {**config["trainer"], "steps_per_checkpoint": 2}}
    output = tmp_path_factory.mktemp("finished") / "run"
    return brim.Model(config).train(pd.DataFrame(some_sums()), output_directory=output, say=None)


def same(one, other, data):
    """Equal figures and equal texts."""
    assert one.evaluate(data).metrics == other.evaluate(data).metrics
    assert one.generate(PROMPTS) == other.generate(PROMPTS)
    return True


@ADAPTERS
def test_what_was_trained_is_loaded_from_its_run_and_from_what_was_saved_and_holds_no_secret(
    config, sums_file, tmp_path, monkeypatch, adapter
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    model = brim.Model({**config, "adapter": adapter})
    model.train(sums_file.name, output_directory="run")
    base = brim.Model({**config, "adapter": None})
    assert model.evaluate(sums_file).metrics["loss"] != base.evaluate(sums_file).metrics["loss"]
    loaded = brim.Model.load("run")
    assert (loaded.notes, loaded.config.dataset) == ((), str(sums_file.resolve()))
    assert same(loaded, model, sums_file)
    model.save("saved")
    brim.Model.load("saved").save("again")
    json.loads((tmp_path / "run" / "environment.json").read_text())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    for name in ("run", "saved"):
        shutil.rmtree(name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(brim.Model.load("../again"), model, sums_file)


def test_a_model_that_starts_from_random_weights_is_loaded_with_them(config, sums_file, tmp_path, tiny_base):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    (base / "model.safetensors").unlink()
    settings = {**config, "base_model": str(base), "adapter": None}
    model = brim.Model({**settings, "initialize": "random"})
    model.train(sums_file, output_directory=tmp_path / "run")
    assert same(brim.Model.load(tmp_path / "run"), model, sums_file)


def test_a_runs_base_model_can_be_evaluated_as_it_was_and_saved(gallery, config, sums_file, tmp_path):
    said = []
    base, untrained = brim.Model.load(gallery("lora").run, overrides=["adapter=null"]), brim.Model(config)
    assert same(base, untrained, sums_file)
    base.evaluate(sums_file, say=said.append)
    assert UNTRAINED in said
    assert any(line.startswith("batch: 1 batch of up to 40 × ") for line in said)
    untrained.save(tmp_path / "saved")  # without an adapter that has learned nothing
    assert same(brim.Model.load(tmp_path / "saved"), base, sums_file)


def test_a_fully_trained_model_can_be_given_an_adapter(gallery, sums_file, tmp_path):
    model = brim.Model.load(gallery("full").run, overrides=["adapter=lora"])
    model.train(sums_file, output_directory=tmp_path / "adapted")
    assert (tmp_path / "adapted" / "model" / "adapter_model.safetensors").exists()
    assert same(brim.Model.load(tmp_path / "adapted"), model, sums_file)


def test_a_place_that_cannot_be_written_is_told_before_any_work(config, tmp_path, monkeypatch):
    """Places that are taken are among the mistakes on the command line."""
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("closed"))  # root may write anywhere
    model = brim.Model(config)
    for place, reason in (("closed/new/run", "Permission"), ("x" * 300, "File name")):
        for write in (model.save, lambda path: model.train("no such data", output_directory=path)):
            with pytest.raises(brim.errors.OutputError, match=f"the output directory cannot be written: {reason}"):
                write(tmp_path / place)
    assert list(tmp_path.rglob("*")) == [tmp_path / "closed"]


def test_splits_are_those_of_the_data_and_add_up_and_every_kind_of_data_gives_the_same_figures(
    zero_shot, sums, sums_file
):
    model, frame = brim.Model(zero_shot), pd.DataFrame(sums)
    parts = [model.evaluate(sums_file, split=split) for split in ("train", "validation", "test")]
    assert [part.metrics["num_rows"] for part in parts] == [28, 4, 8]
    full = model.evaluate(sums_file)
    assert [model.evaluate(data).metrics for data in (frame, frame.to_dict("list"))] == [full.metrics] * 2
    assert (full.split, brim.Model({**zero_shot, "dataset": str(sums_file)}).evaluate().split) == ("full", "test")
    rows = pd.concat([part.rows for part in parts]).sort_values("row", ignore_index=True)
    assert rows["row"].tolist() == list(range(40))
    pd.testing.assert_frame_equal(rows, full.rows, rtol=1e-5)
    assert full.rows["loss"].sum() / full.rows["num_supervised"].sum() == pytest.approx(full.metrics["loss"])
    for run in (model.evaluate, model.predict):
        with pytest.raises(brim.DataError, match="the split 'test' has no rows"):
            run(frame[frame["split"] < 2], split="test")


@pytest.mark.parametrize("trainer", [{"type": "none", "batch_size": 4}, {"type": "finetune", "eval_batch_size": 4}])
def test_the_batch_size_of_a_call_is_for_that_call(zero_shot, sums_file, monkeypatch, trainer):
    from brim.workflows.prediction import scoring

    model, score, scored, generated = brim.Model({**zero_shot, "trainer": trainer}), scoring.score_rows, [], []

    def look_and_score(*arguments, **more):
        scored.append(getattr(more["batches"], "num_rows", "planned"))
        return score(*arguments, **more)

    monkeypatch.setattr(scoring, "score_rows", look_and_score)
    figures = [model.evaluate(sums_file, batch_size=size).metrics["loss"] for size in (7, None)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    # Where batches are planned, the shortest row is read alone before.
    assert scored == [7, *([4] if "eval_batch_size" in trainer else [1, "planned"])]
    for size in (25, None):
        model.predict(sums_file, batch_size=size, on_batch=generated.append)
    assert generated == [25, 15, *[4] * 10]
    for run in (model.evaluate, model.predict):
        with pytest.raises(brim.ConfigError, match=r"trainer\.(eval_)?batch_size is 0\n  expected: a whole number"):
            run(sums_file, batch_size=0)


def test_texts_are_measured_against_whole_answers_even_where_tokens_are_cut(zero_shot, monkeypatch):
    compared, one = [], Measure.ratio(np.ones(2))
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


def test_prompts_that_cannot_be_continued_are_named_the_longest_first_and_others_counted(zero_shot):
    model, longest = brim.Model(zero_shot), "1 prompt is too long: … model's context"
    with refused("prompt 2: 1 prompt is empty", f"prompt 3 (200 tokens): {longest}", by=brim.DataError):
        model.generate(["a", "", "x" * 200])
    frame = pd.DataFrame({"question": ["x" * (122 + n % 8) for n in range(9)]})
    row = "the data frame, row"
    with refused(
        f"{row} 7 (129 tokens), {row} 6 (128 tokens), … {row} 3 (125 tokens) and 2 more: 7 prompts are too long … "
        "at most 122 tokens … fix: lower generation.max_new_tokens … preprocessing.on_overlong: truncate",
        by=brim.DataError,
    ):
        model.predict(frame)
    cut, said = {"name": "question", "type": "text", "preprocessing": {"max_sequence_length": 122}}, []
    brim.Model({**zero_shot, "input_features": [cut]}).predict(frame, say=said.append)
    assert said[1].startswith("7 of 9 rows had their prompt cut: ")
    # Texts to compare need room for the answer; scores do not.
    frame = pd.DataFrame({"question": ["x" * 90, "a"], "answer": ["b", "c"]})
    model = brim.Model({**zero_shot, "generation": {"max_new_tokens": 60}})
    assert model.evaluate(frame).metrics["num_rows"] == 2
    with refused(f"{row} 0 (90 tokens): 1 prompt is too long: … at most 68 ", by=brim.DataError):
        model.evaluate(frame, with_texts=True)


def test_what_was_not_trained_says_so_once_a_call_also_after_a_training_that_failed(
    config, sums_file, tmp_path, monkeypatch
):
    model, said = brim.Model(config), []
    model.evaluate(sums_file, say=said.append)
    assert said.count(UNTRAINED) == 1
    model.train(sums_file, output_directory=tmp_path / "run")
    said.clear()
    model.evaluate(sums_file, say=said.append)
    model.predict(sums_file, say=said.append)
    brim.Model.load(tmp_path / "run").evaluate(sums_file, say=said.append)
    assert UNTRAINED not in said
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("brim.workflows.training.sharding.load_llm", lambda *arguments, **more: 1 / 0)
        model.train(sums_file, output_directory=tmp_path / "other")
    said.clear()
    model.evaluate(sums_file, say=said.append)
    assert said[0] == UNTRAINED


def test_data_that_is_no_file_leaves_no_path(config, sums, sums_file, tmp_path):
    """Not even that of the file which the configuration names; it is trained on where no other data is given."""
    model = brim.Model({**config, "dataset": str(sums_file)}, overrides=["trainer.train_steps=1"])
    for kind, data in (("frame", pd.DataFrame(sums)), ("mapping", pd.DataFrame(sums).to_dict("list"))):
        model.train(data, output_directory=tmp_path / kind)
    model.save(tmp_path / "saved")
    for place in ("frame", "mapping", "saved"):
        assert brim.Model.load(tmp_path / place).config.dataset is None
    model.train(output_directory=tmp_path / "file")
    assert brim.Model.load(tmp_path / "file").config.dataset == str(sums_file)


@pytest.mark.parametrize(("ignored", "times"), [({"output_directory": "run"}, 1), ({"resume": True}, 1), ({}, 0)])
def test_without_training_there_is_a_note_on_what_has_no_effect(zero_shot, sums_file, ignored, times):
    said = []
    brim.Model(zero_shot).train(sums_file, say=said.append, **ignored)
    note = "trainer.type is none: nothing is trained, no run folder is written and none is continued"
    assert said.count(note) == times


def test_training_holds_one_model_in_memory(config, sums_file, tmp_path, monkeypatch):
    from brim.workflows.training import sharding

    model, load, alive = brim.Model(config), sharding.load_llm, []
    model.evaluate(sums_file)
    evaluated = weakref.ref(model._weights().model)

    def look_and_load(*arguments, **more):
        gc.collect()
        alive.append(evaluated() is not None)
        return load(*arguments, **more)

    monkeypatch.setattr(sharding, "load_llm", look_and_load)
    model.train(sums_file, output_directory=tmp_path / "run")
    assert alive == [False]


def test_several_processes_are_refused_where_they_do_not_share_or_have_no_place(
    config, sums_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("environment: RANK is not set, but WORLD_SIZE=2 is … expected … fix", by=brim.InputError):
        brim.Model(config).train(sums_file, output_directory=tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    with refused("WORLD_SIZE: several processes are not supported here … asks for 2 … fix", by=brim.InputError):
        brim.Model(config).evaluate(sums_file)


def test_a_given_run_that_is_trained_further_calls_no_function_by_itself(gallery, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grow.py").write_text('open("called", "w").close()\ndef grow(epoch, size): return 0\n')
    piece = gallery("lora")
    saved = shutil.copytree(piece.run, tmp_path / "run") / "config.yaml"
    text = saved.read_text().replace("  batch_size: 4\n", "  batch_size: auto\n")
    text = text.replace("gradient_accumulation_steps: 2", "gradient_accumulation_steps: auto")
    saved.write_text(text.replace("batch_increase_function: null", "batch_increase_function: grow:grow"))
    loaded = brim.Model.load(tmp_path / "run")
    loaded.generate(PROMPTS[0])
    with pytest.raises(brim.ConfigError, match="batch_increase_function names code in the configuration of a run"):
        loaded.train(piece.data, output_directory=tmp_path / "further")
    assert not (tmp_path / "called").exists()
    named = ["trainer.batch_increase_function=grow:grow"]
    brim.Model.load(tmp_path / "run", overrides=named).train(piece.data, output_directory=tmp_path / "further")
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


def test_a_config_is_taken_as_the_mapping_it_was_made_from(config):
    # What nobody has set is still to be chosen: here the batch size, 8 / 2.
    mapping = {**config, "trainer": {"type": "finetune", "effective_batch_size": 8, "gradient_accumulation_steps": 2}}
    given = brim.Model(brim.Model(mapping).config)
    assert given.config == brim.Model(mapping).config
    assert given.config.model_fields_set == brim.Model(mapping).config.model_fields_set
    assert given.config.trainer.model_fields_set == brim.Model(mapping).config.trainer.model_fields_set
    assert given.notes == brim.Model(mapping).notes


@pytest.mark.parametrize("adapter", [{"r": 4, "alpha": None}, {"r": 4, "alpha": 4, "target_modules": "all-linear"}])
def test_a_run_that_goes_on_from_an_adapter_says_what_that_is(config, sums_file, tmp_path, adapter):
    config = {**config, "trainer": {**config["trainer"], "train_steps": 1}}
    brim.Model({**config, "adapter": {"type": "lora", **adapter}}).train(sums_file, output_directory=tmp_path / "first")
    weights = str(tmp_path / "first" / "model")
    second = brim.Model({**config, "adapter": {"type": "lora", "pretrained_adapter_weights": weights}})
    second.train(sums_file, output_directory=tmp_path / "second")
    loaded = brim.Model.load(tmp_path / "second")
    assert (loaded.config.adapter.r, loaded.config.adapter.alpha) == (4, adapter["alpha"] or 8)
    assert loaded.evaluate(sums_file).metrics == second.evaluate(sums_file).metrics


class Steps(brim.Observer):
    """Hears steps alone; the other methods are those that it inherits."""

    def __init__(self):
        self.losses = []

    def write(self, record):
        if "learning_rate" in record:
            self.losses.append(record["loss"])


def test_notes_come_on_stderr_or_where_one_says_and_none_is_silence(dropping, with_gaps, tmp_path, capfd):
    """Also while all weights are saved."""
    model = brim.Model({**dropping, "adapter": None})
    model.train(with_gaps, output_directory=tmp_path / "run", say=None)
    assert repr(model.evaluate(with_gaps, say=None)).endswith("that the prompt or the answer needs is missing: 3")
    model.predict(with_gaps, say=None)
    assert capfd.readouterr() == ("", "")
    for ask in (lambda data: brim.plan(dropping, data), model.predict, model.evaluate):
        ask(with_gaps)
        assert re.search("3 of 40 rows (were )?dropped", capfd.readouterr().err)
    model.train(with_gaps, output_directory=tmp_path / "default")
    out, err = capfd.readouterr()
    card = err.split("step 1  validation: loss ")[0].splitlines()
    assert (out, [line[:8].strip() for line in card][:3]) == ("", ["model", "data", ""])
    assert card[2].strip() == "3 of 40 rows dropped"
    printed = StringIO()
    with redirect_stdout(printed):
        model.train(with_gaps, output_directory=tmp_path / "printed", say=print)
    lines = printed.getvalue().splitlines()
    assert capfd.readouterr().err == ""
    assert not any("validation: loss" in line for line in lines), "every note and no progress"
    assert (tmp_path / "printed/notes.txt").read_text().splitlines()[1:] == lines


class Heard(Screen):
    """brim's own screen, which also keeps what it hears."""

    def __init__(self):
        super().__init__(StringIO())
        self.notes, self.doing, self.num_rows = [], [], 0

    def __call__(self, line):
        (self.doing if kind_of(line) in ("status", "work") else self.notes).append(str(line))

    def advance(self, num_rows):
        self.num_rows += num_rows


@pytest.mark.parametrize("num_prompts", [2, 9], ids=["a few", "many"])
def test_what_is_done_is_shown_rows_are_counted_and_what_the_model_is_is_told_once(config, num_prompts, sums, capfd):
    model, prompts = brim.Model(config), [f"a{'b' * number}" for number in range(num_prompts)]
    first, again = Heard(), Heard()
    assert len(model.generate(prompts, say=first, max_new_tokens=3)) == num_prompts
    model.generate(prompts, say=again, max_new_tokens=3)
    assert (UNTRAINED in first.notes, UNTRAINED in again.notes) == (True, False)
    assert (first.doing[0], first.doing[-1], again.doing[-1]) == ("loading the model", "generating", "generating")
    assert "loading the model" not in again.doing
    assert first.num_rows == again.num_rows == num_prompts
    assert any(note.startswith("memory: ") for note in first.notes) == (num_prompts > 8), "it is planned"
    list(brim.Model(config).generate("a", max_new_tokens=2, say=None, stream=True))
    assert capfd.readouterr() == ("", "")
    brim.Model(config).generate("a", max_new_tokens=2)
    assert capfd.readouterr().err.startswith("this is the model before training")
    heard = Heard()
    model.evaluate(pd.DataFrame(sums), with_texts=True, say=heard)
    assert heard.num_rows == 2 * len(sums), "those that are scored, and those that are answered"
    assert heard.doing[-3:] == ["planning", "trying the plan on the device", "generating"]


def test_an_observer_hears_what_it_asks_for_and_a_resumed_run_tells_of_its_own_time(config, sums_file, tmp_path):
    steps, said, output = Steps(), [], tmp_path / "run"
    whole = brim.Model(config).train(sums_file, output_directory=output, observer=steps, say=None)
    assert steps.losses == whole.history.loc[whole.history["split"] == "train", "loss"].tolist()
    ended = brim.Model(config).train(sums_file, output_directory=output, resume=True, say=said.append)
    assert (whole.num_steps, whole.num_new_steps, ended.num_steps, ended.num_new_steps) == (4, 4, 4, 0)
    assert repr(ended).startswith("TrainResult: no step was left to make: the run had ended after step 4, weights of")
    kept = (output / "notes.txt").read_text().splitlines()
    first, second = (number for number, line in enumerate(kept) if line.startswith("# brim "))
    assert first == 0
    assert kept[second].endswith("after step 4")
    assert kept[second + 1 :] == said
    assert any(line.startswith("nothing is left to train: the run ended after step 4 (16 samples)") for line in said)


def test_the_history_has_a_row_a_step_and_evaluation_and_the_plot_shows_it(finished, tmp_path):
    lines = (finished.output_directory / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "split" in record]
    history = finished.history
    assert history["split"].tolist() == ["train", "train", "validation", "train", "train", "validation", "test"]
    assert history["step"].tolist() == [1, 2, 2, 3, 4, 4, 4]
    assert set(history.columns) == {name for record in records for name in record}
    for row, record in zip(history.to_dict("records"), records, strict=True):
        assert {name: value for name, value in row.items() if not pd.isna(value)} == record
    figure = finished.plot()
    losses, rate = figure.axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in losses.lines}
    for label, split in {"training": "train", "validation": "validation", "test": "test"}.items():
        rows = history[history["split"] == split]
        assert drawn[label] == (rows["step"].tolist(), rows["loss"].tolist())
    assert list(rate.lines[0].get_ydata()) == history["learning_rate"].dropna().tolist()
    assert figure._repr_png_().startswith(b"\x89PNG"), "which a notebook shows"
    for place, words in (
        (tmp_path / "gone", f"{tmp_path}/gone/metrics.jsonl: … history cannot be read"),
        (None, "… nothing was trained"),
    ):
        with refused(words, by=brim.InputError):
            _ = replace(finished, output_directory=place).history


def test_the_effective_batch_is_drawn_where_it_moves_and_not_for_the_rest_of_an_epoch():
    def panels(sizes):
        steps = {"step": range(len(sizes)), "split": "train", "loss": 1.0, "learning_rate": 0.1}
        return history_plot(pd.DataFrame({**steps, "effective_batch_size": sizes}), title="Loss").axes[2:]

    assert panels([4, 4, 1, 4, 4, 1]) == []
    (moving,) = panels([4, 4, 1, 4, 8, 8, 2])
    assert list(moving.lines[0].get_ydata()) == [4, 4, 4, 8, 8]


def test_figures_are_a_frame(gallery, zero_shot, config, sums):
    model = brim.Model(zero_shot)
    alone = model.evaluate(sums, say=None)
    frame, interval = alone.frame, alone.loss_interval
    assert frame.loc["loss"].tolist() == [alone.metrics["loss"], interval.low, interval.high]
    assert frame.index.tolist() == list(alone.metrics)
    assert frame["low"].dropna().index.tolist() == list(alone.intervals)
    against = brim.Model.load(gallery("lora").run).evaluate(sums, against="base", say=None)
    comparison = against.comparison
    assert f"{len(sums)} rows; the other model is {config['base_model']}" in repr(against)
    ends = comparison.difference_intervals["loss"]
    both = [each["loss"] for each in (comparison.metrics, comparison.other_metrics, comparison.differences)]
    assert comparison.frame.loc["loss"].tolist() == [*both, ends.low, ends.high]


def test_a_result_and_a_model_are_readable_and_none_shows_its_arrays(config, finished, gallery, sums, tmp_path):
    def fits(size):
        outcome = "fits" if size <= 9 else "out_of_memory"
        return brim.Probe(size=size, steps=1, outcome=outcome, peak_bytes=None, seconds=0.0)

    model, plan = brim.Model.load(gallery("lora").run), brim.plan(config, sums, say=None)
    memory, folder = brim.predict_memory(config, device="t4"), tmp_path / "adapter"
    upload = brim.UploadResult(repo_id="a/b", url="https://…/1", private=True, files=("c", "d"), num_bytes=5)
    activations = model.collect_activations(["last", 0], sums, say=None)
    run, adapted = finished.output_directory, f"Model: {config['base_model']}, lora adapter (r 8); "
    shown = (
        (finished, "TrainResult: 4 steps in "),
        (finished, f"run folder {run}\n  rows: 28 train, 4 validation, 8 test\n"),
        (finished, f"\n  test: loss {finished.metrics['test']['loss']:.4f}, perplexity"),
        (brim.Model(config), f"{adapted}to be trained"),
        (brim.Model.load(run), f"{adapted}trained, run folder {run}"),
        (model.evaluate(sums, say=None), "EvaluateResult: "),
        (model.predict(sums, say=None), "PredictResult: "),
        (activations, "Activations: 40 rows of last (32 wide), 0 (32 wide), in memory"),
        (model.export(folder), f"ExportResult: adapter, for PEFT: {folder} ("),
        (plan, "TrainingPlan: 4 steps, updates of 4 rows, on cpu\n"),
        (plan, format_bytes(plan.chosen.total_bytes)),
        (memory, "MemoryPrediction: train, 4 rows × "),
        (memory, format_bytes(memory.total_bytes)),
        (PROOF, "ResumeProof: steps 11 to 14 of results/demo: the interruption changed nothing"),
        (upload, "UploadResult: 2 files, 5 bytes, private; commit: https://…/1"),
        (brim.find_batch_size(fits, most=64), "Found: 8 ("),
    )
    for result, words in shown:
        text = repr(result)
        assert words in text
        assert len(text) <= 900, "it is for a screen"
        assert not re.search(r"array\(|PosixPath", text), text


def test_what_is_no_argument_is_told_at_once(config, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = brim.Model(config)
    no_split, no_function = "… 'dev' … expected: train, validation, test, full", " … a function that takes a line"
    no_pattern = {"type": "lora", "target_modules": "("}
    for ask, message in (
        (lambda: model.predict(sums, split="dev"), no_split),
        (lambda: model.collect_activations("last", sums, split="dev"), no_split),
        (lambda: model.evaluate(sums, split="dev"), no_split),
        (lambda: model.generate({"a": "b"}), "the prompts are dict … expected: a str, or a list of them"),
        (lambda: model.generate(["a", None]), "prompt 2 "),
        (lambda: model.generate("a\ud83d"), "prompt 1 "),
        (lambda: model.predict(sums, say=True), f"say is True{no_function}"),
        (lambda: model.train(sums, say=False), f"say is False{no_function}"),
        (lambda: model.train(sums, observer=print, say=None), "the observer is print, … start, write, close"),
        (lambda: model.train(sums, observer=Steps, say=None), "the observer is the class Steps, "),
        (lambda: brim.Model({**config, "adapter": no_pattern}), "adapter.target_modules: "),
        (lambda: brim.Model(config, overrides="trainer.epochs=2"), "… KEY=VALUE"),
        (lambda: brim.Model(config, overrides={"trainer.epochs": 2}), "… KEY=VALUE"),
    ):
        with refused(message, by=brim.InputError):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_a_cpu_says_where_it_will_hold_more_than_is_planned(config, sums, tmp_path):
    def is_told(name, **memory):
        trainer = {**config["trainer"], "batch_size": "auto", "train_steps": 1}
        model = brim.Model({**config, "memory": memory, "trainer": trainer})
        run = model.train(sums, output_directory=tmp_path / name, say=None).output_directory
        return "the process will come to hold more than the plan needs" in (run / "notes.txt").read_text()

    assert is_told("ample")
    assert not is_told("with a budget", budget=0.9)
