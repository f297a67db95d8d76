"""A step whose loss or gradient is not finite: no update; the rows of the micro-batch are named."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import make_llama, make_tokenizer
from transformers import PhiConfig, PhiForCausalLM

import brim
from brim.train.update import MOST_IN_A_ROW, NotFinite

LETTER_Z = "Z"
SKIPPED = [2, 4, 5]  # once an epoch of two steps, by the order of the rows


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Base models whose letter Z is poisoned: NaN; or so small that the gradient of its norm overflows."""
    folders = {}
    for kind, value in {"loss": math.nan, "gradient": 1e-19}.items():
        folder = folders[kind] = tmp_path_factory.mktemp(kind)
        make_tokenizer(folder)
        make_llama(folder, tie_word_embeddings=False, rms_norm_eps=0.0)
        weights = load_file(folder / "model.safetensors")
        embedding = weights["model.embed_tokens.weight"]
        letter = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][LETTER_Z]
        embedding[letter] = value
        embedding[1] = embedding[letter + 1]  # padding is zero, whose norm is none where nothing is added to it
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


@pytest.fixture
def rows():
    """Eight rows, one step an epoch of four micro-batches; row 3 is the third longest, so that it is in the second."""
    lengths = [3, 12, 14, 10, 5, 6, 2, 9]
    questions = ["x " * length + ("Z" if key == 3 else "y") for key, length in enumerate(lengths)]
    return {"question": questions, "answer": [" 1", " 2"] * 4, "split": [0] * 8}


def settings(base, **trainer):
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "preprocessing": {"split": "fixed"},
        "trainer": {
            "type": "finetune", "epochs": 3, "batch_size": 2, "effective_batch_size": 8, "skip_all_evaluation": True,
            "steps_per_checkpoint": 1, **trainer,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "figures"),
    [("loss", r"\(loss nan, gradient norm nan\)"), ("gradient", r"\(loss \d\.\d+, gradient norm (nan|inf)\)")],
)
def test_it_stops_before_the_update_and_names_the_rows_of_the_micro_batch(bases, rows, tmp_path, kind, figures):
    with pytest.raises(brim.BrimError, match=rf"step 1 is not finite {figures}; nothing was updated") as caught:
        brim.Model(settings(bases[kind])).train(rows, output_directory=tmp_path / "run")
    assert caught.value.exit_code == 1
    assert caught.value.problems[0].where == "rows 3, 7 (numbered from 0; micro-batch 2 of 4)"
    assert "`trainer.on_nonfinite: skip` leaves such steps out, also with --resume" in caught.value.problems[0].fix


@pytest.fixture
def impossible_answer(tmp_path):
    """A base model whose head's bias gives the letter Z the probability 0."""
    make_tokenizer(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=1, max_position_embeddings=64, bos_token_id=None))
    letter = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"][LETTER_Z]
    model.lm_head.bias.data[letter] = -math.inf
    model.save_pretrained(tmp_path)
    return tmp_path


def test_an_infinite_loss_stops_the_run_though_its_gradient_is_finite(impossible_answer, rows, tmp_path):
    asked = {**rows, "question": [question.replace("Z", "y") for question in rows["question"]]}
    asked["answer"] = ["Z" if key == 3 else answer for key, answer in enumerate(rows["answer"])]
    with pytest.raises(brim.BrimError, match=r"\(loss inf, gradient norm \d+\.\d+\); nothing was updated") as caught:
        brim.Model(settings(impossible_answer)).train(asked, output_directory=tmp_path / "run")
    assert caught.value.problems[0].where == "rows 3, 7 (numbered from 0; micro-batch 2 of 4)"


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_skipped_touches_neither_weights_nor_optimizer(bases, rows, tmp_path, kind):
    said = []
    run = tmp_path / "run"
    result = brim.Model(settings(bases[kind], on_nonfinite="skip")).train(rows, output_directory=run, say=said.append)
    assert result.num_steps == 3
    assert "3 of 3 steps were left out, since their loss or gradient was not finite: look for `skipped` in" in said[-1]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    skipped = [event for event in events if event["event"] == "skipped"]
    assert [(event["step"], event["cause"], event["rows"]) for event in skipped] == [
        (n, kind, [3, 7]) for n in (1, 2, 3)
    ]
    assert [event["num_samples"] for event in skipped] == [8, 16, 24]  # consumed all the same
    checkpoint = run / "checkpoints" / "step-00000003"
    assert load_file(checkpoint / "optimizer.safetensors") == {}
    before, after = load_file(bases[kind] / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(after[name].nan_to_num(7), before[name].nan_to_num(7)) for name in after)
    state = json.loads((checkpoint / "state.json").read_text())["train"]
    assert (state["num_skipped"], state["num_skipped_in_a_row"]) == (3, 3)
    assert (state["step"], state["consumed_samples"]) == (3, 24)


def test_a_run_that_stopped_goes_on_with_skip_as_if_it_had_skipped_from_the_start(bases, rows, tmp_path):
    def records(run):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in line.items() if k not in ("seconds", "peak_bytes")} for line in lines]

    half = {**rows, "question": rows["question"] + ["y " * n for n in range(2, 10)]}
    half |= {"answer": [" 1", " 2"] * 8, "split": [0] * 16}
    skipping = settings(bases["loss"], on_nonfinite="skip")
    brim.Model(skipping).train(half, output_directory=tmp_path / "whole")
    with pytest.raises(brim.BrimError, match="is not finite"):
        brim.Model(settings(bases["loss"])).train(half, output_directory=tmp_path / "run")
    said = []
    brim.Model(skipping).train(half, output_directory=tmp_path / "run", resume=True, say=said.append)
    skipped = [record["step"] for record in records(tmp_path / "whole") if record.get("event") == "skipped"]
    assert skipped == SKIPPED
    assert 'trainer.on_nonfinite is now "skip"; it was "stop"' in said
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        file = f"checkpoints/step-00000006/{name}"
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_ten_in_a_row_end_the_run(bases, rows, tmp_path):
    with pytest.raises(brim.BrimError, match="step 10 is not finite") as caught:
        brim.Model(settings(bases["loss"], on_nonfinite="skip", epochs=20)).train(rows, output_directory=tmp_path / "r")
    assert "that was the last of 10 such steps in a row" in caught.value.problems[0].fix
    assert MOST_IN_A_ROW == 10


def test_a_loss_that_is_not_finite_is_skipped_under_fp16_too_and_leaves_the_loss_scale(bases, rows, tmp_path):
    run = tmp_path / "run"
    fp16 = {**settings(bases["loss"], on_nonfinite="skip"), "precision": "fp16-mixed"}
    brim.Model(fp16).train(rows, output_directory=run)
    events = [json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert events == ["skipped", "checkpoint"] * 3
    state = json.loads((run / "checkpoints" / "step-00000003" / "state.json").read_text())["train"]
    assert state["loss_scaler"]["scale"] == 65536.0


def test_many_rows_are_shown_in_part_and_recorded_in_full():
    fault = NotFinite(
        step=7, loss=2.0, norm=math.inf, micro_batches=[1, 2], num_micro_batches=2, rows=list(range(40))
    )  # fmt: skip
    assert fault.record() == {"step": 7, "event": "skipped", "cause": "gradient", "rows": list(range(40))}
    first = ", ".join(map(str, range(16)))
    assert fault.stop().problems[0].where == f"rows {first} … (numbered from 0; micro-batch 1, 2 of 2)"
