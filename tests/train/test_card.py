"""The model card of a run."""

import pytest
from ruamel.yaml import YAML

from brim.config import load_config
from brim.train import TrainState
from brim.workflows.runs import card_apart, local_name
from brim.workflows.runs.files import CardFacts, model_card


def card(**prompt):
    return card_of(
        {
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "prompt": prompt,
        }
    )


def card_of(data):
    trained = {"base_model": "some-org/some-model", "adapter": "lora", "trainer": {"type": "finetune"}}
    config = load_config({**trained, **data}).config
    facts = CardFacts(
        base_model="some-org/some-model",
        dataset="data.csv",
        rows={"train": 1234, "test": 5},
        metrics={"test": {"loss": 1.5, "perplexity": 4.4817, "token_accuracy": 0.25}},
        state=TrainState(rows_digest="", step=7, best_step=3),
        version="1.2.3",
    )
    return model_card(config, facts)


def test_the_card_tells_base_model_rows_and_figures():
    text = card()
    assert text.startswith("---\nlibrary_name: peft\nbase_model: some-org/some-model\n")
    assert "Trained with brim 1.2.3 on `data.csv`: 7 steps" in text
    assert "The weights are those of step 3." in text
    assert "| train | 1,234 | – | – | – |\n| test | 5 | 1.5000 | 4.482 | 0.2500 |\n" in text


@pytest.mark.parametrize(
    ("template", "fence"),
    [
        (None, "```"),
        ("{question}", "```"),
        ("a `{question}`", "```"),
        ("```python\n{question}\n```", "````"),
        ("`````\n{question}\n```", "``````"),
    ],
)
def test_no_template_ends_the_block_that_shows_it(template, fence):
    text = card(template=template)
    assert f"## Prompt\n\n{fence}text\n{template or '{question}'}\n{fence}\n\nThe settings" in text


@pytest.mark.parametrize(
    ("supervise", "turns"), [("all", "each of the assistant's turns"), ("last", "the assistant's last turn")]
)
def test_of_conversations_it_tells_what_was_learned_and_names_nothing_that_stays_in_the_run(supervise, turns):
    text = card_of({"chat": {"supervise": supervise}})
    assert f"\nLoss is the mean cross-entropy in nats over the tokens of {turns} and its end.\n" in text
    assert "\n```text\nconversations, written out by the tokenizer's chat template\n```\n" in text


def apart(text, **changes):
    settings = {"base_model": "some-org/some-model", "trainer": {"type": "finetune"}, "adapter": "lora", **changes}
    packages = {"brim": "1.2.3", "torch": "2.13.0", "peft": "not installed"}
    return card_apart(text, load_config(settings).config, packages=packages, merge="Merged well.")


def test_apart_from_its_run_a_card_holds_the_settings_and_versions():
    text = apart(card().replace("## Prompt", "Made for the workshop.\n\n## Prompt"))
    assert text.startswith("---\nlibrary_name: transformers\nbase_model: some-org/some-model\n")
    assert "\n# LoRA adapter merged into some-org/some-model\n" in text
    assert "\nMade for the workshop.\n" in text
    assert "\n## Merge\n\nMerged well.\n\n## Settings\n" in text
    assert "Versions: brim 1.2.3, torch 2.13.0.\n" in text
    assert "config.yaml" not in text
    settings = text.split("```yaml\n")[1].split("```")[0]
    assert YAML(typ="safe").load(settings)["adapter"]["r"] == 8


def test_paths_are_shortened_to_names(tmp_path):
    (tmp_path / "a-base").mkdir()
    adapter = {"type": "lora", "pretrained_adapter_weights": str(tmp_path / "an-adapter")}
    text = apart(None, base_model=str(tmp_path / "a-base"), dataset=str(tmp_path / "rows.csv"), adapter=adapter)
    assert str(tmp_path) not in text
    for line in ("base_model: a-base", "dataset: rows.csv", "pretrained_adapter_weights: an-adapter"):
        assert line in text
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [brim]\n---\n")


def test_a_hub_id_keeps_its_organisation():
    assert local_name("some-org/some-model") == "some-org/some-model"
