"""Export: the folder opens in PEFT and in plain transformers, computes what brim computes, and names no path."""

import errno
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import make_llama, make_tokenizer

import brim
from brim.models import load_llm
from brim.session import open_session
from brim.storage import verified
from brim.workflows.export import merge as merging
from brim.workflows.export.merge import merge_adapter

IDS = torch.tensor([[70, 71, 72, 100, 101, 130, 40, 41, 42]])
LONGER = {"type": "finetune", "train_steps": 12, "batch_size": 4, "learning_rate": 0.05, "early_stop": -1}
QUANTIZED = {"16-bit": None, "4-bit": {"bits": 4}, "8-bit": {"bits": 8}}


@pytest.fixture
def trained(config, sums_file, tmp_path):
    """trained(adapter=…, …) -> the folder of a run whose adapter does something."""

    def run(name="run", data=sums_file, **changes):
        settings = {**config, "adapter": {"type": "lora", "dropout": 0.0}, **changes}
        model = brim.Model({key: value for key, value in settings.items() if value is not None or key == "adapter"})
        model.train(data, output_directory=tmp_path / name)
        return tmp_path / name

    return run


def unmerged_logits(run):
    """What the run's model computes, as it is evaluated."""
    session = open_session(brim.Model.load(run).config)
    llm = load_llm(session.config, session.folder, session.device, trainable=False)
    with torch.no_grad(), llm.precision.autocast(llm.device):
        return llm.model(IDS).logits.float()


def plain_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def texts(folder):
    """Everything in a folder that a person, or a script, may read a path from."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"}


def test_an_exported_adapter_opens_in_peft_and_computes_the_same(trained, tiny_base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    run = trained()
    result = brim.Model.load(run).export(tmp_path / "out")
    assert (result.kind, result.divergence) == ("adapter", None)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, unmerged_logits(run))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 6


def test_brim_goes_on_from_an_exported_adapter(trained, config, sums_file, tmp_path):
    run = trained()
    brim.Model.load(run).export(tmp_path / "out")
    adapter = {"type": "lora", "pretrained_adapter_weights": str(tmp_path / "out")}
    again = brim.Model({**config, "adapter": adapter, "trainer": {"type": "none"}})
    assert again.evaluate(sums_file).metrics == brim.Model.load(run).evaluate(sums_file).metrics


def test_a_fully_trained_model_is_exported_as_it_is(trained, tmp_path):
    run = trained(adapter=None)
    assert brim.Model.load(run).export(tmp_path / "out").kind == "full"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()
    assert torch.equal(plain_logits(tmp_path / "out"), unmerged_logits(run))


@pytest.mark.parametrize("quantization", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_merged_model_opens_in_plain_transformers_with_the_logits_that_were_reported(
    trained, config, tmp_path, quantization, precision
):
    run = trained(quantization=quantization, precision=precision)
    result = brim.Model.load(run).export(tmp_path / "out", merge=True)
    assert result.kind == "merged"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("README.md", "export.json", "manifest.json"),
    }
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["dtype"] == "bfloat16"
    assert "quantization_config" not in stored
    assert stored["tie_word_embeddings"]
    reported = json.loads((tmp_path / "out" / "export.json").read_text())["divergence"]
    assert reported["mean_kl"] == result.divergence.mean_kl <= 0.01
    expected = oracle(run, tmp_path / "out")
    assert reported["num_tokens"] == expected["num_tokens"]
    assert reported["same_top"] == expected["same_top"]
    # The merged model computes in bf16. Rows that go together are products of another shape, which some CPUs' kernels
    # round otherwise, by as much as merging does: with AVX2 alone the figures lay up to 7% apart.
    for name in ("mean_kl", "max_logit_difference"):
        assert reported[name] == pytest.approx(expected[name], rel=0.2), name


def oracle(run, out):
    """The figures by their definition, row by row, over the supervised tokens of the validation rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = brim.Model.load(run)
    session = open_session(model.config)
    llm = load_llm(session.config, session.folder, session.device, trainable=False)
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = [json.loads(line) for line in Path(session.config.dataset).read_text().splitlines()]
    kl, same, largest = [], [], []
    for row in rows:
        if row["split"] != 1:
            continue
        prompt, answer = (tokenizer(row[name]).input_ids for name in ("question", "answer"))
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad(), llm.precision.autocast(llm.device):
            first = llm.model(ids).logits[0, len(prompt) - 1 : -1].double()
            second = merged(ids).logits[0, len(prompt) - 1 : -1].double()
        p, q = first.softmax(-1), second.softmax(-1)
        kl += (p * (p / q).log()).sum(-1).tolist()
        same += (first.argmax(-1) == second.argmax(-1)).tolist()
        largest.append(float((first - second).abs().max()))
    return {
        "num_tokens": len(kl),
        "mean_kl": sum(kl) / len(kl),
        "same_top": sum(same) / len(same),
        "max_logit_difference": max(largest),
    }


