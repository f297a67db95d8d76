"""Comparisons of a tiny model: two configurations, two seeds, very few steps; runs in this process, but for one test."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import brim
from brim.errors import BrimError, ConfigError, InputError, OutputError, Problem
from brim.train import Observers
from brim.workflows.compare import run as comparing
from brim.workflows.compare.child import Ended, run

CONFIG = """\
base_model: {base}
dataset: sums.jsonl
input_features:
  - {{name: question, type: text}}
output_features:
  - {{name: answer, type: text}}
adapter: {{type: lora, dropout: 0}}
preprocessing: {{split: fixed}}
trainer:
  type: finetune
  epochs: 1
  effective_batch_size: {size}
  learning_rate: 0.05
  checkpoints_per_epoch: 2
  chunked_loss: false  # one way to be planned: each takes a few traces
  enable_gradient_checkpointing: false
"""


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
            return Ended(outcome="finished", rows=run(order, observer=Observers([]), say=say))
        except KeyboardInterrupt:
            stop.num_asked += 1
            return Ended(outcome="stopped", rows={})
        except BrimError as error:
            is_users = isinstance(error, InputError)
            return Ended(outcome="failed", rows={}, problems=error.problems, is_users_mistake=is_users)

    def seeds(self):
        return [Path(order.output_directory).parts[-2:] for order in self.orders]


@pytest.fixture(scope="module")
def place(tiny_base, tmp_path_factory):
    """A folder with small.yaml, large.yaml and sums.jsonl, in which a comparison lies in done/. Never written to."""
    folder = tmp_path_factory.mktemp("compared")
    rows = [
        {
            "question": f"add {n} and {n % 7} =",
            "answer": f" {n + n % 7}" * (1 + n % 3),
            "split": 0 if n % 5 < 3 else n % 5 - 2,
        }
        for n in range(30)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, size in (("small", 3), ("large", 9)):
        (folder / f"{name}.yaml").write_text(CONFIG.format(base=tiny_base, size=size))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(comparing, "run_in_process", Here())
        brim.compare(["small.yaml", "large.yaml"], seeds=2, output_directory="done")
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
    result = brim.compare(["small.yaml", "large.yaml"], seeds=2, output_directory="done", resume=True)
    assert here.orders == []
    return result


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_run_is_a_run_folder_of_equal_tokens(place, done):
    assert [(each.name, each.seed) for each in done.runs] == [
        *(("small", 42), ("large", 42), ("small", 43), ("large", 43)),
    ]
    for each in done.runs:
        folder = place / "done" / each.name / f"seed-{each.seed}"
        assert (folder / "model" / "adapter_model.safetensors").is_file()
        assert each.figures.num_samples == 18
    for seed in (42, 43):
        small, large = (done.figures[name][seed] for name in ("small", "large"))
        assert (small.num_steps, large.num_steps) == (6, 2)
        assert small.num_tokens == large.num_tokens
        assert small.num_supervised_tokens == large.num_supervised_tokens


def test_runs_of_a_seed_see_the_same_rows_in_the_same_order(place, done):
    """18 rows in steps of 3 and of 9: the tokens after 9 rows are the same."""
    for seed in (42, 43):
        tokens = {}
        for name in ("small", "large"):
            lines = records(place / "done" / name / f"seed-{seed}" / "metrics.jsonl")
            tokens[name] = {line["num_samples"]: line["num_tokens"] for line in lines if "learning_rate" in line}
        assert tokens["large"].items() <= tokens["small"].items()


def test_the_last_weights_count(place, done):
    """Also where an earlier evaluation was better, and for the test rows, which are evaluated once only."""
    for each in done.runs:
        folder = place / "done" / each.name / f"seed-{each.seed}"
        lines = [line for line in records(folder / "metrics.jsonl") if line.get("split") == "validation"]
        assert each.figures.losses["validation"] == lines[-1]["loss"]
        assert lines[-1]["step"] == each.figures.num_steps
        told = brim.Model.load(folder).evaluate("sums.jsonl", split="test").metrics["loss"]
        assert each.figures.losses["test"] == pytest.approx(told, rel=1e-5)


def test_means_and_differences_are_of_the_runs(done):
    small, large = done.summaries
    by_seed = [[done.figures[name][seed].losses["validation"] for seed in (42, 43)] for name in ("small", "large")]
    differences = [b - a for a, b in zip(*by_seed, strict=True)]
    found = large.differences["validation"]
    assert found.mean == pytest.approx(sum(differences) / 2)
    half = 12.7062 * abs(differences[0] - differences[1]) / 2
    assert found.interval.high - found.mean == pytest.approx(half, rel=1e-4)
    assert (done.split, small.seeds) == ("validation", (42, 43))
    assert done.failed == []


def test_the_files_of_a_comparison(place, done):
    told = json.loads((place / "done" / "compare.json").read_text())
    assert told["seeds"] == [42, 43]
    assert [each["name"] for each in told["configurations"]] == ["small", "large"]
    assert [each["folder"] for each in told["runs"]][:2] == ["small/seed-42", "large/seed-42"]
    assert told["runs"][0]["figures"]["train_curve"]["tokens"][-1] == told["runs"][0]["figures"]["num_tokens"]
    assert (place / "done" / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (place / "done" / "compare.html").read_text()
    assert "Final loss on the validation rows" in page
    assert "Every run" in page
    assert "training loss, in 2 equal stretches" in page
    assert "curve" not in json.dumps(done.as_json(with_curves=False))


def test_a_result_is_its_tables_which_a_notebook_shows_as_such(done):
    assert repr(done) == f"CompareResult: {done.output_directory}\n\n{done.markdown().rstrip()}"
    assert done._repr_markdown_() == done.markdown()


def test_the_tables_as_markdown(done):
    text = done.markdown()
    assert re.search(r"^\| large \| \d\.\d{4} ± \d+\.\d{4} \| [+-]\d\.\d{4} ± ", text, flags=re.MULTILINE)
    assert "| large | 2 | 18 | " in text
    assert text.endswith("order of rows\n")


def test_more_seeds_and_configurations_may_follow(place, here, tmp_path):
    """The others keep what they have."""
    folder = shutil.copytree(place / "done", tmp_path / "more")
    shutil.copy("large.yaml", tmp_path / "third.yaml")
    files = ["small.yaml", "large.yaml", tmp_path / "third.yaml"]
    result = brim.compare(files, seeds=2, output_directory=folder, resume=True)
    assert here.seeds() == [("third", "seed-42"), ("third", "seed-43")]
    third = result.figures["third"][42]
    assert third.losses == pytest.approx(result.figures["large"][42].losses, rel=1e-5)
    brim.compare(files[:3], seeds=3, output_directory=folder, resume=True)
    assert here.seeds()[2:] == [("small", "seed-44"), ("large", "seed-44"), ("third", "seed-44")]


def test_the_others_take_turns_behind_the_first(place):
    class Named:
        def __init__(self, name):
            self.name = name

    found = comparing._in_turn([Named(name) for name in "abcd"], [7, 8, 9, 10])
    order = "".join(each.name for each, _ in found)
    assert order == "abcdacdbadbcabcd"
    assert [seed for _, seed in found] == [7] * 4 + [8] * 4 + [9] * 4 + [10] * 4


def test_a_run_that_fails_does_not_end_the_others_and_is_tried_again(here, tmp_path):
    here.fails = {"large/seed-42": BrimError(Problem(what="it broke", fix="mend it"))}
    said = []
    options = {"seeds": 2, "output_directory": tmp_path / "out", "overrides": ["trainer.checkpoints_per_epoch=1"]}
    result = brim.compare(["small.yaml", "large.yaml"], **options, say=said.append)
    assert [(each.name, each.seed, each.error) for each in result.failed] == [("large", 42, "it broke\n  fix: mend it")]
    assert result.summaries[1].seeds == (43,)
    assert result.summaries[1].differences["validation"].num_seeds == 1
    assert "large, seed 42, failed: it broke" in result.notes
    assert "large, seed 42, failed: it broke\n  fix: mend it" in said
    here.orders, here.fails = [], {}
    again = brim.compare(["small.yaml", "large.yaml"], **options, resume=True)
    assert (here.seeds(), again.failed) == ([("large", "seed-42")], [])


def test_without_the_first_nobody_knows_how_many_rows(here, tmp_path):
    here.fails = {"small/seed-42": BrimError(Problem(what="it broke"))}
    result = brim.compare(["small.yaml", "large.yaml"], seeds=1, output_directory=tmp_path / "out")
    assert [each.error for each in result.failed] == [
        "it broke",
        "not run, since small, which says how many rows it gets, failed",
    ]
    assert (result.summaries, result.tables()) == ([], [])
    assert not (tmp_path / "out" / "curves.png").exists()


def test_the_users_mistake_that_the_first_run_finds_ends_it(here, tmp_path):
    with pytest.raises(InputError, match="nonsense"):
        brim.compare(
            ["small.yaml", "large.yaml"],
            output_directory=tmp_path / "out",
            overrides=["adapter.target_modules=[nonsense]"],
        )
    assert here.seeds() == [("small", "seed-42")]
    assert list((tmp_path / "out").iterdir()) == []  # the mended configuration may have it


def test_ctrl_c_says_how_to_continue(here, tmp_path):
    here.fails = {"large/seed-42": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt, match="stopped; 1 of 4 runs are finished") as caught:
        brim.compare(["small.yaml", "large.yaml"], seeds=2, output_directory=tmp_path / "out")
    assert "fix: continue with the same command and --resume" in str(caught.value)
    assert len(json.loads((tmp_path / "out" / "compare.json").read_text())["runs"]) == 1


def test_a_taken_folder_is_refused_and_another_comparison_is_not_continued(here, tmp_path):
    files = ["small.yaml", "large.yaml"]
    with pytest.raises(OutputError, match="there is a comparison in this folder already"):
        brim.compare(files, seeds=2, output_directory="done")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OutputError, match="holds other things"):
        brim.compare(files, output_directory=tmp_path)
    continued = {"seeds": 2, "output_directory": "done", "resume": True}
    with pytest.raises(OutputError, match="small is not what it was when this comparison was begun"):
        brim.compare(files, **continued, overrides=["trainer.learning_rate=0.1"])
    with pytest.raises(OutputError, match="begun with small, large, in that order, now come large, small"):
        brim.compare(files[::-1], **continued)
    with pytest.raises(OutputError, match="begun with seed 42, now the first is 50"):
        brim.compare(files, **continued, overrides=["random_seed=50"])
    assert here.orders == []


@pytest.mark.parametrize(
    ("configs", "seeds", "told"),
    [
        ("a.yaml", 1, "configs is str"),
        (None, 1, "configs is NoneType"),
        ([{"base_model": "b"}, "a.yaml"], 1, "one of configs is dict"),
        (["a.yaml", "b.yaml"], 0, "seeds is 0"),
        (["a.yaml", "b.yaml"], 1.5, "seeds is 1.5"),
        (["a.yaml", "b.yaml"], 1_000_000, "seeds is 1000000"),
    ],
)
def test_what_is_no_comparison_is_refused(configs, seeds, told):
    with pytest.raises(InputError, match=re.escape(told)):
        brim.compare(configs, seeds=seeds)


def test_the_folder_of_a_run_is_no_comparison_that_could_be_continued(place, tmp_path):
    run = place / "done" / "small" / "seed-42"
    given = [run / "config.yaml", run / "config.yaml"]
    with pytest.raises(OutputError, match="holds a training run, and no comparison"):
        brim.compare(given, seeds=1, output_directory=run, resume=True)


def test_a_damaged_record_is_refused(here, tmp_path):
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(OutputError, match="cannot be read"):
        brim.compare(["small.yaml", "large.yaml"], output_directory=tmp_path, resume=True)


def test_nothing_to_compare_is_found_before_anything_is_written(here, tmp_path):
    with pytest.raises(InputError, match="one configuration"):
        brim.compare(["small.yaml"], output_directory=tmp_path / "out")
    with pytest.raises(InputError, match="seeds is 0"):
        brim.compare(["small.yaml", "large.yaml"], seeds=0, output_directory=tmp_path / "out")
    with pytest.raises(ConfigError, match="no data set"):
        brim.compare(["small.yaml", "large.yaml"], overrides=["dataset=null"], output_directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_tables_are_there(here, tmp_path, monkeypatch):
    def missing():
        raise InputError(Problem(what="a picture needs matplotlib"))

    folder = shutil.copytree("done", tmp_path / "copy")
    for name in ("curves.png", "compare.html"):
        (folder / name).unlink()
    monkeypatch.setattr(comparing, "require_matplotlib", missing)
    said = []
    result = brim.compare(["small.yaml", "large.yaml"], seeds=2, output_directory=folder, resume=True, say=said.append)
    assert len(result.tables()) == 3
    assert said == [
        "a picture needs matplotlib: no curves.png and no compare.html; pip install 'brim[plots]'",
    ]
    assert not (folder / "curves.png").exists()


def test_real_processes_ctrl_c_and_resume(place, tmp_path, here):
    """The first run is stopped in a process of its own, and goes on in this one."""
    more = ("trainer.epochs=6", "trainer.early_stop=9")
    command = [sys.executable, "-c", "from brim.cli import main; main()", "compare", "small.yaml", "large.yaml"]
    process = subprocess.Popen(
        [*command, *more, "--seeds", "1", "--output-directory", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "out" / "small" / "seed-42" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(records_so_far(metrics)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "stopped; 0 of 2 runs are finished\n  fix: continue with `brim compare small.yaml large.yaml " in err
    assert err.endswith(f" --output-directory {tmp_path / 'out'} --resume`\n")
    assert "Traceback" not in err
    stopped = len(records_so_far(metrics))
    result = brim.compare(
        ["small.yaml", "large.yaml"], seeds=1, output_directory=tmp_path / "out", resume=True, overrides=more
    )
    assert [order.resume for order in here.orders] == [True, False]
    assert stopped < result.figures["small"][42].num_steps == 36
    assert result.figures["large"][42].num_samples == 108


def records_so_far(path):
    return [line for line in path.read_text().splitlines() if '"learning_rate"' in line]
