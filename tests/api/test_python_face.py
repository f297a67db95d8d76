"""What a person sees and gets who trains from Python."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO

import pandas as pd
import pytest
from tests.api.hand_made_proof import PROOF
from tests.report.hand_made import hand_made_prediction

import brim
from brim.notes import Note, kind_of
from brim.report import Screen, history_plot
from brim.units import format_bytes


@pytest.fixture
def with_gaps(sums):
    """The sums, of which three cannot be used."""
    return pd.DataFrame(
        [{**row, "question": None if number in (3, 13, 23) else row["question"]} for number, row in enumerate(sums)]
    )


@pytest.fixture
def dropping(config):
    features = [{"name": "question", "type": "text", "preprocessing": {"missing_value_strategy": "drop_row"}}]
    return {**config, "input_features": features}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_base):
    """A finished run of four steps, with two evaluations."""
    config = {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora", "dropout": 0.0},
        "preprocessing": {"split": "fixed"},
        "trainer": {
            "type": "finetune", "train_steps": 4, "effective_batch_size": 4, "early_stop": -1, "steps_per_checkpoint": 2,
        },
    }  # fmt: skip
    rows = {"question": ["a"] * 20, "answer": ["b c"] * 20, "split": [0] * 16 + [1] * 2 + [2] * 2}
    output = tmp_path_factory.mktemp("run") / "first"
    return brim.Model(config).train(rows, output_directory=output, say=None)


class Steps(brim.Observer):
    """Hears steps alone; the other methods are those that it inherits."""

    def __init__(self):
        self.losses = []

    def write(self, record):
        if "learning_rate" in record:
            self.losses.append(record["loss"])


def test_training_shows_what_was_dropped_and_planned_on_stderr(dropping, with_gaps, tmp_path, capfd):
    brim.Model(dropping).train(with_gaps, output_directory=tmp_path / "run")
    out, err = capfd.readouterr()
    assert out == ""
    batch, dropped, *planned = err.splitlines()
    assert batch == "trainer.effective_batch_size: 4 (batch 4 × accumulation 1)"
    assert dropped.startswith("3 of 40 rows were dropped: a cell that the prompt or the answer needs")
    assert [line.split(":")[0] for line in planned[:3]] == ["plan", "memory", "time"]
    assert "step 4  validation: loss " in err


def test_none_is_silence(dropping, with_gaps, tmp_path, capfd):
    model = brim.Model(dropping)
    model.train(with_gaps, output_directory=tmp_path / "run", say=None)
    model.evaluate(with_gaps, say=None)
    model.predict(with_gaps, say=None)
    assert capfd.readouterr() == ("", "")


def test_print_gets_every_note_and_no_progress(dropping, with_gaps, tmp_path, capfd):
    printed = StringIO()
    with redirect_stdout(printed):
        brim.Model(dropping).train(with_gaps, output_directory=tmp_path / "run", say=print)
    lines = printed.getvalue().splitlines()
    assert capfd.readouterr().err == ""
    assert any(line.startswith("adapter.alpha: 16") for line in lines)
    assert not any("validation: loss" in line for line in lines)
    kept = (tmp_path / "run/notes.txt").read_text().splitlines()
    assert kept[0].startswith("# brim ")
    assert kept[1:] == lines


@pytest.mark.parametrize("verb", ["predict", "evaluate", "collect_activations", "plan"])
def test_dropped_rows_are_told(dropping, with_gaps, capfd, verb):
    ask = {
        "plan": lambda: brim.plan(dropping, with_gaps),
        "predict": lambda: brim.Model(dropping).predict(with_gaps),
        "evaluate": lambda: brim.Model(dropping).evaluate(with_gaps),
        "collect_activations": lambda: brim.Model(dropping).collect_activations("last", with_gaps),
    }
    ask[verb]()
    assert "3 of 40 rows were dropped" in capfd.readouterr().err


class Heard(Screen):
    """brim's own screen, which also keeps what it hears."""

    def __init__(self):
        super().__init__(StringIO())
        self.notes, self.doing, self.num_rows = [], [], 0

    def __call__(self, line):
        (self.doing if kind_of(line) == "status" else self.notes).append(str(line))

    def advance(self, num_rows):
        self.num_rows += num_rows