def test_a_merge_under_mixed_precision_is_into_the_weights_as_they_are_stored(trained, tiny_base, tmp_path):
    """A run under autocast holds frozen weights of linear layers in 16 bits; those of the folder have 32."""
    run = trained(precision="bf16-mixed", adapter={"type": "lora", "dropout": 0.0, "target_modules": ["q_proj"]})
    brim.Model.load(run).export(tmp_path / "out", merge=True, dtype="fp32", max_divergence=1)
    stored, merged = (load_file(folder / "model.safetensors") for folder in (tiny_base, tmp_path / "out"))
    untouched = [name for name in stored if "q_proj" not in name]
    assert all(torch.equal(stored[name], merged[name]) for name in untouched)


@pytest.mark.parametrize(
    ("adapter_kl", "limit"), [(None, 0.01), (0.5, 0.01), (0.1, 0.01), (0.05, 0.005), (0.01, 0.001), (0.0, 0.001)]
)
def test_the_limit_is_a_tenth_of_what_the_adapter_does_within_bounds(adapter_kl, limit):
    assert merging.limit_of(adapter_kl) == pytest.approx(limit)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("quantization", QUANTIZED.values(), ids=QUANTIZED)
def test_a_merge_with_a_wrong_scale_is_refused_and_leaves_nothing(trained, tmp_path, monkeypatch, quantization, factor):
    def wrong(model, **options):
        for layer in model.modules():
            if isinstance(getattr(layer, "scaling", None), dict):
                layer.scaling = {name: scale * factor for name, scale in layer.scaling.items()}
        return merge_adapter(model, **options)

    make_tokenizer(tmp_path)
    make_llama(tmp_path, initializer_range=0.3)  # logits that an adapter can move
    run = trained(quantization=quantization, base_model=str(tmp_path), trainer=LONGER)
    brim.Model.load(run).export(tmp_path / "right", merge=True)
    monkeypatch.setattr(merging, "merge_adapter", wrong)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(brim.ExportError, match=r"the merged model differs .* nothing was writ"):
        brim.Model.load(run).export(tmp_path / "out", merge=True)
    assert sorted(tmp_path.iterdir()) == before
    result = brim.Model.load(run).export(tmp_path / "out", merge=True, max_divergence=100)
    assert result.divergence.mean_kl > 0.001


def test_nan_is_refused_whatever_the_limit(trained, tmp_path, monkeypatch):
    def broken(model, **options):
        merged = merge_adapter(model, **options)
        merged.lm_head.weight.data[3, 3] = math.nan
        return merged

    monkeypatch.setattr(merging, "merge_adapter", broken)
    out = tmp_path / "above" / "out"
    with pytest.raises(brim.ExportError, match="the merged model's logits are not finite") as caught:
        brim.Model.load(trained()).export(out, merge=True, max_divergence=math.inf, dtype="fp16")
    assert "its values do not fit fp16: use --dtype bf16" in str(caught.value)
    assert not out.parent.exists()
    with pytest.raises(brim.ExportError, match="look whether the run's own are") as caught:
        brim.Model.load(tmp_path / "run").export(out, merge=True)
    assert "--max-divergence" not in str(caught.value)


