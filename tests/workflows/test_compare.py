"""Comparisons of a tiny model: two configurations, two seeds, very few steps; which can be compared; the process of a run."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from faults.several import results, together

import brim
from brim import compare
from brim.errors import BrimError, ConfigError, InputError, OutputError, Problem
from brim.notes import Note
from brim.train import Observers
from brim.workflows.compare import results as compare_process, run as comparing
from brim.workflows.compare.results import run as run_here, run_in_process
from brim.workflows.compare.run import entrants_of
from brim.workflows.runs import Ended, Stop, TrainOrder

pytestmark = pytest.mark.run
FILES = ["small.yaml", "large.yaml"]
CONFIG = {
    "dataset": "sums.jsonl",
    "random_seed": 42,
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "adapter": {"type": "lora", "dropout": 0},
    "preprocessing": {"split": "fixed"},
    "trainer": {"type": "finetune", "epochs": 1, "effective_batch_size": 3, "learning_rate": 0.05},
}
# One way to be planned: each takes a few traces.
ONE_WAY = {"checkpoints_per_epoch": 2, "chunked_loss": False, "enable_gradient_checkpointing": False}


def written(path, base, **changes):
    """Write the configuration, with changes of its sections; None removes a key of one."""
    config = {"base_model": str(base), **CONFIG}
    for name, change in changes.items():
        if isinstance(change, dict):
            change = {key: value for key, value in {**config[name], **change}.items() if value is not None}
        config[name] = change
    path.write_text(json.dumps(config))
    return path


class Here:
    """Runs in this process, in place of `run_in_process`; what it was asked for."""

    def __init__(self):
        self.orders = []
        self.fails = {}  # folder of a run -> what it raises

    def __call__(self, order, *, observer, say, stop):
        self.orders.append(order)
        name = "/".join(Path(order.output_directory).parts[-2:])
        try:
            if name in self.fails:
                raise self.fails[name]
            return Ended(code=0, is_done=True, result=self.trained(order, say))
        except KeyboardInterrupt:
            stop.num_asked += 1
            return Ended(code=130, was_stopped=True)
        except BrimError as error:
            return Ended(code=0, error=error)

    def trained(self, order, say):
        """What the first process gives, of as many as the run is to have."""

        def run(rank=0):
            return run_here(order, observer=Observers([]), say=say)

        if order.num_processes == 1:
            return run()
        return results(together(order.num_processes, run, folder=Path(f"{order.output_directory}-ranks")))[0]

    def seeds(self):
        return [Path(order.output_directory).parts[-2:] for order in self.orders]


@pytest.fixture(scope="module")
def place(tiny_base, tmp_path_factory):
    """A folder with small.yaml, large.yaml and sums.jsonl, in which a comparison lies in done/. Never written to."""
    folder = tmp_path_factory.mktemp("compared")
    rows = [
        {"question": f"add {n} and {n % 7} =", "answer": f" {n + n % 7}" * (1 + n % 3), "split": (0, 0, 0, 1, 2)[n % 5]}
        for n in range(30)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, size in (("small", 3), ("large", 9)):
        written(folder / f"{name}.yaml", tiny_base, trainer={"effective_batch_size": size, **ONE_WAY})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(comparing, "run_in_process", Here())
        brim.compare(FILES, seeds=2, output_directory="done")
    return folder


@pytest.fixture
def here(place, monkeypatch):
    runner = Here()
    monkeypatch.chdir(place)
    monkeypatch.setattr(comparing, "run_in_process", runner)
    return runner


@pytest.fixture
def done(here):
    """The comparison that lies there, read again: nothing runs."""
    result = brim.compare(FILES, seeds=2, output_directory="done", resume=True)
    assert here.orders == []
    return result


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_run_is_a_run_folder_of_equal_tokens_in_the_same_order_of_rows(place, done):
    assert [(each.name, each.seed) for each in done.runs] == [
        (name, n) for n in (42, 43) for name in ("small", "large")
    ]
    for each in done.runs:
        assert (place / "done" / each.name / f"seed-{each.seed}" / "model" / "adapter_model.safetensors").is_file()
        assert each.figures.num_samples == 18
    for seed in (42, 43):
        small, large = (done.figures[name][seed] for name in ("small", "large"))
        assert (small.num_steps, large.num_steps) == (6, 2)
        assert small.num_tokens == large.num_tokens
        assert small.num_supervised_tokens == large.num_supervised_tokens
        tokens = {}  # 18 rows in steps of 3 and of 9: the tokens after 9 rows are the same
        for name in ("small", "large"):
            lines = records(place / "done" / name / f"seed-{seed}" / "metrics.jsonl")
            tokens[name] = {line["num_samples"]: line["num_tokens"] for line in lines if "learning_rate" in line}
        assert tokens["large"].items() <= tokens["small"].items()


def test_several_processes_train_a_run_as_one_does(here, done, tmp_path):
    result = brim.compare(
        FILES, seeds=1, output_directory=tmp_path / "two", overrides=["backend.trainer.num_workers=2"]
    )
    assert result.failed == []
    for each, alone in zip(result.runs, done.runs, strict=False):
        assert (each.name, each.rows) == (alone.name, alone.rows)
        assert each.figures.losses == pytest.approx(alone.figures.losses, rel=1e-4)
        lines = records(tmp_path / "two" / each.name / "seed-42" / "metrics.jsonl")
        assert {line["ranks"] for line in lines if "learning_rate" in line} == {2}


def test_the_last_weights_count(place, done):
    """Also where an earlier evaluation was better, and for the test rows, which are evaluated once only."""
    for each in done.runs:
        folder = place / "done" / each.name / f"seed-{each.seed}"
        lines = [line for line in records(folder / "metrics.jsonl") if line.get("split") == "validation"]
        assert each.figures.losses["validation"] == lines[-1]["loss"]
        assert lines[-1]["step"] == each.figures.num_steps
        told = brim.Model.load(folder).evaluate("sums.jsonl", split="test").metrics["loss"]
        assert each.figures.losses["test"] == pytest.approx(told, rel=1e-5)


def test_the_files_and_tables_of_a_comparison(place, done):
    assert (done.split, done.summaries[0].seeds, done.failed) == ("validation", (42, 43), [])
    told = json.loads((place / "done" / "compare.json").read_text())
    assert told["seeds"] == [42, 43]
    assert [each["name"] for each in told["configurations"]] == ["small", "large"]
    assert [each["folder"] for each in told["runs"]][:2] == ["small/seed-42", "large/seed-42"]
    assert told["runs"][0]["figures"]["train_curve"]["tokens"][-1] == told["runs"][0]["figures"]["num_tokens"]
    assert (place / "done" / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (place / "done" / "compare.html").read_text()
    for words in ("Final loss on the validation rows", "Every run", "training loss, in 2 equal stretches"):
        assert words in page
    assert "curve" not in json.dumps(done.as_json(with_curves=False))
    text = done.markdown()
    assert repr(done) == f"CompareResult: {done.output_directory}\n\n{text.rstrip()}"
    assert done._repr_markdown_() == text  # which a notebook shows
    assert re.search(r"^\| large \| \d\.\d{4} ± \d+\.\d{4} \| [+-]\d\.\d{4} ± ", text, flags=re.MULTILINE)
    assert "| large | 2 | 18 | " in text
    assert text.endswith("order of rows\n")


def test_more_seeds_and_configurations_may_follow(place, here, tmp_path):
    """The others keep what they have."""
    folder = shutil.copytree(place / "done", tmp_path / "more")
    shutil.copy("large.yaml", tmp_path / "third.yaml")
    files = [*FILES, tmp_path / "third.yaml"]
    result = brim.compare(files, seeds=2, output_directory=folder, resume=True)
    assert here.seeds() == [("third", "seed-42"), ("third", "seed-43")]
    assert result.figures["third"][42].losses == pytest.approx(result.figures["large"][42].losses, rel=1e-5)
    brim.compare(files, seeds=3, output_directory=folder, resume=True)
    assert here.seeds()[2:] == [("small", "seed-44"), ("large", "seed-44"), ("third", "seed-44")]


def test_a_run_that_fails_does_not_end_the_others_and_is_tried_again(here, tmp_path, capsys):
    here.fails = {"large/seed-42": BrimError(Problem(what="it broke", fix="mend it"))}
    said = []
    options = {"seeds": 2, "output_directory": tmp_path / "out", "overrides": ["trainer.checkpoints_per_epoch=1"]}
    result = brim.compare(FILES, **options, say=said.append)
    assert [(each.name, each.seed, each.error) for each in result.failed] == [("large", 42, "it broke\n  fix: mend it")]
    assert result.summaries[1].seeds == (43,)
    assert result.summaries[1].differences["validation"].num_seeds == 1
    assert "large, seed 42, failed: it broke" in result.notes
    assert "large, seed 42, failed: it broke\n  fix: mend it" in said
    here.orders, here.fails = [], {}
    again = brim.compare(FILES, **options, resume=True)
    assert (here.seeds(), again.failed) == ([("large", "seed-42")], [])
    here.fails = {"large/seed-42": BrimError(Problem(what="it broke", fix="mend it"))}
    capsys.readouterr()
    brim.compare(FILES, seeds=1, output_directory=tmp_path / "shown")
    assert "large, seed 42, failed: it broke\n  fix: mend it\n" in capsys.readouterr().err  # in no card


def test_without_the_first_nobody_knows_how_many_rows(here, tmp_path):
    here.fails = {"small/seed-42": BrimError(Problem(what="it broke"))}
    result = brim.compare(FILES, seeds=1, output_directory=tmp_path / "out")
    unknown = "not run, since small, which says how many rows it gets, failed"
    assert [each.error for each in result.failed] == ["it broke", unknown]
    assert (result.summaries, result.tables()) == ([], [])
    assert not (tmp_path / "out" / "curves.png").exists()


def test_the_users_mistake_that_the_first_run_finds_ends_it(here, tmp_path):
    with pytest.raises(InputError, match="nonsense"):
        brim.compare(FILES, output_directory=tmp_path / "out", overrides=["adapter.target_modules=[nonsense]"])
    assert here.seeds() == [("small", "seed-42")]
    assert list((tmp_path / "out").iterdir()) == []  # the mended configuration may have it


def test_ctrl_c_says_how_to_continue(here, tmp_path):
    here.fails = {"large/seed-42": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt, match="stopped; 1 of 4 runs are finished") as caught:
        brim.compare(FILES, seeds=2, output_directory=tmp_path / "out")
    assert "fix: continue with the same command and --resume" in str(caught.value)
    assert len(json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]) == 1


def test_a_taken_folder_is_refused_and_another_comparison_is_not_continued(place, here, tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "compare.json").write_text("{}")
    run = place / "done" / "small" / "seed-42"
    new, continued = {"output_directory": "done"}, {"output_directory": "done", "resume": True}
    for files, options, message in (
        (FILES, new, "there is a comparison in this folder already"),
        (FILES, {"output_directory": tmp_path}, "holds other things"),
        (FILES, {**continued, "overrides": ["trainer.learning_rate=0.1"]}, "small is not what it was when this"),
        (FILES[::-1], continued, "begun with small, large, in that order, now come large, small"),
        (FILES, {**continued, "overrides": ["random_seed=50"]}, "begun with seed 42, now the first is 50"),
        ([run / "config.yaml"] * 2, {**continued, "output_directory": run}, "holds a training run, not a comparison"),
        (FILES, {**continued, "output_directory": tmp_path / "damaged"}, "cannot be read"),
    ):
        with pytest.raises(OutputError, match=message):
            brim.compare(files, seeds=2, **options)
    assert here.orders == []


def test_nothing_to_compare_is_found_before_anything_is_written(here, tmp_path):
    for configs, seeds, told in (
        ("a.yaml", 1, "configs is str"),
        (None, 1, "configs is NoneType"),
        ([{"base_model": "b"}, "a.yaml"], 1, "one of configs is dict"),
        (FILES, 0, "seeds is 0"),
        (FILES, 1.5, "seeds is 1.5"),
        (FILES, 1_000_000, "seeds is 1000000"),
        ([], 1, "no configuration"),
    ):
        with pytest.raises(InputError, match=re.escape(told)):
            brim.compare(configs, seeds=seeds, output_directory=tmp_path / "out")
    with pytest.raises(ConfigError, match="no data set"):
        brim.compare(FILES, overrides=["dataset=null"], output_directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_tables_are_there(here, tmp_path, monkeypatch):
    def missing(*runs, **texts):
        raise InputError(Problem(what="a picture needs matplotlib"))

    folder = shutil.copytree("done", tmp_path / "copy")
    for name in ("curves.png", "compare.html"):
        (folder / name).unlink()
    monkeypatch.setattr(comparing, "curves_plot", missing)
    said = []
    result = brim.compare(FILES, seeds=2, output_directory=folder, resume=True, say=said.append)
    assert len(result.tables()) == 3
    assert said == ["a picture needs matplotlib: no curves.png and no compare.html; pip install 'brim[plots]'"]
    assert not (folder / "curves.png").exists()


@pytest.mark.process
def test_a_real_process_ctrl_c_and_resume(place, tmp_path, here, monkeypatch, brim):
    """The first run is stopped in a process of its own, and goes on in this one."""
    more, out = ("trainer.epochs=6", "trainer.early_stop=9"), tmp_path / "out"
    metrics = out / "small" / "seed-42" / "metrics.jsonl"

    class Pressed(compare_process._Heard):
        """Ctrl-C is pressed when the second step is heard of."""

        def __call__(self, message):
            super().__call__(message)
            record = message.get("record", {})
            if record.get("step") == 2 and "learning_rate" in record:
                os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(compare_process, "_Heard", Pressed)
        patch.setattr(comparing, "run_in_process", run_in_process)
        done = brim("compare", *FILES, *more, "--seeds", "1", "--output-directory", out)
    assert (done.code, done.out) == (130, "")
    assert "stopped; 0 of 2 runs are finished\n  fix: continue with `brim compare small.yaml large.yaml " in done.err
    assert done.err.endswith(f" --output-directory {out} --resume`\n")
    stopped = metrics.read_text().count('"learning_rate"')
    result = compare(FILES, seeds=1, output_directory=out, resume=True, overrides=more)
    assert [order.resume for order in here.orders] == [True, False]
    assert stopped < result.figures["small"][42].num_steps == 36
    assert result.figures["large"][42].num_samples == 108


@pytest.fixture
def write(tmp_path, tiny_base, sums_file):
    """write("b", trainer={"epochs": 3}): b.yaml with changes of sections."""
    return lambda name, **changes: written(
        tmp_path / f"{name}.yaml", tiny_base, **{"dataset": str(sums_file), **changes}
    )


def test_the_others_take_turns_behind_the_first():
    found = comparing._in_turn([SimpleNamespace(name=name) for name in "abcd"], [7, 8, 9, 10])
    assert "".join(each.name for each, _ in found) == "abcdacdbadbcabcd"
    assert [seed for _, seed in found] == [each for seed in (7, 8, 9, 10) for each in [seed] * 4]


def test_names_are_made_unique_and_a_run_is_a_configuration_too_whose_word_for_code_is_not_enough(write, tmp_path):
    for folder in ("more", "run"):
        (tmp_path / folder).mkdir()
    file, upper = write("a"), write("A")
    copy = shutil.copy(file, tmp_path / "more" / "a.yaml")
    reserved = shutil.copy(file, tmp_path / "compare.json.yaml")
    shutil.copy(file, tmp_path / "run" / "config.yaml")
    found = entrants_of([file, copy, file, upper, reserved, tmp_path / "run"], [], None)
    assert [each.name for each in found] == ["a", "a-2", "a-3", "A-4", "compare.json-2", "run"]
    assert found[0].digest == found[1].digest
    shutil.move(write("a", trust_remote_code=True), tmp_path / "run" / "config.yaml")
    with pytest.raises(ConfigError, match="trust_remote_code is true in the configuration of a run"):
        entrants_of([tmp_path / "run", write("b")], [], None)
    entrants_of([tmp_path / "run", write("b")], ["trust_remote_code=false"], None)


def test_what_is_set_for_all(write, tmp_path, sums_file):
    first, second = entrants_of([write("a"), write("b")], ["trainer.learning_rate=0.5"], None)
    assert (first.name, second.name) == ("a", "b")
    assert first.overrides == second.overrides == ("trainer.learning_rate=0.5", "trainer.early_stop=-1")
    assert (second.config.trainer.learning_rate, second.config.trainer.early_stop) == (0.5, -1)
    assert first.changes == second.changes == ()
    other = shutil.copy(sums_file, tmp_path / "it's: other.jsonl")
    found = entrants_of([write("a"), write("b")], [], other)
    assert [each.config.dataset for each in found] == [str(other)] * 2


def test_what_the_comparison_changes_is_told_and_the_digest_is_of_the_settings_but_not_of_the_seed(write):
    files = [
        write("a"),
        write("b", trainer={"epochs": None, "train_steps": 500}, random_seed=8),
        write("c", trainer={"epochs": 3}),
        write("d", random_seed=8),
    ]
    found = entrants_of(files, [], None)
    assert found[0].changes == ()
    assert found[1].changes == (
        "b is trained on as many rows as a, whatever its trainer.train_steps (500) says",
        "b takes the seeds of a, not its own random_seed (8)",
    )
    assert found[2].changes == ("c is trained on as many rows as a, whatever its trainer.epochs (3) says",)
    assert found[0].digest == found[3].digest != found[2].digest
    # Equal numbers of steps may be other numbers of rows.
    equal = [write(name, trainer={"epochs": None, "train_steps": 5}) for name in "ab"]
    assert [len(each.changes) for each in entrants_of(equal, [], None)] == [0, 1]


def test_losses_of_other_rows_or_answers_are_refused(write, tmp_path):
    (tmp_path / "other.jsonl").touch()
    for changes, what in (
        ({"preprocessing": {"split": "random"}}, "preprocessing.split is"),
        ({"preprocessing": {"sample_size": 9}}, "preprocessing.sample_size is 9, in the first"),
        ({"preprocessing": {"sample_ratio": 0.5}}, "preprocessing.sample_ratio is 0.5, in the first"),
        ({"output_features": [{"name": "other", "type": "text"}]}, 'output_features is ["other", "text"]'),
        ({"dataset": str(tmp_path / "other.jsonl")}, "dataset is"),
    ):
        with pytest.raises(ConfigError) as caught:
            entrants_of([write("a"), write("b", **changes)], [], None)
        (problem,) = caught.value.problems
        assert problem.what.startswith(what)
        assert problem.where == str(tmp_path / "b.yaml")


def test_all_that_is_wrong_is_told_at_once(write, tmp_path):
    files = [write("a"), tmp_path / "b.yaml", write("c", preprocessing={"split": "random"})]
    config = json.loads(files[0].read_text())
    files[1].write_text(json.dumps({**config, "trainer": {"type": "none"}}))
    with pytest.raises(ConfigError) as caught:
        entrants_of(files, [], None)
    nothing, split = (problem.what for problem in caught.value.problems)
    assert nothing.startswith("this configuration trains nothing")
    assert split.startswith('preprocessing.split is {"type": "r')
    for other, message in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "this folder is not a run")):
        with pytest.raises(InputError, match=message):
            entrants_of([files[0], other], [], None)


ORDER = TrainOrder(config="é.yaml", overrides=("a=1", "b='x y'"), output_directory="out", resume=True, num_processes=2)


def test_what_its_process_tells_is_passed_on(monkeypatch):
    def run_child(function, order, *, on_message, stop, when_alone, num_processes):
        assert num_processes == ORDER.num_processes
        assert TrainOrder(**{**order, "overrides": tuple(order["overrides"])}) == ORDER
        assert (function, when_alone) == (compare_process.train, signal.SIGTERM)
        told = compare_process.Told(lambda **message: on_message(json.loads(json.dumps(message))))
        told.say(Note("hello", kind="warning", topic="rows"))
        told.start(first_step=1, total_steps=None, total_samples=9)
        told.write({"step": 2, "loss": 0.5})
        if is_killed:
            return Ended(code=-9)
        told.close()
        return Ended(code=0, is_done=True, result={"train": "x"})

    monkeypatch.setattr(compare_process, "run_child", run_child)
    for is_killed in (False, True):
        heard, said = Mock(), []
        ended = run_in_process(ORDER, observer=heard, say=said.append, stop=Stop())
        assert ended.code == (-9 if is_killed else 0)
        assert [(str(line), line.kind, line.topic) for line in said] == [("hello", "warning", "rows")]
        started = call.start(first_step=1, total_steps=None, total_samples=9)
        assert heard.mock_calls == [started, call.write({"step": 2, "loss": 0.5}), call.close()]