@pytest.mark.parametrize("num_prompts", [2, 9], ids=["a few", "many"])
def test_generating_shows_what_it_does_and_tells_once_what_the_model_is(config, num_prompts, capfd):
    model, prompts = brim.Model(config), [f"a{'b' * number}" for number in range(num_prompts)]
    first, again = Heard(), Heard()
    assert len(model.generate(prompts, say=first, max_new_tokens=3)) == num_prompts
    model.generate(prompts, say=again, max_new_tokens=3)
    untrained = "this is the model before training; for what a run has learned, name the run's folder"
    assert (untrained in first.notes, untrained in again.notes) == (True, False)
    assert (first.doing[0], first.doing[-1], again.doing[-1]) == ("loading the model", "generating", "generating")
    assert "loading the model" not in again.doing
    assert first.num_rows == again.num_rows == num_prompts
    assert any(note.startswith("memory: ") for note in first.notes) == (num_prompts > 8), "it is planned"
    assert capfd.readouterr() == ("", "")


def test_generating_speaks_by_default_to_stderr_and_not_with_none(config, capfd):
    brim.Model(config).generate("a", max_new_tokens=2)
    out, err = capfd.readouterr()
    assert (out, err.startswith("this is the model before training")) == ("", True)
    brim.Model(config).generate("a", max_new_tokens=2, say=None)
    list(brim.Model(config).generate("a", max_new_tokens=2, say=None, stream=True))
    assert capfd.readouterr() == ("", "")
    pieces, said = [], []
    pieces.extend(brim.Model(config).generate("a", max_new_tokens=2, say=said.append, stream=True))
    assert [line.split(";")[0] for line in said] == ["this is the model before training"]


def test_evaluating_counts_the_rows_that_are_scored_and_answered(config, sums):
    heard = Heard()
    brim.Model(config).evaluate(pd.DataFrame(sums), with_texts=True, say=heard)
    assert heard.num_rows == 2 * len(sums)
    assert heard.doing[-3:] == ["planning", "trying the plan on the device", "generating"]


def test_an_observer_of_one_s_own_needs_only_what_it_is_interested_in(config, sums_file, tmp_path):
    steps = Steps()
    result = brim.Model(config).train(sums_file, output_directory=tmp_path / "run", observer=steps, say=None)
    history = result.history
    assert steps.losses == history.loc[history["split"] == "train", "loss"].tolist()


def test_the_notes_of_a_resumed_run_stand_below_those_of_its_start(config, sums_file, tmp_path):
    said = []
    for num_steps in (None, "again"):
        del said[:]
        brim.Model(config).train(
            sums_file, output_directory=tmp_path / "run", resume=num_steps is not None, say=said.append
        )
    kept = (tmp_path / "run/notes.txt").read_text().splitlines()
    heads = [number for number, line in enumerate(kept) if line.startswith("# brim ")]
    assert len(heads) == 2
    assert kept[heads[1]].endswith("after step 4")
    assert kept[heads[1] + 1 :] == said
    assert any(line.startswith("nothing is left to train: the run ended after step 4 (16 samples)") for line in said)


def test_a_continued_run_counts_the_steps_of_its_own_time(config, sums_file, tmp_path):
    whole = brim.Model(config).train(sums_file, output_directory=tmp_path / "run", say=None)
    ended = brim.Model(config).train(sums_file, output_directory=tmp_path / "run", resume=True, say=None)
    assert (whole.num_steps, whole.num_new_steps, ended.num_steps, ended.num_new_steps) == (4, 4, 4, 0)
    assert repr(ended).startswith("TrainResult: no step was left to make: the run had ended after step 4, weights of")


def test_notes_are_texts():
    note = Note("a note", kind="warning", topic="rows")
    assert note == "a note"
    assert json.dumps([note]) == '["a note"]'


def test_the_history_has_a_row_a_step_and_evaluation_with_the_log_s_columns(trained):
    lines = (trained.output_directory / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "split" in record]
    history = trained.history
    assert history["split"].tolist() == ["train", "train", "validation", "train", "train", "validation", "test"]
    assert history["step"].tolist() == [1, 2, 2, 3, 4, 4, 4]
    assert set(history.columns) == {name for record in records for name in record}
    for row, record in zip(history.to_dict("records"), records, strict=True):
        assert {name: value for name, value in row.items() if not pd.isna(value)} == record


def test_the_history_of_a_run_that_is_gone_says_where_it_was(trained, tmp_path):
    from dataclasses import replace

    with pytest.raises(brim.InputError, match="history cannot be read") as caught:
        _ = replace(trained, output_directory=tmp_path / "gone").history
    assert caught.value.problems[0].where == str(tmp_path / "gone/metrics.jsonl")
    with pytest.raises(brim.InputError, match="nothing was trained"):
        _ = replace(trained, output_directory=None).history