def test_what_is_advised_is_not_what_was_done(trained, tmp_path):
    run = trained()
    for dtype, has_fp32 in [("bf16", True), ("fp32", False)]:
        with pytest.raises(brim.ExportError, match="raise --max-divergence") as caught:
            brim.Model.load(run).export(tmp_path / "out", merge=True, dtype=dtype, max_divergence=0)
        assert ("--dtype fp32" in str(caught.value)) == has_fp32


@pytest.mark.parametrize("merge", [False, True])
def test_exporting_twice_gives_equal_bytes_without_a_path_of_the_machine(trained, tmp_path, merge):
    run = trained()
    for name in ("one", "two"):
        brim.Model.load(run).export(tmp_path / name, merge=merge)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    readable = "".join(text for name, text in texts(tmp_path / "one").items() if name != "tokenizer.json")
    assert "/tmp" not in readable
    assert str(tmp_path.parent) not in readable
    assert "base_model: base" in readable
    assert "dataset: sums.jsonl" in readable


def test_the_figures_stand_in_the_card_and_the_manifest_holds_the_rest(trained, tmp_path):
    result = brim.Model.load(trained()).export(tmp_path / "out", merge=True)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\n# LoRA adapter merged into base" in card
    assert f"{result.divergence.mean_kl:.2g} nats a token" in card
    assert f"Over {result.divergence.num_tokens} tokens of validation rows" in card
    assert "config.yaml" not in card
    (tmp_path / "out" / "README.md").write_text("mine")
    assert sorted(verified(tmp_path / "out")) == sorted(
        path.name for path in (tmp_path / "out").iterdir() if path.name not in ("README.md", "manifest.json")
    )


@pytest.mark.parametrize("moved", [False, True])
def test_without_the_runs_data_a_fixed_text_or_another_data_set_is_compared_on(trained, sums_file, tmp_path, moved):
    run = trained()
    other = sums_file.rename(tmp_path / "moved.jsonl")
    said = []
    result = brim.Model.load(run).export(
        tmp_path / "out", merge=True, dataset=str(other) if moved else None, say=said.append, max_divergence=1
    )
    if moved:
        assert result.probe == "rows of the given data set"
    else:
        assert result.probe == "a fixed text, since the run's data was not at hand"
        assert said[0].startswith("the run's data cannot be used to compare with: ")
        assert result.divergence.num_tokens == 127  # the context, less the first token


def test_a_model_that_was_trained_just_now_is_compared_on_the_rows_it_was_trained_with(config, sums_file, tmp_path):
    model = brim.Model({**config, "adapter": {"type": "lora", "dropout": 0.0}})
    model.train(sums_file, output_directory=tmp_path / "run")
    result = model.export(tmp_path / "out", merge=True)
    assert result.probe == "validation rows"
    again = brim.Model.load(tmp_path / "run").export(tmp_path / "again", merge=True)
    assert again.divergence == result.divergence


def test_a_data_set_without_rows_compares_nothing(trained, tmp_path):
    nothing = {"question": ["a" * 40], "answer": ["b"], "split": [0]}
    model = brim.Model.load(
        trained(),
        overrides=["preprocessing.drop_unlearnable=true", "preprocessing.global_max_sequence_length=4"],
    )
    with pytest.raises(brim.DataError, match="the given data set has no rows to compare the merged model on"):
        model.export(tmp_path / "out", merge=True, dataset=nothing)


def test_where_biases_were_trained_the_effect_is_unknown_and_the_limit_the_most(trained, tmp_path):
    adapter = {"type": "lora", "dropout": 0.0, "bias_type": "lora_only"}
    brim.Model.load(trained(adapter=adapter)).export(tmp_path / "out", merge=True)
    told = json.loads((tmp_path / "out" / "export.json").read_text())["divergence"]
    assert (told["adapter_kl"], told["limit"]) == (None, 0.01)
    assert "The adapter itself moves them" not in (tmp_path / "out" / "README.md").read_text()


