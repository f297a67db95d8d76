"""Categories on the command line."""

from __future__ import annotations

import json

import pytest

CONFIG = """\
model_type: llm
base_model: {base}
prompt:
  task: Say whether the sum is odd or even.
input_features:
  - {{name: question, type: text}}
output_features:
  - name: kind
    type: category
    preprocessing:
      fallback_label: even
    decoder:
      type: category_extractor
      match:
        odd: {{type: contains, value: odd}}
        even: {{type: regex, value: \\beven\\b}}
generation:
  do_sample: false
trainer:
  type: none
"""


@pytest.fixture
def project(tmp_path, monkeypatch, tiny_base):
    """config.yaml, and rows.jsonl with labels."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tiny_base))
    rows = [{"question": f"{a} + {b}", "kind": ("even", "odd")[(a + b) % 2]} for a in range(3) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


CONSTRAINED = "output_features.0.decoder.constrain_to_vocabulary=true"


def test_predictions_are_labels(brim, project):
    done = brim("predict", "config.yaml", CONSTRAINED, "--dataset", "rows.jsonl", "--output", "labels.jsonl")
    assert done.code == 0
    rows = [json.loads(line) for line in (project / "labels.jsonl").read_text().splitlines()]
    assert [list(row)[:5] for row in rows] == [
        ["row", "question", "kind", "kind_response", "kind_predictions"],
    ] * 12
    assert [row["kind_response"].strip() for row in rows] == [row["kind_predictions"] for row in rows]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    labels = [row["kind_predictions"] for row in rows]
    counted = sorted(((labels.count(label), label) for label in set(labels)), reverse=True)
    assert f"labels: {', '.join(f'{label} {count}' for count, label in counted)}" in done.out


def test_an_unknown_label_is_told_by_check(brim, project):
    with (project / "rows.jsonl").open("a") as file:
        file.write('{"question": "1 + 1", "kind": "evne"}\n')
    done = brim("check", "config.yaml", "--dataset", "rows.jsonl")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "brim: rows.jsonl:13: column `kind` holds the label 'evne', which is unknown (did you mean even?)\n"
        "  expected: odd, even\n"
        "  fix: correct the data, or give the label a rule in output_features.0.decoder.match; or set "
        "preprocessing.on_bad_row: drop to go on without such rows\n"
    )


def test_a_column_of_the_labels_name_is_refused(brim, project):
    (project / "rows.jsonl").write_text('{"question": "1 + 1", "kind_predictions": "odd"}\n')
    done = brim("predict", "config.yaml", "--dataset", "rows.jsonl", "--output", "labels.jsonl")
    assert done.code == 2
    assert "the data has a column `kind_predictions`, a name that predictions use themselves" in done.err


def test_evaluation_shows_the_accuracy_of_labels_without_being_asked(brim, project):
    done = brim("evaluate", "config.yaml", CONSTRAINED, "--dataset", "rows.jsonl", "--rows", "each.jsonl", "--json")
    assert done.code == 0
    told = json.loads(done.out)
    labels = [json.loads(line)["label"] for line in (project / "each.jsonl").read_text().splitlines()]
    wanted = [json.loads(line)["kind"] for line in (project / "rows.jsonl").read_text().splitlines()]
    assert told["category_accuracy"] == sum(a == b for a, b in zip(labels, wanted, strict=True)) / 12
    low, high = told["intervals"]["category_accuracy"]
    assert low <= told["category_accuracy"] <= high
    assert "bleu" not in told
    printed = brim("evaluate", "config.yaml", CONSTRAINED, "--dataset", "rows.jsonl").out
    assert "category accuracy" in printed
    assert "--texts" not in printed


def test_training_without_a_trainer_evaluates_labels(brim, project):
    done = brim("train", "config.yaml", CONSTRAINED, "--dataset", "rows.jsonl", "preprocessing.split=random")
    assert done.code == 0
    assert "category accuracy" in done.out


def test_memory_and_plan_count_the_tokens_of_the_longest_label_as_predict_does(brim, project, tiny_base):
    """The labels `odd` and `even`; an oracle: the tokenizer itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_base / "tokenizer.json"))
    forms = [text for label in ("odd", "even") for text in (label, f" {label}")]
    longest = 1 + max(len(tokenizer.encode(form, add_special_tokens=False).ids) for form in forms)
    chosen = f"generation.max_new_tokens: {longest} (the longest label and its end)"
    shape = ("--device", "t4", "--sequence-length", 16)
    done = brim("memory", "config.yaml", CONSTRAINED, "--phase", "generate", *shape)
    assert done.code == 0
    assert chosen in done.out + done.err
    same = brim("memory", "config.yaml", CONSTRAINED, f"generation.max_new_tokens={longest}", *shape, "--json")
    counted = brim("memory", "config.yaml", CONSTRAINED, *shape, "--json")
    assert json.loads(counted.out)["total_bytes"] == json.loads(same.out)["total_bytes"]
    for labels in ((), ("output_features.0.decoder.match=null",)):  # named, or those of the data
        plan = brim("predict", "config.yaml", CONSTRAINED, *labels, "--dataset", "rows.jsonl", "--plan", "--json")
        assert plan.code == 0, plan.err
        assert json.loads(plan.out)["max_new_tokens"] == longest