def test_the_plot_shows_the_history(trained):
    pytest.importorskip("matplotlib")
    figure, history = trained.plot(), trained.history
    losses, rate = figure.axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in losses.lines}
    for label, split in {"training": "train", "validation": "validation", "test": "test"}.items():
        rows = history[history["split"] == split]
        assert drawn[label] == (rows["step"].tolist(), rows["loss"].tolist())
    assert list(rate.lines[0].get_ydata()) == history["learning_rate"].dropna().tolist()
    assert figure._repr_png_().startswith(b"\x89PNG"), "which a notebook shows"


def test_without_matplotlib_the_plot_names_the_command_that_installs_it(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(brim.InputError) as caught:
        trained.plot()
    assert "pip install 'brim[plots]'" in caught.value.problems[0].fix


def test_a_result_and_a_model_are_readable(trained, config):
    first, rows, *evaluated = repr(trained).splitlines()
    assert first.startswith("TrainResult: 4 steps in ")
    assert first.endswith(f"run folder {trained.output_directory}")
    assert rows == "  rows: 16 train, 2 validation, 2 test"
    loss = trained.metrics["test"]["loss"]
    assert f"  test: loss {loss:.4f}, perplexity" in "\n".join(evaluated)
    base = config["base_model"]
    assert repr(brim.Model(config)) == f"Model: {base}, lora adapter (r 8); to be trained"
    assert repr(brim.Model({**config, "adapter": None, "trainer": {"type": "none"}})) == f"Model: {base}"
    assert repr(brim.Model.load(trained.output_directory)) == (
        f"Model: {base}, lora adapter (r 8); trained, run folder {trained.output_directory}"
    )


def test_the_effective_batch_is_drawn_where_it_moves_and_not_for_the_rest_of_an_epoch():
    pytest.importorskip("matplotlib")

    def panels(sizes):
        steps = [
            {"step": number, "split": "train", "loss": 1.0, "learning_rate": 0.1, "effective_batch_size": size}
            for number, size in enumerate(sizes, start=1)
        ]
        return history_plot(pd.DataFrame(steps), title="Loss").axes[2:]

    assert panels([4, 4, 1, 4, 4, 1]) == []
    (moving,) = panels([4, 4, 1, 4, 8, 8, 2])
    assert list(moving.lines[0].get_ydata()) == [4, 4, 4, 8, 8]


def test_figures_are_a_table_and_a_frame(zero_shot, config, sums, trained):
    model = brim.Model(zero_shot)
    alone = model.evaluate(sums, say=None)
    head, titles, *lines = repr(alone).splitlines()
    assert (head, titles.split()) == ("EvaluateResult: full", ["full"])
    loss, interval = alone.metrics["loss"], alone.loss_interval
    assert lines[0].split() == ["loss", f"{loss:.4f}", f"({interval.low:.3f}", "to", f"{interval.high:.3f})"]
    frame = alone.frame
    assert frame.loc["loss"].tolist() == [loss, interval.low, interval.high]
    assert frame.index.tolist() == list(alone.metrics)
    assert frame["low"].dropna().index.tolist() == list(alone.intervals)
    against = brim.Model.load(trained.output_directory).evaluate(sums, against="base", say=None)
    comparison = against.comparison
    assert f"{len(sums)} rows; the other model is {config['base_model']}" in repr(against)
    row = comparison.frame.loc["loss"]
    ends = comparison.difference_intervals["loss"]
    assert row.tolist() == [
        comparison.metrics["loss"],
        comparison.other_metrics["loss"],
        comparison.differences["loss"],
        ends.low,
        ends.high,
    ]


def test_rows_without_figures_are_told_in_the_result(dropping, with_gaps):
    result = brim.Model(dropping).evaluate(with_gaps, say=None)
    assert repr(result).endswith("that the prompt or the answer needs is missing: 3")


def test_no_result_shows_its_arrays(config, trained, sums, tmp_path):
    model = brim.Model.load(trained.output_directory)
    shown = {
        "evaluate": model.evaluate(sums, say=None),
        "predict": model.predict(sums, say=None),
        "activations": model.collect_activations(["last", 0], sums, say=None),
        "export": model.export(tmp_path / "adapter"),
        "merge": model.export(tmp_path / "merged", merge=True, say=None),
        "plan": brim.plan(config, sums, say=None),
        "memory": brim.predict_memory(config, device="t4"),
        "proof": PROOF,
        "prediction": hand_made_prediction(),
        "upload": brim.UploadResult(repo_id="a/b", url="https://…/1", private=True, files=("c", "d"), num_bytes=5),
        "found": brim.find_batch_size(fits_up_to(9), most=64),
    }
    texts = {name: repr(each) for name, each in shown.items()}
    assert {name: len(text) for name, text in texts.items() if len(text) > 900} == {}
    assert [name for name, text in texts.items() if "array(" in text or "PosixPath" in text] == []
    assert texts["activations"] == "Activations: 40 rows of last (32 wide), 0 (32 wide), in memory"
    assert texts["export"].startswith(f"ExportResult: adapter, for PEFT: {tmp_path / 'adapter'} (")
    plan = shown["plan"]
    assert texts["plan"].startswith("TrainingPlan: 4 steps, updates of 4 rows, on cpu\n  no checkpointing, ")
    assert format_bytes(plan.chosen.total_bytes) in texts["plan"]
    assert texts["memory"].startswith("MemoryPrediction: train, 4 rows × ")
    assert format_bytes(shown["memory"].total_bytes) in texts["memory"]
    assert texts["proof"].startswith(
        "ResumeProof: steps 11 to 14 of results/demo: the interruption changed nothing, to the bit (12.0 s)\n  rows: equal"
    )
    assert texts["upload"] == "UploadResult: 2 files, 5 bytes, private; commit: https://…/1"
    assert texts["found"].startswith("Found: 8 (")


def fits_up_to(largest):
    """What would come of trying a size."""

    def fits(size):
        outcome = "fits" if size <= largest else "out_of_memory"
        return brim.Probe(size=size, steps=1, outcome=outcome, peak_bytes=None, seconds=0.0)

    return fits


NO_SPLIT = "there is no split 'dev'\n  expected: train, validation, test, full"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda model, rows: model.predict(rows, split="dev"), NO_SPLIT),
        (lambda model, rows: model.collect_activations("last", rows, split="dev"), NO_SPLIT),
        (lambda model, rows: model.evaluate(rows, split="dev"), NO_SPLIT),
        (lambda model, rows: model.generate(None), "the prompts are NoneType\n  expected: a str, or a list of them"),
        (lambda model, rows: model.generate({"a": "b"}), "the prompts are dict\n  expected: a str, or a list of them"),
        (lambda model, rows: model.generate(["a", None]), "prompt 2 is no text"),
        (lambda model, rows: model.predict(rows, say=True), "say is True\n  expected: a function that takes a line"),
        (lambda model, rows: model.train(rows, say=False), "say is False\n  expected: a function that takes a line"),
        (
            lambda model, rows: model.train(rows, observer=print, say=None),
            "the observer is print, which cannot hear a run: it has no method start, write, close",
        ),
        (
            lambda model, rows: model.train(rows, observer=Steps, say=None),
            "the observer is the class Steps, which cannot hear a run",
        ),
    ],
)
def test_what_is_no_argument_is_told_at_once(config, sums, tmp_path, monkeypatch, ask, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(brim.InputError) as caught:
        ask(brim.Model(config), sums)
    assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overrides", ["trainer.epochs=2", {"trainer.epochs": 2}], ids=["text", "mapping"])
def test_overrides_are_a_list(config, overrides):
    with pytest.raises(brim.ConfigError, match="KEY=VALUE") as caught:
        brim.Model(config, overrides=overrides)
    assert len(caught.value.problems) == 1


def test_a_plan_for_a_gpu_shows_no_warnings_of_libraries(config, sums, tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path))  # so that it is traced
    brim.plan(config, sums, device="t4", say=None)
    assert [str(each.message) for each in recwarn] == []


def test_a_run_on_a_cpu_says_where_it_will_hold_more_than_is_planned(config, sums, tmp_path, monkeypatch):
    def notes(name, **memory):
        settings = {**config, "memory": memory, "trainer": {**config["trainer"], "batch_size": "auto"}}
        result = brim.Model(settings).train(sums, output_directory=tmp_path / name, say=None)
        return (result.output_directory / "notes.txt").read_text()

    told = "the process will come to hold more than the plan needs"
    assert told in notes("ample")
    assert told not in notes("with a budget", budget=0.9)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert told not in notes("given back at once")


@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
def test_an_empty_list_is_answered_with_what_was_expected_and_what_to_do(config, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(brim.DataError) as caught:
        getattr(brim.Model(config), verb)([], say=None)
    (problem,) = caught.value.problems
    assert problem.what == "an empty list was given as the data set"
    assert problem.expected.startswith("at least one row")
    assert "a filter that keeps no row" in problem.fix
