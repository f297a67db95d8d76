"""The folder of a run: taken, free, or in use; and the model card that lies in it."""

import re
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

from brim.config import load_config
from brim.errors import CheckpointError, InputError, OutputError
from brim.storage import write_manifest
from brim.train import RunFolder
from brim.train.checkpoints import TrainState
from brim.workflows.runs import card_apart, local_name
from brim.workflows.runs.files import model_card

HOLD = """
import sys
from pathlib import Path
from brim.train import RunFolder
with RunFolder(Path(sys.argv[1])).held(resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    run = RunFolder.create(tmp_path / "run", resume=False)
    command = [sys.executable, "-c", HOLD, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        message = "another process is training in this folder; nothing was changed"
        with pytest.raises(OutputError, match=message) as caught, run.held(resume=True):
            pytest.fail("held twice")
        assert caught.value.__context__ is None  # what the body raises is not an error of the lock
        other.kill()
    with run.held(resume=False):  # a killed process lets go
        pass


def test_what_is_in_a_folder_already(tmp_path):
    run = RunFolder.create(tmp_path / "run", resume=False)
    run.plan.write_text("{}")  # of a run that began in the meantime
    with pytest.raises(OutputError, match="there is a run in this folder already"), run.held(resume=False):
        pytest.fail("not seen")
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / ".plan.json.tmp").touch()  # what a kill in the first moments left blocks nothing
    (killed / ".brim-can-write").touch()
    RunFolder(killed).check(resume=False)
    (killed / "notes.txt").touch()
    with pytest.raises(OutputError, match="the output directory holds other things"):
        RunFolder(killed).check(resume=False)
    run = RunFolder(tmp_path / "lost")  # without its plan it is known by its checkpoints
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    assert not run.is_run
    (run.checkpoints / "step-00000004" / "manifest.json").write_text("{}")
    assert run.is_run
    run.check(resume=True)


@pytest.fixture
def run(tmp_path):
    """One with a model."""
    run = RunFolder(tmp_path / "run")
    run.model.mkdir(parents=True)
    run.config.write_text("")
    run.plan.write_text("{}")
    (run.model / "adapter.safetensors").write_text("weights")
    write_manifest(run.model)
    return run


def test_a_model_that_a_kill_left_aside_is_put_back_unless_it_is_just_being_replaced(run):
    run.model.rename(run.path / ".model.old")
    with run.held(resume=True), pytest.raises(InputError, match="this run has no model yet"):
        RunFolder.open(run.path)
    assert (run.path / ".model.old").exists()
    assert (RunFolder.open(run.path).model / "adapter.safetensors").read_text() == "weights"
    assert not (run.path / ".model.old").exists()


def test_files_of_the_model_that_changed_or_came_from_elsewhere_are_named(run):
    (run.model / ".DS_Store").write_text("of a file manager")
    run.require_whole_model()
    (run.model / "chat_template.jinja").write_text("other prompts")
    with pytest.raises(CheckpointError, match=r"damaged \(chat_template.jinja came from elsewhere\)"):
        run.require_whole_model()
    (run.model / "chat_template.jinja").unlink()
    (run.model / "adapter.safetensors").write_text("Weights")
    with pytest.raises(CheckpointError) as caught:
        run.require_whole_model()
    (problem,) = caught.value.problems
    assert problem.where == str(run.model)
    assert problem.what == "the model of this run is damaged (adapter.safetensors changed since it was written)"
    assert f"`brim train {run.path} --resume`; delete manifest.json if you changed" in problem.fix
    (run.model / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors came"):
        run.require_whole_model()
    (run.model / "manifest.json").unlink()
    run.require_whole_model()


# The model card


def card_of(data):
    trained = {"base_model": "some-org/some-model", "adapter": "lora", "trainer": {"type": "finetune"}}
    config = load_config({**trained, **data}).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brim.__version__", "1.2.3")
        return model_card(
            config,
            "some-org/some-model",
            "data.csv",
            rows={"train": 1234, "test": 5},
            metrics={"test": {"loss": 1.5, "perplexity": 4.4817, "token_accuracy": 0.25}},
            state=TrainState(rows_digest="", step=7, best_step=3),
        )


TEXT = {
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
}


def test_the_card_tells_base_model_rows_and_figures(golden):
    golden("train/card.md", card_of(TEXT))
    for supervise, turns in {"all": "each of the assistant's turns", "last": "the assistant's last turn"}.items():
        text = card_of({"chat": {"supervise": supervise}})
        assert f"\nLoss is the mean cross-entropy in nats over the tokens of {turns} and its end.\n" in text
        assert "\n```text\nconversations, written out by the tokenizer's chat template\n```\n" in text


def test_no_template_ends_the_block_that_shows_it():
    for template, length in {None: 3, "a `{question}`": 3, "`````\n{question}\n```": 6}.items():
        fence, text = "`" * length, card_of({**TEXT, "prompt": {"template": template}})
        assert f"## Prompt\n\n{fence}text\n{template or '{question}'}\n{fence}\n\nThe settings" in text


def apart(text, **changes):
    settings = {"base_model": "some-org/some-model", "trainer": {"type": "finetune"}, "adapter": "lora", **changes}
    packages = {"brim": "1.2.3", "torch": "2.13.0", "peft": "not installed"}
    return card_apart(text, load_config(settings).config, packages=packages, merge="Merged well.")


def test_apart_from_its_run_a_card_holds_the_settings_and_versions(golden, tmp_path):
    text = apart(card_of(TEXT).replace("## Prompt", "Made for the workshop.\n\n## Prompt"))
    before, settings, after = re.split(r"(?<=```yaml\n)((?:.|\n)*?)(?=```\n)", text)
    golden("train/card-apart.md", before + after)
    assert YAML(typ="safe").load(settings)["adapter"]["r"] == 8
    (tmp_path / "a-base").mkdir()  # paths are shortened to names
    adapter = {"type": "lora", "pretrained_adapter_weights": str(tmp_path / "an-adapter")}
    text = apart(None, base_model=str(tmp_path / "a-base"), dataset=str(tmp_path / "rows.csv"), adapter=adapter)
    assert str(tmp_path) not in text
    for line in ("base_model: a-base", "dataset: rows.csv", "pretrained_adapter_weights: an-adapter"):
        assert line in text
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [brim]\n---\n")
    assert local_name("some-org/some-model") == "some-org/some-model"  # a Hub id keeps its organisation
