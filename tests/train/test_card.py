"""The model card of a run."""

import pytest

from brim.config import load_config
from brim.train.card import CardFacts, model_card
from brim.train.state import TrainState


def card(**prompt):
    config = load_config(
        {
            "base_model": "some-org/some-model",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "adapter": "lora",
            "prompt": prompt,
            "trainer": {"type": "finetune"},
        }
    ).config
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