def test_a_disk_that_fills_up_while_it_is_written_leaves_nothing(trained, tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = trained()
    monkeypatch.setattr("brim.workflows.export.export.shutil.copyfile", full)
    with pytest.raises(brim.WriteError, match=r"the export could not be written: .*No space left") as caught:
        brim.Model.load(run).export(tmp_path / "a" / "b" / "out")
    assert "make room" in str(caught.value)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    with pytest.raises(brim.WriteError):
        brim.Model.load(run).export(tmp_path / "a" / "b" / "out")
    assert list((tmp_path / "a").iterdir()) == []


def test_what_rounding_takes_away_is_told(trained, config, tmp_path):
    slow = {**config["trainer"], "learning_rate": 1e-6}
    said = []
    brim.Model.load(trained(trainer=slow)).export(tmp_path / "out", merge=True, say=said.append)
    assert len(said) == 1
    assert said[0].endswith("much of what it learned is lost in the rounding; --dtype fp32 keeps more")
    brim.Model.load(tmp_path / "run").export(tmp_path / "fp32", merge=True, dtype="fp32", say=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, "--dtype acts on merged weights, and nothing is merged"),
        ({"merge": True, "dtype": "int4"}, "there is no dtype 'int4'"),
        ({"merge": True, "max_divergence": -1.0}, "--max-divergence is -1"),
    ],
)
def test_options_are_checked_in_python_too(trained, tmp_path, options, message):
    with pytest.raises(brim.InputError, match=message):
        brim.Model.load(trained()).export(tmp_path / "out", **options)


def test_a_fully_trained_model_has_nothing_to_merge(trained, tmp_path):
    with pytest.raises(brim.InputError, match="there is no adapter to merge: all weights of this model were trained"):
        brim.Model.load(trained(adapter=None)).export(tmp_path / "out", merge=True)


def test_an_adapter_that_is_left_out_cannot_be_merged(trained, tmp_path):
    model = brim.Model.load(trained(), overrides=["adapter=null"])
    with pytest.raises(brim.InputError, match="adapter=null leaves it out"):
        model.export(tmp_path / "out", merge=True)


