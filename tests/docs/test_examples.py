"""The examples of the pages: configurations load, sessions and commands run, and print what the page shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from faults.workshop import make_tokenizer
from tests.chatml import CHATML
from tests.docs.pages import PAGES, ROOT, blocks, yaml
from tests.gallery import usual
from tests.report.hand_made_runs import comparison_of_two_by_three
from typer.testing import CliRunner

import brim
from brim import find_batch_size
from brim.cli.app import app_of
from brim.config import WAYS, DeviceFacts, load_config, resolve
from brim.config.prompts import LabelReader, prompt_template
from brim.config.schema import RetrievalConfig
from brim.data import with_labels_of_data
from brim.data.read import read
from brim.train.increase_function import expand, load_increase_function


def run(name, code, names=None, **more):
    """Run a block of a page, in the names of the block before it."""
    names = more if names is None else names
    exec(compile(code, f"{name}.md", "exec"), names)  # noqa: S102
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(folder, tiny_base, sums):
    """config.yaml and train.jsonl."""
    trainer = {"train_steps": 3, "effective_batch_size": 4}
    config = usual(tiny_base, trainer=trainer)
    config["trainer"] = {"type": "finetune", **trainer}
    (folder / "config.yaml").write_text(json.dumps({**config, "adapter": None}))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


def byte_base(folder, special, **settings):
    """A base of single bytes, whose weights are never read."""
    base = folder / "base"
    base.mkdir()
    make_tokenizer(base, (), special=special, eos_token=special[-1], **settings)
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").touch()


def test_bad_rows_engines_and_planning(folder):
    def of_page(name, **keys):
        (written,) = blocks(name, "yaml")
        return load_config({"base_model": "base", **keys, **yaml(written)}).config

    features = {f"{kind}put_features": [{"name": kind, "type": "text"}] for kind in ("in", "out")}
    preprocessing = of_page("bad-rows", **features, adapter="lora").preprocessing
    assert (preprocessing.on_bad_row, preprocessing.on_overlong) == ("drop", "truncate")
    (folder / "data.csv").write_text("question\na\nb\nc\n")
    predictions = pd.DataFrame({"row": [0, 2], "question": ["a", "c"], "answer_response": ["x", "z"]})
    (code,) = blocks("bad-rows")
    joined = run("bad-rows", code, pandas=pd, predictions=predictions)["joined"]
    assert joined["question"].tolist() == ["a", "b", "c"]
    assert joined["answer_response"].fillna("gap").tolist() == ["x", "gap", "z"]
    # These two pages show the defaults, but for the batch.
    assert of_page("engines") == load_config({"base_model": "base"}).config
    trainer = {"type": "finetune", "effective_batch_size": 32, "max_batch_size": 64}
    assert of_page("planning") == load_config({"base_model": "base", "trainer": trainer}).config


def test_batch_schedules():
    shown = {}
    for sample in blocks("batch-schedules", "yaml"):
        loaded = load_config({"base_model": "base", **yaml(sample)})
        assert [note for note in loaded.notes if "epochs is not set" not in note] == []
        shown[sample] = resolve(loaded.config, DeviceFacts(kind="cpu", bf16=False)).config.trainer
    assert all(any(getattr(trainer, way) is not None for trainer in shown.values()) for way in WAYS)
    (code,) = blocks("batch-schedules")
    increase = load_increase_function(run("batch-schedules", code)["increase"])
    (trainer,) = (trainer for sample, trainer in shown.items() if "batch_increase_function" in sample)
    schedule = expand(increase, first_size=16, num_rows=100, num_samples=100 * trainer.epochs).schedule
    assert [(phase.first_sample, phase.size) for phase in schedule.phases] == [(0, 16), (200, 32), (400, 64)]


def test_categories():
    first, of_data, constrained = (yaml(block) for block in blocks("categories", "yaml")[:3])
    feature = load_config(first).config.output_features[0]
    texts = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", PAGES["categories"], flags=re.MULTILINE)
    assert len(texts) == 4
    for text, label, why in texts:
        reading = LabelReader(feature).read(text)
        assert (reading.label, reading.is_fallback) == (label, "fallback" in why)
    other = load_config({"base_model": "base", **constrained}).config.output_features[0]
    assert other.categories is not None
    assert other.categories.constrain_to_vocabulary
    assert other.labels == feature.labels
    source = read({"review": ["x", "y", "z"], "sentiment": ["positive", "negative", "positive"]})
    config, _ = with_labels_of_data(load_config(of_data).config, source)
    assert config.output_features[0].labels == ("negative", "positive")
    assert config.output_features[0].fallback_label == "positive"
    assert str(prompt_template(config)) == "Is this review negative, positive? {review}\n"


def test_chat(folder):
    byte_base(folder, ["<|im_start|>", "<|im_end|>"], chat_template=CHATML)
    for name, language in (("config.yaml", "yaml"), ("rows.jsonl", "jsonl")):
        (folder / name).write_text(blocks("chat", language)[0])
    (command,) = re.findall(r"`brim (check .*?)`", PAGES["chat"])
    printed = CliRunner().invoke(app_of(), command.split()).output
    samples = printed[printed.index("rows.jsonl:1 ") :].splitlines()
    shown = [re.sub(r" ─+$", "", line) for line in samples if line != "«…»: what the model learns to write"]
    assert shown == blocks("chat", "text")[0].splitlines()


@pytest.mark.run
def test_cluster(project, folder):
    """The commands of the page, in their order; `verify-resume`, which trains three times, has tests of its own."""
    config = json.loads(Path("config.yaml").read_text())
    config |= {"dataset": str(folder / "train.jsonl"), "generation": {"max_new_tokens": 2}}
    Path("config.yaml").write_text(json.dumps(config))
    rows = Path("train.jsonl").read_text().splitlines(keepends=True)
    Path("new.jsonl").write_text("".join(rows[:3]))
    commands = re.findall(r"^brim (.*)$", PAGES["cluster"], flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == [
        "check",
        "plan",
        "train",
        "train",
        "verify-resume",
        "predict",
    ]
    for command in commands[:4] + commands[5:]:
        arguments = re.sub(r"--gpus \w+", "--gpus 1", command.replace("/shared", str(folder))).split()
        done = CliRunner().invoke(app_of(), arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert len(pq.read_table(folder / "answers.parquet")) == 3
    started = r"`(?:HEAD=[\w-]+ bash|sbatch|kubectl apply -f|sky jobs launch) ([\w.-]+)`"
    named = re.findall(started, PAGES["cluster"])
    there = {path.name for path in (ROOT / "examples/cluster").iterdir()}
    assert set(named) == there - {"one-node.sh"}


def test_compare(monkeypatch):
    asked, result = [], comparison_of_two_by_three()
    monkeypatch.setattr("brim.workflows.compare.run.compare", lambda files, **options: asked.append(options) or result)
    (code,) = blocks("compare")
    run("compare", code, brim=brim)
    assert asked == [{"dataset": "train.jsonl", "seeds": 5, "output_directory": "comparison"}]


def test_data(folder):
    table, note = blocks("data", "text")
    for encoding in ("cp1252", "utf-8"):
        (folder / "tickets.csv").write_bytes(table.replace("\n", "\r\n").encode(encoding))
        source = read(folder / "tickets.csv")
        assert source.table["Kategorie"].to_pylist() == ["Störung", "Rechnung"]
        assert source.table["Betreff"].to_pylist() == ["Drucker", None]
        assert source.locate(1) == "tickets.csv:4"
        assert encoding == "utf-8" or source.notes == (note.strip(),)
    (folder / "tickets.csv").unlink()
    (folder / "new").mkdir()
    (folder / "tickets-2023.csv").write_text("Betreff;Kategorie\na;x\n")
    for name in ("2", "1"):
        (folder / f"new/{name}.jsonl").write_text(f'{{"Kategorie": "y", "Betreff": "{name}"}}\n')
    (written,) = blocks("data", "yaml")
    source = read(load_config(yaml(written)).config.dataset)
    assert source.table["Betreff"].to_pylist() == ["a", "1", "2"]
    assert source.locate(2) == "2.jsonl:1"


@pytest.mark.run
def test_embeddings(project):
    config = json.loads(Path("config.yaml").read_text())
    del config["preprocessing"]
    Path("config.yaml").write_text(json.dumps({**config, "trainer": {"type": "none"}}))
    data = {"question": ["add 1 and 2 =", "add 3 ="], "answer": [" 3", " 3"]}
    pd.DataFrame(data).to_json("rows.jsonl", orient="records", lines=True)
    commands = re.findall(r"^brim (embed .*)$", PAGES["embeddings"], flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        arguments = command.replace("RUN_OR_CONFIG", "config.yaml").replace("--layer 12", "--layer 1").split()
        done = CliRunner().invoke(app_of(), arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    for name in ("embeddings", "unit", "tokens"):
        assert pq.read_table(f"{name}.parquet").column_names == ["row", "embedding"]
    (code,) = blocks("embeddings")
    known = run("embeddings", code, model=brim.Model("config.yaml"), rows=data)
    assert known["found"].by_layer["last"].shape == (2, 32)
    assert known["found"].rows.tolist() == [0, 1]
    assert known["by_token"].by_layer["layers.0.mlp"][0].shape == (known["by_token"].num_tokens[0], 32)
    assert pq.read_table("vectors.parquet").column_names == ["row", "last", "0"]


def test_finding_a_batch_size():
    loop, probe = blocks("finding-a-batch-size")[:2]
    names = run("finding-a-batch-size", loop)
    assert names["found"].size == 64
    # On a busy machine what is free changes from probe to probe, so that there may be more than the three.
    assert [probe.outcome for probe in names["found"].probes][:2] == ["fits"] * 2
    assert {probe.outcome for probe in names["found"].probes} == {"fits"}
    assert len(names["optimizer"].state) == 0
    fits = run("finding-a-batch-size", probe)["fits"]
    assert find_batch_size(fits, how="doubling", most=1000).size == 64


def test_memory(folder):
    """The flags of each command go together: what is missing is the base model alone."""
    (folder / "config.yaml").write_text("base_model: ./no-such-folder\nadapter: lora\ntrainer: {type: finetune}\n")
    commands = re.findall(r"^brim (memory .*)$", PAGES["memory"], flags=re.MULTILINE)
    assert len(commands) == 20
    for command in commands:
        result = CliRunner().invoke(app_of(), shlex.split(command, comments=True))
        assert "base_model: no such folder" in str(result.exception), command
    compile(*blocks("memory"), "memory.md", "exec")


def test_own_loop(capsys):
    names, printed = {}, []
    for block in blocks("own-loop"):
        run("own-loop", block, names)
        printed.append(capsys.readouterr().out.split())
    losses, by_token, by_length, events = printed
    assert len(losses) == 4
    assert [float(loss) for loss in losses] == pytest.approx([1.4] * 4, abs=0.3)  # ln 4, by chance
    assert len(by_token) == len(by_length) == 1
    assert min(float(by_token[0]), float(by_length[0])) > 0
    assert events == []  # nothing ran out of memory
    docstring, code = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8").split("\n\n", 1)
    assert docstring.startswith('"""')
    assert code == blocks("own-loop")[0]


