"""`brim plan` and `brim train`: tables and JSON, what is printed before the first step, what goes on and what does not."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter

import pytest
from tests.chatml import conversation
from tests.cli.conftest import records, write

from brim import Model
from brim.distributed.launch import Launched
from brim.errors import InputError
from brim.planning import TrainingPlan

TRAIN = ("train", "config.yaml", "--dataset", "sums.jsonl", "--output-directory", "new")


# Plans

ONE_WAY = ("trainer.enable_gradient_checkpointing=false", "trainer.chunked_loss=false")  # each way takes a few traces
BY_LENGTH = ("trainer.batch_size=auto", "trainer.effective_batch_size=8", *ONE_WAY)
DATA = ("--dataset", "sums.jsonl")


@pytest.mark.parametrize(
    ("verb", "wrong"), [(("plan", *DATA, "--device", "t4"), "memory.budget=99GiB"), (("memory",), "base_model=nowhere")]
)
def test_what_was_noted_before_a_card_could_be_made_is_said_beside_the_error(brim, project, verb, wrong):
    done = brim(verb[0], "config.yaml", *verb[1:], wrong, "trainer.epochs=9", "trainer.train_steps=5")
    assert (done.code, done.out) == (2, "")
    assert "trainer.epochs has no effect" in done.err
    assert wrong.partition("=")[0] in done.err


def test_a_plan_is_a_table_with_verbose(brim, project):
    lines = brim("plan", "config.yaml", *BY_LENGTH, *DATA, "--device", "t4", "--verbose").out.splitlines()
    assert lines[0].endswith(": train, updates of 8 rows, on t4")
    assert max(map(len, lines)) <= 80


def test_rows_that_are_not_there_yet_are_planned_from_config_json_alone(brim, project, tiny_base):
    """And as data that is alike. So is the memory."""

    def plan(*more):
        return TrainingPlan.from_dict(
            json.loads(brim("plan", "config.yaml", *more, "--device", "t4", "--json", code=0).out)
        )

    folder = project / "later"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_base / "config.json").read_bytes())
    made = plan(*BY_LENGTH, f"base_model={folder}", "--rows", 42, "--sequence-length", 20)
    assert (made.lengths.num_rows, made.lengths.shortest, made.lengths.longest) == (42, 20, 20)
    assert (made.effective_batch_size, made.total_steps, made.total_samples) == (8, 12, 84)
    assert (made.chosen.padding, made.chosen.widest) == (1.0, (8, 20))
    (project / "alike.jsonl").write_text('{"question": "1 + 1 =", "answer": "2", "split": 0}\n' * 24)
    read = plan(*BY_LENGTH, "--replan", "--dataset", "alike.jsonl")
    length = read.lengths.longest
    assert plan(*BY_LENGTH, "--replan", "dataset=alike.jsonl", "--rows", 24, "--sequence-length", length) == read
    done = brim("memory", "config.yaml", f"base_model={folder / 'config.json'}", "--device", "t4", "--json")
    assert json.loads(done.out)["fits"]


# Before the first step: eight lines at most, and among them all that changes what is learned

LONG = "add 1 and 1 = " * 20
ROWS = [
    *({"question": f"add {n % 7} and {n % 5} =", "answer": f" {n % 7 + n % 5}", "split": 0} for n in range(30)),
    {"question": None, "answer": " 4", "split": 0},
    {"question": "add 2 and 2 =", "answer": "", "split": 0},
    {"question": LONG, "answer": " 5", "split": 0},
    {"question": "write </s> and <|end|>", "answer": " 6", "split": 0},
    *({"question": f"add 9 and {n} =", "answer": f" {9 + n}", "split": 1} for n in range(4)),
]
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def text_rows():
    """Rows of which some are cut, dropped or odd, with columns that nothing reads."""
    return [{**row, **{f"column {n}": n for n in range(9)}, "mixed": [n] if n % 2 else n} for n, row in enumerate(ROWS)]


def chat_rows():
    rows = [{"conversations": conversation(n, 0)[1:], "split": n % 2} for n in range(20)]
    rows[0]["conversations"] = [{"from": "human", "value": "add 0"}, {"from": "gpt", "value": "1"}]
    thoughts = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    rows.append({"conversations": [{"role": "user", "content": "add"}, thoughts], "split": 0})
    rows.append({"conversations": [{"role": "user", "content": "alone"}], "split": 0})
    return rows


def config(base, **changes):
    cells = {"missing_value_strategy": "drop_row"}
    return {
        "base_model": str(base), "adapter": {"type": "lora"}, "ludwig_version": "0.10",
        "input_features": [{"name": "question", "type": "text", "preprocessing": cells}],
        "output_features": [{"name": "answer", "type": "text"}],
        "preprocessing": {"split": "fixed", "global_max_sequence_length": 40, "drop_unlearnable": True},
        **changes,
        "trainer": {
            "type": "finetune", "train_steps": 2, "epochs": 5, "effective_batch_size": 4, "batch_size": 2,
            "batch_search": "linear", "early_stop": -1, "steps_per_checkpoint": 1, "batch_lr_scaling": "linear",
            **changes.get("trainer", {}),
        },
    }  # fmt: skip


def moving(base):
    schedule = {"batch_rampup": "6ba", "initial_effective_batch_size": 2, "effective_batch_size": 8}
    return config(base, trainer={**schedule, "train_steps": 20, "batch_size": "auto"})


def chat(base):
    made = config(base, chat={"messages": "conversations", "template": "template.jinja"})
    preprocessing = {"split": "fixed", "on_bad_row": "drop"}
    return {key: value for key, value in {**made, "preprocessing": preprocessing}.items() if "features" not in key}


CASES = {
    "rows of every kind": (config, text_rows, []),
    "at random": (config, text_rows, ["preprocessing.split={type: random}"]),
    "a ramp": (moving, text_rows, []),
    "defaults": (config, text_rows, ["trainer={type: finetune, epochs: 1, steps_per_checkpoint: 1}"]),
    "its own loss": (config, text_rows, ["adapter.dropout=0.1", "trainer.dropout_by_row=true", "trainer.batch_size=auto"]),
    "8 bits": (config, text_rows, ["quantization={bits: 8, bnb_4bit_use_double_quant: false}", "trainer.optimizer.type=adamw_8bit"]),
    "scarce": (config, text_rows, ["memory={budget: 1500MiB}", "trainer.batch_size=auto"]),
    "chat": (chat, chat_rows, []),
}  # fmt: skip


@pytest.fixture
def make(project, tiny_base):
    """Write the configuration and the data of a case; the command that trains it."""

    def written(name):
        configured, rows, overrides = CASES[name]
        (project / "config.yaml").write_text(json.dumps(configured(tiny_base)))  # JSON is YAML, too
        (project / "template.jinja").write_text(TEMPLATE)
        write(project / "rows.jsonl", rows())
        return ("train", "config.yaml", *overrides, "--dataset", "rows.jsonl", "--output-directory", "run")

    return written


LABELS = ["model", "data", "batch", "memory", "time", "watch", "note", "more"]


def before_first_step(done):
    """What was printed on stderr until the first evaluation was told, in one line without breaks; and its labels."""
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    steps = [number for number, line in enumerate(lines) if re.match(r"step \d", line)]
    assert steps, "nothing was evaluated"
    return flat("\n".join(lines[: steps[0]])), [line.split()[0] for line in lines[: steps[0]] if line[0] != " "]


def flat(text):
    return " ".join(text.split())


def notes(project, folder="run"):
    return [flat(line) for line in (project / folder / "notes.txt").read_text().splitlines()[1:]]


def is_fact(line):
    return line.split(":")[0] in LABELS[:5]


@pytest.mark.run
@pytest.mark.parametrize("name", CASES)
def test_a_card_has_eight_labels_at_most_and_every_note_is_kept(brim, project, make, name):
    (shown, labels), kept = before_first_step(brim(*make(name))), notes(project)
    assert labels == [label for label in LABELS if label in labels]
    assert len([line for line in kept if is_fact(line)]) >= 5
    more = re.search(r" more (\d+) notes: run/notes.txt or --verbose$", shown)
    hidden = [line for line in kept if line not in shown and not is_fact(line)]
    assert more
    assert len(hidden) - sum("kept the weights" in line for line in kept) == int(more[1])
    rows = re.compile(r"[\d,]+ of [\d,]+ rows|the answer of 1 row is empty")
    assert Counter(rows.findall(shown)) == Counter(rows.findall("; ".join(kept))), "told, if only in short"
    for words in ("has no effect, the", "decides", "drops the thoughts", "Ludwig's"):
        assert not [line for line in hidden if words in line]
    on_speed = [line for line in kept if line.startswith("a step is bound by ")]
    assert all(line in hidden for line in on_speed), "of use to few"


@pytest.mark.run
def test_a_run_that_goes_on_prints_no_more_verbose_prints_all_and_python_as_the_command(brim, project, make, capfd):
    command = make("rows of every kind")
    shown = [flat(line) for line in brim(*command, "-v").err.splitlines()]
    assert [line for line in shown if not line.startswith("step ")] == notes(project)
    again = (*command, "--resume", "trainer.early_stop=9", "generation.max_new_tokens=3", "trainer.batch_size=1")
    done = brim(*again, "memory.budget=3GiB", code=0)
    assert "nothing is left to train: the run ended after step 2 (8 samples)" in flat(done.err)
    assert "trainer.early_stop is now 9; it was -1" in flat(done.err)
    Model("config.yaml").train("rows.jsonl", output_directory="other")
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(r"^more +\d+ notes: other/notes.txt or say=print$", err, re.MULTILINE)


# Several processes


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        (("--gpus", "3"), 3),
        (("backend.trainer.num_workers=2",), 2),
        (("--gpus", "3", "backend.trainer.num_workers=2", "--json", "--resume", "--verbose"), 3),
    ],
)
def test_several_gpus_are_this_command_once_for_each_and_end_as_the_first_that_fails(
    brim, project, monkeypatch, asked, number
):
    launched, left = [], '{"error": {}}' if "--json" in asked else "brim: wrong"

    def launch(command, num_workers):
        launched.append((command, num_workers))
        return Launched(code=2, message=left)

    monkeypatch.setattr("brim.distributed.launch.launch_processes", launch)
    monkeypatch.setattr("sys.orig_argv", ["python3", "-m", "brim", *TRAIN, *asked])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = brim(*TRAIN, *asked, code=2)
    assert (done.out + done.err, bool(done.out)) == (f"{left}\n", "--json" in asked)
    assert launched == [([sys.executable, "-m", "brim", *TRAIN, *asked], number)]


def test_what_is_wrong_is_told_once_before_processes_are_started(brim, project, monkeypatch):
    monkeypatch.setattr("brim.distributed.launch.launch_processes", None)
    assert "trainer.epoch" in brim(*TRAIN, "--gpus", "2", "trainer.epoch=2", code=2).err
    assert "--gpus is 'two'" in brim(*TRAIN, "--gpus", "two", code=2).err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_several_starts_none_and_the_first_alone_tells_what_has_no_effect(
    brim, project, monkeypatch, rank
):
    """Its own error is on its stderr where the launcher is another program."""
    for name, value in {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)

    def train(self, *arguments, say, **more):
        raise InputError(what="as far as this")

    monkeypatch.setattr("brim.distributed.launch.launch_processes", None)
    monkeypatch.setattr(Model, "train", train)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = brim(*TRAIN, "--gpus", "3", "backend.trainer.num_workers=4", code=2)
    told = [
        "no GPU: 2 processes divide the CPU",
        "--gpus: 3 has no effect",
        "num_workers: 4 has no effect: the launcher's",
    ]
    assert [each in flat(done.err) for each in told] == [rank == 0] * 3
    assert done.err.endswith("brim: as far as this\n")


# Runs that begin, go on and end


@pytest.mark.run
def test_train_prints_its_result_alone_and_tells_json(brim, project, monkeypatch):
    people = brim(*TRAIN, "trainer.train_steps=2", code=0)
    monkeypatch.setattr("brim.train.logs.find_spec", lambda name: None)  # without tensorboardX
    programs = brim(*TRAIN[:-1], "two", "trainer.train_steps=2", "--json")
    told = json.loads(programs.out)
    metrics, rows = told.pop("metrics"), {"train": 28, "validation": 4, "test": 8}
    assert told.pop("seconds") > 0
    assert told == {"output_directory": "two", "num_steps": 2, "num_new_steps": 2, "best_step": 2, "num_rows": rows}
    assert list(metrics) == ["validation", "test"]
    figures = [(split, f"{metrics[split]['loss']:.4f}") for split in metrics]
    assert re.findall(r"(\w+): loss ([\d.]+),", people.out) == figures
    assert people.out.endswith("next    brim evaluate new --against-base\n")
    assert "step 2  validation: loss " in programs.err
    assert [(project / name / "tensorboard").exists() for name in ("new", "two")] == [True, False]
    assert "no TensorBoard files are written: pip install 'brim[tensorboard]'" in notes(project, "two")


@pytest.mark.run
def test_a_finished_run_says_so_and_a_continued_one_counts_its_own_steps(brim, project):
    """It knows its data; and where that moved, it is named."""
    failed = brim(*TRAIN, "trainer.train_steps=2", "adapter.target_modules=[q_prj]")
    first = brim(*TRAIN, "trainer.train_steps=2")
    assert (failed.code, first.code) == (2, 0), "a start that failed can be repeated in the same folder"
    assert first.out.startswith("done    2 steps in ")

    (project / "config.yaml").unlink()
    again = brim("train", "new", "--resume", code=0)
    assert "no step was left to make: the run had ended after step 2\n" in again.out
    assert " steps in " not in again.out
    assert (
        "nothing is left to train: the run ended after step 2 (16 samples), and its model and figures are written "
        "once more; `brim train new --resume trainer.train_steps=4` trains it for longer"
    ) in flat(again.err)
    assert "continuing" not in again.err

    longer = brim("train", "new", "--resume", "trainer.train_steps=3", "--json")
    told = json.loads(longer.out)
    assert (told["num_steps"], told["num_new_steps"]) == (3, 1)
    assert "continuing after step 2 (16 samples)" in longer.err
    evaluated = json.loads(brim("evaluate", "new", "--json").out)
    assert (evaluated["split"], evaluated["num_rows"]) == ("test", 8)
    (project / "sums.jsonl").rename(project / "moved.jsonl")
    last = brim("train", "new", "--resume", "trainer.train_steps=4", "--dataset", "moved.jsonl")
    assert re.match(r"done +1 step in \d.*, 4 in all\n", last.out)


@pytest.mark.run
def test_a_run_that_ended_early_says_so_and_one_that_saved_no_step_starts_again(brim, project):
    brim(*TRAIN, "trainer.early_stop=1", "trainer.train_steps=12", "trainer.learning_rate=1e-30")
    again = brim("train", "new", "--resume")
    assert "the run was ended early by trainer.early_stop: 1, after step 8 (56 samples)" in flat(again.err)
    assert "`brim train new --resume trainer.early_stop=-1` trains it for longer" in flat(again.err)
    longer = brim("train", "new", "--resume", "trainer.early_stop=-1")
    assert re.match(r"done +4 steps in \d.*, 12 in all\n", longer.out)
    shutil.rmtree(project / "new/checkpoints")
    done = brim(*TRAIN, "trainer.train_steps=1", "trainer.learning_rate=0.5", "--resume")
    assert (done.code, "nothing to continue in new: the run starts from the first step" in flat(done.err)) == (0, True)
    assert "learning_rate: 0.5\n" in (project / "new/config.yaml").read_text()


@pytest.mark.run
def test_one_row_is_enough_and_an_effective_batch_beyond_the_data_is_one_step_an_epoch(brim, project):
    (project / "one.csv").write_text("question,answer,split\nwhat,this,0\n")
    done = brim("train", "config.yaml", "--dataset", "one.csv", "--output-directory", "one", code=0)
    assert "the validation split has no rows the test split has no rows" in flat(done.err)
    assert "2 steps in " in done.out
    assert (project / "one" / "model" / "adapter_model.safetensors").exists()
    done = brim(*TRAIN, "trainer.batch_size=100", "trainer.effective_batch_size=1000", code=0)
    assert "2 steps in " in done.out
    steps = [record for record in records(project / "new" / "metrics.jsonl") if "learning_rate" in record]
    assert [(step["effective_batch_size"], step["num_micro_batches"]) for step in steps] == [(28, 1), (28, 1)]


@pytest.mark.run
def test_a_function_that_prints_does_so_once_an_epoch_and_never_on_stdout(brim, project):
    (project / "brim_test_printing.py").write_text(
        "def increase(epoch, current_batch_size):\n    print('asked', epoch)\n    return 2\n"
    )
    function = "trainer.batch_increase_function=brim_test_printing:increase"
    done = brim(*TRAIN, "--json", "trainer.batch_size=auto", function, code=0)
    assert json.loads(done.out)["num_steps"] > 0
    assert [line for line in done.err.splitlines() if "asked" in line] == ["asked 0", "asked 1"]


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
    done = brim("train", "run", "--resume", "--dataset", "sums.jsonl", *where, code=2)
    assert "trainer.batch_increase_function names code in the configuration of a run" in done.err
    assert not (project / "called").exists()


@pytest.mark.run
def test_without_training_the_splits_are_evaluated_and_nothing_is_written(brim, project, digests):
    before = digests(project)
    done = brim("train", "config.yaml", "trainer={type: none}", "adapter=null", "--dataset", "sums.jsonl")
    assert (done.code, re.findall(r"(\w+): loss", done.out)) == (0, ["validation", "test"])
    assert digests(project) == before


@pytest.mark.run
@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("sacrebleu", ("evaluate", "config.yaml", *DATA, "--texts"), "metrics"),
        ("bitsandbytes", (*TRAIN, "quantization={bits: 4}"), "quantization"),
        ("matplotlib", ("memory", "config.yaml", "--plot", "a.png"), "plots"),
    ],
)
def test_what_an_extra_brings_is_named_with_its_command(brim, project, monkeypatch, package, command, extra):
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install 'brim[{extra}]'" in brim(*command, code=2).err
