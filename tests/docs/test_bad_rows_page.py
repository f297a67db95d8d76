"""What docs/bad-rows.md shows works as it stands there."""

import re
from pathlib import Path

import pandas as pd
from ruamel.yaml import YAML

from brim.config.schema import Config
from brim.data.read import EVENTS

PAGE = (Path(__file__).parents[2] / "docs" / "bad-rows.md").read_text(encoding="utf-8")


def block(language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_configuration_is_right():
    base = {
        "base_model": "base",
        "input_features": [{"name": "q", "type": "text"}],
        "output_features": [{"name": "a", "type": "text"}],
        "adapter": "lora",
    }
    config = Config.model_validate({**base, **YAML(typ="safe").load(block("yaml"))})
    assert (config.preprocessing.on_bad_row, config.preprocessing.on_overlong) == ("drop", "truncate")


def test_predictions_are_joined_to_the_data_with_gaps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("question\na\nb\nc\n")
    predictions = pd.DataFrame({"row": [0, 2], "question": ["a", "c"], "answer_response": ["x", "z"]})
    known = {"pandas": pd, "predictions": predictions}
    exec(block("python"), known)  # noqa: S102
    joined = known["joined"]
    assert joined["question"].tolist() == ["a", "b", "c"]
    assert joined["answer_response"].fillna("gap").tolist() == ["x", "gap", "z"]


def test_the_events_are_those_of_the_ledger():
    named = set(re.findall(r"`((?:cut|dropped)_\w+)`", PAGE))
    assert {"dropped_bad", "dropped_overlong"} < named <= set(EVENTS)