def test_a_base_with_other_tokens_is_refused_where_its_shapes_would_fit(trained, tiny_base, tmp_path):
    run = trained()
    other = tmp_path / "other"
    shutil.copytree(tiny_base, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = brim.Model.load(run, overrides=[f"base_model={other}"])
    with pytest.raises(brim.InputError, match=r"this base model has other tokens than the run: '[ab]' is "):
        loaded.export(tmp_path / "merged", merge=True)
    with pytest.raises(brim.InputError, match="this base model has other tokens than the run"):
        loaded.generate("add 1 and 2 =")
    assert not (tmp_path / "merged").exists()


def test_a_base_that_was_moved_is_named_by_an_override(trained, tiny_base, tmp_path):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    run = trained(base_model=str(base))
    base.rename(tmp_path / "moved")
    assert brim.Model.load(run).export(tmp_path / "adapter").kind == "adapter"
    with pytest.raises(brim.ModelError, match="no such folder"):
        brim.Model.load(run).export(tmp_path / "merged", merge=True)
    moved = brim.Model.load(run, overrides=[f"base_model={tmp_path / 'moved'}"])
    assert moved.export(tmp_path / "merged", merge=True).kind == "merged"


@pytest.mark.parametrize(("file", "content"), [("environment.json", b"{"), ("README.md", b"\xff\xfe\xfa")])
def test_a_damaged_file_beside_the_model_is_named(trained, tmp_path, file, content):
    run = trained()
    (run / file).write_bytes(content)
    with pytest.raises(brim.ExportError, match=f"{file} is damaged(.|\n)*fix: delete it"):
        brim.Model.load(run).export(tmp_path / "out")
    (run / file).unlink()
    assert brim.Model.load(run).export(tmp_path / "out").kind == "adapter"


def test_the_target_is_new_or_empty_and_outside_the_run(trained, tmp_path):
    run = trained()
    model = brim.Model.load(run)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    for target, message in {
        run / "model" / "merged": "lies in the run",
        run: "lies in the run",
        tmp_path / "file": "is a file",
        tmp_path / "file" / "below": "no new folder can be made",
        tmp_path / "taken": "holds other things; nothing was changed",
    }.items():
        for merge in (False, True):
            with pytest.raises(brim.OutputError, match=message):
                model.export(target, merge=merge)
    (tmp_path / "empty").mkdir()
    assert model.export(tmp_path / "empty").kind == "adapter"


def test_a_full_disk_is_told_before_anything_is_written(trained, tmp_path, monkeypatch):
    model = brim.Model.load(trained())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for merge in (False, True):
        with pytest.raises(brim.WriteError, match=r"it needs [\d,]+ bytes, and 1,000 are free"):
            model.export(tmp_path / "out", merge=merge)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"])
def test_a_damaged_run_is_refused(trained, tmp_path, file):
    run = trained()
    model = brim.Model.load(run)
    content = (run / "model" / file).read_bytes()
    (run / "model" / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(brim.CheckpointError, match=f"the model of this run is damaged .{file} changed"):
        model.export(tmp_path / "out")
    (run / "model" / "manifest.json").unlink()  # as in runs of earlier versions
    if file != "tokenizer.json":
        with pytest.raises(brim.ExportError, match="a file of the run's model is damaged"):
            model.export(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "fix"), [("onnx", "optimum-cli export onnx"), ("gguf", "convert_hf_to_gguf"), ("x", "leave --format out")]
)
def test_other_formats_are_named_with_what_to_do(trained, tmp_path, name, fix):
    with pytest.raises(brim.InputError, match=f"brim does not write the format '{name}'(.|\n)*{fix}"):
        brim.Model.load(trained()).export(tmp_path / "out", format=name)


def test_what_was_saved_without_a_run_is_exported_with_a_short_card(trained, tmp_path):
    brim.Model.load(trained()).save(tmp_path / "saved")
    brim.Model.load(tmp_path / "saved").export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\npipeline_tag: text-generation\n")
    assert "## Settings" in card


def test_brim_opens_a_merged_model_as_a_base(trained, config, sums_file, tmp_path):
    run = trained()
    result = brim.Model.load(run).export(tmp_path / "out", merge=True, dtype="fp32")
    merged = brim.Model({**config, "base_model": str(tmp_path / "out"), "adapter": None, "trainer": {"type": "none"}})
    ours, theirs = (model.evaluate(sums_file).metrics["loss"] for model in (merged, brim.Model.load(run)))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert result.divergence.mean_kl < 1e-9


def test_large_models_are_written_in_parts(trained, tmp_path, monkeypatch):
    run = trained()
    whole = brim.Model.load(run).export(tmp_path / "whole", merge=True)
    monkeypatch.setattr(merging, "_SHARD", "20KB")
    parts = brim.Model.load(run).export(tmp_path / "parts", merge=True)
    assert len(list((tmp_path / "parts").glob("model-0000*.safetensors"))) > 1
    assert torch.equal(plain_logits(tmp_path / "parts"), plain_logits(tmp_path / "whole"))
    assert parts.divergence == whole.divergence


@pytest.mark.parametrize("merge", [False, True])
def test_the_chat_template_of_a_run_goes_with_it(trained, tmp_path, merge):
    from transformers import AutoTokenizer

    template = tmp_path / "secret-place" / "chat.jinja"
    template.parent.mkdir()
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}")
    talks = [
        {
            "messages": [{"role": "user", "content": f"add {n}"}, {"role": "assistant", "content": str(n)}],
            "split": n % 2,
        }
        for n in range(8)
    ]
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in talks))
    run = trained(
        data=data,
        input_features=None,
        output_features=None,
        chat={"template": str(template)},
        generation={"max_new_tokens": 4},
    )
    result = brim.Model.load(run).export(tmp_path / "out", merge=merge)
    assert result.probe == ("validation rows" if merge else None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template(talks[1]["messages"], tokenize=False) == "user: add 1<|end|>assistant: 1<|end|>"
    )
    assert not any("secret-place" in text for text in texts(tmp_path / "out").values())