def test_prompting(folder):
    byte_base(folder, ["</s>"])
    first, several, retrieval = blocks("prompting", "yaml")[:3]
    (folder / "config.yaml").write_text(first)
    (folder / "reviews.jsonl").write_text(blocks("prompting", "jsonl")[0])
    (command,) = re.findall(r"`brim (check .*?)`", PAGES["prompting"])
    printed = CliRunner().invoke(app_of(), command.split(" "), env={"COLUMNS": "200"})
    assert printed.exit_code == 0, printed.output
    name, *shown = blocks("prompting", "text")[0].splitlines()
    assert f"{name} ─" in printed.output
    assert "\n".join(shown) in printed.output
    assert RetrievalConfig.model_validate(yaml(retrieval)["retrieval"]).num_examples == 3
    assert load_config(yaml(several)).config.prompt.template in blocks("prompting", "text")


@pytest.mark.run
def test_python(project, capsys):
    pytest.importorskip("matplotlib")
    names = {}
    for block in blocks("python"):
        run("python", block, names)
    out = capsys.readouterr().out.splitlines()
    history = names["result"].history
    losses = history.loc[history["split"] == "train", "loss"]
    assert out[0].startswith("TrainResult: 3 steps in ")
    assert out[-2].split()[0] == str(losses.iloc[-1])
    assert out[-1] == f"{losses.argmax() + 1} {losses.max()}", "the second run is the first again"
    assert Path("losses.png").read_bytes().startswith(b"\x89PNG")


def test_readme(folder):
    demo = ROOT / "examples/stdlib_code/config.yaml"
    assert blocks("README", "yaml") == [demo.read_text(encoding="utf-8")]
    for example in (demo, demo.with_name("qlora.yaml")):
        load_config(example)
    shown = re.search(r"^  \$ brim check config.yaml\n(.*?)^  ```", PAGES["README"], flags=re.DOTALL | re.MULTILINE)
    (folder / "config.yaml").write_text(
        "base_model: model\n"
        "input_features: [{name: instruction, type: text}]\n"
        "output_features: [{name: output, type: text}]\n"
        "adapter: {type: lora, rank: 16}\n"
        "trainer:\n  type: finetune\n  learning_rat: 0.0001\n  batch_size: 5\n  effective_batch_size: 32\n"
        "hyperopt: {goal: minimize}\n"
    )
    result = CliRunner().invoke(app_of(), ["check", "config.yaml"])
    assert [f"  {line}" for line in f"brim: {result.exception}".splitlines()] == shown.group(1).splitlines()
