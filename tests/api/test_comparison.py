"""Two models on the same rows, against evaluations of each alone."""

import json

import numpy as np
import pandas as pd
import pytest
from tests.conftest import make_llama

import brim


@pytest.fixture(scope="module")
def trained(tiny_base, tmp_path_factory):
    """The folder of a run with an adapter."""
    folder = tmp_path_factory.mktemp("compared")
    frame = pd.DataFrame(
        {"question": [f"add {n} and {n} =" for n in range(12)], "answer": [f" {2 * n}" for n in range(12)]}
    )
    brim.Model(settings(tiny_base)).train(frame, output_directory=folder / "run")
    return folder / "run"


def settings(base, **keys):
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora"},
        "generation": {"max_new_tokens": 6, "do_sample": False},
        "trainer": {"type": "finetune", "train_steps": 3, "batch_size": 4, "learning_rate": 0.05},
        **keys,
    }


def test_a_run_is_compared_with_its_base_on_the_same_rows(trained, sums_file):
    said = []
    result = brim.Model.load(trained).evaluate(sums_file, with_texts=True, against="base", say=said.append)
    base = brim.Model.load(trained, overrides=["adapter=null"]).evaluate(sums_file, with_texts=True)
    found = result.comparison
    assert found.num_rows == 40
    # Evaluations of their own may take other batches: losses agree to 1e-5, so that exp of a loss does to 1e-4.
    assert found.other_metrics == pytest.approx({name: base.metrics[name] for name in found.other_metrics}, rel=1e-4)
    assert set(found.differences) == set(result.intervals) == set(found.difference_intervals)
    for name, difference in found.differences.items():
        near = 2e-4 * abs(base.metrics[name]) + 1e-9
        assert difference == pytest.approx(result.metrics[name] - base.metrics[name], abs=near)
        interval = found.difference_intervals[name]
        assert interval.low - 1e-9 <= difference <= interval.high + 1e-9
    assert found.differences["loss"] != 0
    assert found.notes == ()
    assert len([line for line in said if line.startswith("evaluation: ")]) == 2


def test_the_interval_is_that_of_the_rows_differences(trained, sums_file):
    from brim.infer.statistics import ratio_interval

    result = brim.Model.load(trained).evaluate(sums_file, against="base")
    base = brim.Model.load(trained, overrides=["adapter=null"]).evaluate(sums_file)
    differences = result.rows["loss"] - base.rows["loss"]
    expected = ratio_interval(differences.to_numpy(), result.rows["num_supervised"].to_numpy())
    found = result.comparison.difference_intervals["loss"]
    assert (found.low, found.high) == (pytest.approx(expected.low, abs=1e-4), pytest.approx(expected.high, abs=1e-4))


def test_a_model_that_was_trained_just_now_stays_trained(tiny_base, sums_file, tmp_path):
    model = brim.Model(settings(tiny_base, preprocessing={"split": "fixed"}))
    model.train(sums_file, output_directory=tmp_path / "run")
    before = model.evaluate(sums_file).metrics["loss"]
    compared = model.evaluate(sums_file, against="base")
    assert compared.metrics["loss"] == pytest.approx(before, rel=1e-5)
    assert compared.comparison.differences["loss"] != 0
    assert model.evaluate(sums_file).metrics["loss"] == pytest.approx(before, rel=1e-5)


def test_two_models_of_other_tokens_are_compared_by_bytes(trained, sums_file, tiny_base, tmp_path):
    """The other one's tokenizer has no merges: each character is a token."""
    other = tmp_path / "base"
    other.mkdir()
    tokenizer = json.loads((tiny_base / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "tokenizer_config.json").write_text((tiny_base / "tokenizer_config.json").read_text())
    make_llama(other)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(settings(other, trainer={"type": "none"}, adapter=None)))
    model = brim.Model.load(trained)
    result = model.evaluate(sums_file, against=config)
    found = result.comparison
    assert set(found.differences) == {"bits_per_byte", "sequence_accuracy"}
    assert found.notes == (
        "the two models read the answers as different tokens: figures of a token are not compared; bits_per_byte is "
        "the loss by the answers' bytes",
    )
    texts = pd.read_json(sums_file, lines=True)["answer"]
    num_bytes = texts.str.len().sum()
    assert found.metrics["bits_per_byte"] == pytest.approx(result.rows["loss"].sum() / np.log(2) / num_bytes)
    alone = brim.Model(config).evaluate(sums_file)
    assert found.other_metrics["bits_per_byte"] == pytest.approx(alone.rows["loss"].sum() / np.log(2) / num_bytes)


def test_rows_that_one_of_them_cannot_take_are_left_out_of_both(trained, sums_file, tiny_base, tmp_path):
    other = tmp_path / "base"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text((tiny_base / name).read_text())
    make_llama(other, max_position_embeddings=8)
    config = tmp_path / "config.yaml"
    keys = {"preprocessing": {"split": "fixed", "on_overlong": "drop"}, "generation": {"max_new_tokens": 2}}
    config.write_text(json.dumps(settings(other, trainer={"type": "none"}, adapter=None, **keys)))
    model = brim.Model.load(trained, overrides=["generation.max_new_tokens=2"])
    result = model.evaluate(sums_file, with_texts=True, against=config)
    found = result.comparison
    alone = brim.Model(config).evaluate(sums_file, with_texts=True)
    assert 0 < found.num_rows == len(alone.rows) < len(result.rows) == 40
    assert found.notes == (
        f"compared on the {found.num_rows} rows that both models take; {40 - found.num_rows} are left out",
    )
    both = result.rows[result.rows["row"].isin(alone.rows["row"])]
    assert found.metrics["loss"] == pytest.approx(both["loss"].sum() / both["num_supervised"].sum())
    assert found.metrics["response_tokens"] == pytest.approx(both["num_response_tokens"].mean())
    assert found.other_metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)


def test_a_base_model_has_no_base(trained, sums_file, tiny_base):
    for model in (
        brim.Model(settings(tiny_base, adapter=None, trainer={"type": "none"})),
        brim.Model.load(trained, overrides=["adapter=null"]),
    ):
        with pytest.raises(brim.InputError, match="this is the base model itself"):
            model.evaluate(sums_file, against="base")
