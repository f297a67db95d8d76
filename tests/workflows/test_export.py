"""Export and upload: the folder opens in PEFT and in plain transformers, computes what brim computes, and names no path.

What arrives at the Hub (a fake one) is what was exported, and the token arrives nowhere but where it belongs.
"""

import errno
import json
import math
import shutil
import traceback
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.conftest import make_llama, make_tokenizer
from tests.fake_hub import fake_hub
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import brim
from brim.infer.metrics import Divergence
from brim.models import load_llm, merge_adapter
from brim.session import open_session
from brim.storage import verified
from brim.workflows.export import merge as merging, upload

pytestmark = pytest.mark.run
IDS = torch.tensor([[70, 71, 72, 100, 101, 130, 40, 41, 42]])
LONGER = {"type": "finetune", "train_steps": 12, "batch_size": 4, "learning_rate": 0.05, "early_stop": -1}
PACKAGE = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    "export.json",
    "manifest.json",
}
TOKEN = "hf_" + "PlantedTokenOfNobody" + "0123456789abcd"
NAME = "some-org/some-model"


@pytest.fixture
def run(gallery):
    """A run with an adapter. Never written to."""
    return gallery("lora").run


@pytest.fixture
def copied(run, tmp_path):
    """The same, which may be changed."""
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture
def trained(config, sums_file, tmp_path):
    """trained(adapter=…, …) -> the folder of a run whose adapter does something."""

    def run(name="run", data=sums_file, **changes):
        settings = {**config, **changes}
        model = brim.Model({key: value for key, value in settings.items() if value is not None})
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
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def texts(folder):
    """Everything in a folder that a person, or a script, may read a path from."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"}


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.0},
        {"use_rslora": True, "r": 4, "use_dora": True, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
        {"target_modules": ["q_proj", "down_proj"], "bias_type": "lora_only", "alpha": 3},
    ],
)
def test_an_exported_adapter_opens_in_peft_and_computes_the_same_and_brim_goes_on_from_it(
    trained, config, tiny_base, sums_file, tmp_path, settings
):
    run = trained(adapter={"type": "lora", **settings})
    result = brim.Model.load(run).export(tmp_path / "out")
    assert (result.kind, result.divergence) == ("adapter", None)
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, unmerged_logits(run))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 6
    adapter = {"type": "lora", "pretrained_adapter_weights": str(tmp_path / "out")}
    again = brim.Model({**config, "adapter": adapter, "trainer": {"type": "none"}})
    assert again.evaluate(sums_file).metrics == brim.Model.load(run).evaluate(sums_file).metrics


def test_a_fully_trained_model_is_exported_as_it_is(gallery, tmp_path):
    run = gallery("full").run
    assert brim.Model.load(run).export(tmp_path / "out").kind == "full"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()
    assert torch.equal(plain_logits(tmp_path / "out"), unmerged_logits(run))
    for name, overrides, message in (
        ("full", [], "there is no adapter to merge: all weights of this model were trained"),
        ("lora", ["adapter=null"], "adapter=null leaves it out"),
    ):
        with pytest.raises(brim.InputError, match=message):
            brim.Model.load(gallery(name).run, overrides=overrides).export(tmp_path / "merged", merge=True)


@pytest.mark.parametrize(
    ("piece", "changes"),
    [
        ("lora", {}),
        ("four_bit", {}),
        (None, {"precision": "bf16-true"}),
        (None, {"precision": "bf16-true", "quantization": {"bits": 8}}),
    ],
    ids=["fp32", "4-bit", "bf16", "8-bit"],
)
def test_a_merged_model_opens_in_plain_transformers_with_the_logits_that_were_reported(
    gallery, trained, tmp_path, piece, changes
):
    run = gallery(piece).run if piece else trained(**changes)
    result = brim.Model.load(run).export(tmp_path / "out", merge=True)
    assert result.kind == "merged"
    assert {path.name for path in (tmp_path / "out").iterdir()} == PACKAGE | {"config.json", "model.safetensors"}
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


def test_the_limit_is_a_tenth_of_what_the_adapter_does_within_bounds():
    for adapter_kl, limit in ((None, 0.01), (0.5, 0.01), (0.1, 0.01), (0.05, 0.005), (0.01, 0.001), (0.0, 0.001)):
        assert Divergence.limit_of(adapter_kl) == pytest.approx(limit)


@pytest.mark.parametrize("quantization", [None, {"bits": 4}, {"bits": 8}], ids=["16-bit", "4-bit", "8-bit"])
def test_a_merge_with_a_wrong_scale_is_refused_and_leaves_nothing(trained, tmp_path, monkeypatch, quantization):
    make_tokenizer(tmp_path)
    make_llama(tmp_path, initializer_range=0.3)  # logits that an adapter can move
    run = trained(quantization=quantization, base_model=str(tmp_path), trainer=LONGER)
    brim.Model.load(run).export(tmp_path / "right", merge=True)
    for factor in (0.0, 0.5, 2.0):

        def wrong(model, *, factor=factor, **options):
            for layer in model.modules():
                if isinstance(getattr(layer, "scaling", None), dict):
                    layer.scaling = {name: scale * factor for name, scale in layer.scaling.items()}
            return merge_adapter(model, **options)

        monkeypatch.setattr(merging, "merge_adapter", wrong)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(brim.errors.ExportError, match=r"the merged model differs .* nothing was writ"):
            brim.Model.load(run).export(tmp_path / "out", merge=True)
        assert sorted(tmp_path.iterdir()) == before
    result = brim.Model.load(run).export(tmp_path / "out", merge=True, max_divergence=100)
    assert result.divergence.mean_kl > 0.001


def test_a_merge_that_is_refused_advises_what_was_not_done_and_nan_is_refused_whatever_the_limit(
    run, tmp_path, monkeypatch
):
    def refused(out=tmp_path / "above" / "out", **options):
        with pytest.raises(brim.errors.ExportError) as caught:
            brim.Model.load(run).export(out, merge=True, **options)
        assert not out.parent.exists()
        return str(caught.value)

    def broken(model, **options):
        merged = merge_adapter(model, **options)
        merged.lm_head.weight.data[3, 3] = math.nan
        return merged

    for dtype, has_fp32 in [("bf16", True), ("fp32", False)]:
        said = refused(dtype=dtype, max_divergence=0)
        assert "raise --max-divergence" in said
        assert ("--dtype fp32" in said) == has_fp32
    monkeypatch.setattr(merging, "merge_adapter", broken)
    said = refused(max_divergence=math.inf, dtype="fp16")
    assert "the merged model's logits are not finite" in said
    assert "use --dtype bf16" in said
    said = refused()
    assert "look whether the run's own are" in said
    assert "--max-divergence" not in said


@pytest.mark.parametrize("merge", [False, True])
def test_exporting_twice_gives_equal_bytes_without_a_path_of_the_machine(run, tmp_path, merge):
    one, two = (tmp_path / name for name in ("one", "two"))
    result, _ = (brim.Model.load(run).export(out, merge=merge) for out in (one, two))
    assert content(one) == content(two)
    readable = "".join(text for name, text in texts(one).items() if name != "tokenizer.json")
    for place in ("/tmp", str(tmp_path.parent), str(run.parent)):
        assert place not in readable
    assert "base_model: base" in readable
    assert "dataset: rows.jsonl" in readable
    card = (one / "README.md").read_text()
    assert card.startswith(f"---\nlibrary_name: {'transformers' if merge else 'peft'}\n")
    assert "config.yaml" not in card
    assert not merge or f"Over {result.divergence.num_tokens} tokens of validation rows" in card
    (one / "README.md").write_text("mine")  # the manifest holds the rest
    assert set(verified(one)) == set(content(one)) - {"README.md", "manifest.json"}


def test_without_the_runs_data_a_fixed_text_or_another_data_set_is_compared_on(run, sums_file, tmp_path):
    said, model = [], brim.Model.load(run, overrides=[f"dataset={tmp_path / 'gone.jsonl'}"])
    result = model.export(tmp_path / "one", merge=True, say=said.append, max_divergence=1)
    assert result.probe == "a fixed text, since the run's data was not found"
    assert said[0].startswith("the run's data cannot be used to compare with: ")
    assert result.divergence.num_tokens == 127  # the context, less the first token
    result = model.export(tmp_path / "two", merge=True, dataset=str(sums_file), max_divergence=1)
    assert result.probe == "rows of the given data set"
    nothing = {"question": ["a" * 40], "answer": ["b"], "split": [0]}
    short = ["preprocessing.drop_unlearnable=true", "preprocessing.global_max_sequence_length=4"]
    with pytest.raises(brim.DataError, match="the given data set has no rows to compare the merged model on"):
        brim.Model.load(run, overrides=short).export(tmp_path / "three", merge=True, dataset=nothing)


def test_a_model_that_was_trained_just_now_is_compared_on_the_rows_it_was_trained_with(config, sums_file, tmp_path):
    model = brim.Model(config)
    model.train(sums_file, output_directory=tmp_path / "run")
    result = model.export(tmp_path / "out", merge=True)
    assert result.probe == "validation rows"
    again = brim.Model.load(tmp_path / "run").export(tmp_path / "again", merge=True)
    assert again.divergence == result.divergence


def test_where_biases_were_trained_the_effect_is_unknown_and_the_limit_the_most(trained, tmp_path):
    adapter = {"type": "lora", "dropout": 0.0, "bias_type": "lora_only"}
    brim.Model.load(trained(adapter=adapter)).export(tmp_path / "out", merge=True)
    told = json.loads((tmp_path / "out" / "export.json").read_text())["divergence"]
    assert (told["adapter_kl"], told["limit"]) == (None, 0.01)
    assert "The adapter itself moves them" not in (tmp_path / "out" / "README.md").read_text()


def test_a_disk_that_fills_up_leaves_nothing_and_too_little_room_is_told_beforehand(run, tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    model = brim.Model.load(run)
    with monkeypatch.context() as patch:
        patch.setattr("brim.workflows.export.export.shutil.copyfile", full)
        with pytest.raises(brim.errors.WriteError, match=r"the export could not be written: .*No space left") as caught:
            model.export(tmp_path / "a" / "b" / "out")
        assert "free disk space" in str(caught.value)
        assert not (tmp_path / "a").exists()
        (tmp_path / "a").mkdir()
        with pytest.raises(brim.errors.WriteError):
            model.export(tmp_path / "a" / "b" / "out")
        assert list((tmp_path / "a").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for merge in (False, True):
        with pytest.raises(brim.errors.WriteError, match=r"it needs [\d,]+ bytes, and 1,000 are free"):
            model.export(tmp_path / "out", merge=merge)
    assert not (tmp_path / "out").exists()


def test_what_rounding_takes_away_is_told(trained, config, tmp_path):
    slow = {**config["trainer"], "learning_rate": 1e-6}
    said = []
    brim.Model.load(trained(trainer=slow)).export(tmp_path / "out", merge=True, say=said.append)
    assert len(said) == 1
    assert said[0].endswith("much of what it learned is lost in the rounding; --dtype fp32 keeps more")
    brim.Model.load(tmp_path / "run").export(tmp_path / "fp32", merge=True, dtype="fp32", say=said.append)
    assert len(said) == 1


def test_a_base_with_other_tokens_is_refused_where_its_shapes_would_fit(run, tiny_base, tmp_path):
    other = shutil.copytree(tiny_base, tmp_path / "other")
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


def test_a_base_that_was_moved_is_named_by_an_override(copied, tiny_base, tmp_path):
    moved, saved = shutil.copytree(tiny_base, tmp_path / "moved"), copied / "config.yaml"
    saved.write_text(saved.read_text().replace(f"base_model: {tiny_base}", f"base_model: {tmp_path / 'base'}"))
    (tmp_path / "adapter").mkdir()  # an empty folder will do
    assert brim.Model.load(copied).export(tmp_path / "adapter").kind == "adapter"
    with pytest.raises(brim.errors.ModelError, match="no such folder"):
        brim.Model.load(copied).export(tmp_path / "merged", merge=True)
    loaded = brim.Model.load(copied, overrides=[f"base_model={moved}"])
    assert loaded.export(tmp_path / "merged", merge=True).kind == "merged"


def test_a_damaged_file_is_named(copied, tmp_path):
    for file, damage in (("environment.json", b"{"), ("README.md", b"\xff\xfe\xfa")):
        (copied / file).write_bytes(damage)
        with pytest.raises(brim.errors.ExportError, match=rf"{file} is damaged(.|\n)*fix: delete it"):
            brim.Model.load(copied).export(tmp_path / "out")
        (copied / file).unlink()
    model, manifest = brim.Model.load(copied), copied / "model" / "manifest.json"
    listed = manifest.read_bytes()
    for file in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        path = copied / "model" / file
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(brim.errors.CheckpointError, match=f"the model of this run is damaged .{file} changed"):
            model.export(tmp_path / "out")
        manifest.unlink()  # as in runs of earlier versions
        if file != "tokenizer.json":
            with pytest.raises(brim.errors.ExportError, match="a file of the run's model is damaged"):
                model.export(tmp_path / "out")
        manifest.write_bytes(listed)
        path.write_bytes(content)
    assert model.export(tmp_path / "out").kind == "adapter"


def test_large_models_are_written_in_parts(run, tmp_path, monkeypatch):
    whole = brim.Model.load(run).export(tmp_path / "whole", merge=True)
    monkeypatch.setattr(merging, "_SHARD", "20KB")
    parts = brim.Model.load(run).export(tmp_path / "parts", merge=True)
    assert len(list((tmp_path / "parts").glob("model-0000*.safetensors"))) > 1
    assert torch.equal(plain_logits(tmp_path / "parts"), plain_logits(tmp_path / "whole"))
    assert parts.divergence == whole.divergence


def test_the_chat_template_of_a_run_goes_with_it(trained, tmp_path):
    template = tmp_path / "secret-place" / "chat.jinja"
    template.parent.mkdir()
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}")
    turns = [[{"role": "user", "content": f"add {n}"}, {"role": "assistant", "content": str(n)}] for n in range(8)]
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": each, "split": n % 2}) + "\n" for n, each in enumerate(turns)))
    none = {"input_features": None, "output_features": None}
    run = trained(data=data, **none, chat={"template": str(template)}, generation={"max_new_tokens": 4})
    for merge in (False, True):
        out = tmp_path / f"out-{merge}"
        assert brim.Model.load(run).export(out, merge=merge).probe == ("validation rows" if merge else None)
        text = AutoTokenizer.from_pretrained(out).apply_chat_template(turns[1], tokenize=False)
        assert text == "user: add 1<|end|>assistant: 1<|end|>"
        assert not any("secret-place" in text for text in texts(out).values())


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that HF_ENDPOINT would name; without xet, whose servers it has not."""
    with fake_hub() as fake:
        for module in (huggingface_hub.constants, huggingface_hub.hf_api.constants):
            monkeypatch.setattr(module, "ENDPOINT", fake.url)
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(module, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.close_session()
        yield fake
        huggingface_hub.close_session()


def test_a_run_arrives_as_it_would_be_exported_and_nothing_else_is_sent(hub, copied, tmp_path, capfd):
    (copied / "model" / ".notes").write_bytes(b"not in the manifest")
    result = upload(copied, NAME)
    brim.Model.load(copied).export(tmp_path / "out")
    assert hub.files[NAME, "main"] == content(tmp_path / "out")
    assert set(hub.files[NAME, "main"]) == PACKAGE | {"adapter_config.json", "adapter_model.safetensors"}
    assert result.files == tuple(sorted(content(tmp_path / "out")))
    assert result.num_bytes == sum(map(len, content(tmp_path / "out").values()))
    assert (result.url, result.private) == (f"{hub.url}/{NAME}/commit/1234", False)
    assert hub.commits == ["Upload adapter by brim"]
    sent = b"".join(hub.received)
    for planted in (b"not in the manifest", str(copied).encode(), str(tmp_path).encode(), TOKEN.encode()):
        assert planted not in sent
    assert hub.authorizations == {f"Bearer {TOKEN}"}
    assert TOKEN not in "".join(capfd.readouterr())
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")  # its front matter is what the Hub takes
    assert card.data.to_dict() == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["brim"]}
    assert json.loads(hub.files[NAME, "main"]["export.json"]) == {"kind": "adapter"}
    brim.Model.load(copied).save(tmp_path / "saved")  # without a run, and with a short card
    assert upload(tmp_path / "saved", "some-org/saved").files == result.files
    card = hub.files["some-org/saved", "main"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: peft\npipeline_tag: text-generation\n")
    assert "## Settings" in card


def test_an_exported_folder_arrives_byte_by_byte_with_its_owners_card_and_leaves_other_branches_alone(
    hub, run, tmp_path
):
    upload(run, NAME)
    before = dict(hub.files[NAME, "main"])
    out = tmp_path / "out"
    brim.Model.load(run).export(out, merge=True, max_divergence=1)
    with (out / "README.md").open("a") as card:
        card.write("\nMade for the workshop.\n")
    (out / "notes.txt").write_text("not part of it")
    upload(out, NAME, commit_message="The merged one", revision="merged")
    expected = content(out)
    del expected["notes.txt"]
    assert hub.files[NAME, "merged"] == {**before, **expected}
    assert hub.files[NAME, "main"] == before
    assert hub.commits == ["Upload adapter by brim", "The merged one"]


def test_private_is_private_or_refused(hub, run):
    assert brim.Model.load(run).upload("some-org/hidden", private=True).private
    assert hub.private == {"some-org/hidden": True}
    upload(run, "some-org/open")
    hub.files["some-org/open", "main"].clear()
    with pytest.raises(brim.InputError, match="some-org/open exists and is public; nothing was uploaded"):
        upload(run, "some-org/open", private=True)
    assert hub.files["some-org/open", "main"] == {}
    assert upload(run, "some-org/hidden").private


def test_a_token_that_is_none_is_refused_before_it_is_sent(hub, run, monkeypatch, tmp_path):
    """A stored login is not used."""
    (tmp_path / "token").write_text("hf_" + "s" * 34)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "  ")
    with pytest.raises(brim.InputError, match="there is no token: HF_TOKEN is not set in the environment"):
        upload(run, NAME)
    for broken in (f"{TOKEN}\nX-Injected: 1", f"{TOKEN} {TOKEN}", f"{TOKEN}é"):
        monkeypatch.setenv("HF_TOKEN", broken)
        with pytest.raises(brim.InputError, match="HF_TOKEN is not a token: it has blanks or other") as caught:
            upload(run, NAME)
        assert TOKEN not in str(caught.value)
    assert hub.received == []


def test_what_cannot_be_uploaded_is_refused_before_all_else(hub, run, tmp_path, monkeypatch):
    for name in ("some-model", "/some-model", "a/b/c", "some org/x", "some-org/x.git", ""):
        with pytest.raises(
            brim.InputError, match=r"is not the name of a repository on the Hub\n  expected: organisation/name"
        ):
            upload(run, name)
    with pytest.raises(brim.InputError, match="this is neither a run nor an export") as caught:
        upload(run / "model", NAME)
    assert caught.value.problems[0].fix == "name the run's folder, not the one in it"
    brim.Model.load(run).export(tmp_path / "out")
    with (tmp_path / "out" / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(brim.errors.ExportError, match=r"this export is not whole \(tokenizer.json changed"):
        upload(tmp_path / "out", NAME)
    assert hub.received == []
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(brim.InputError, match="switched off by HF_HUB_OFFLINE"):
            upload(run, NAME)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(brim.errors.ExportError, match=r"the Hub could not be reached \(ConnectError"):
        upload(run, NAME)


@pytest.mark.parametrize(
    ("place", "status", "kind", "message"),
    [
        ("repos/create", 401, brim.InputError, "the Hub does not accept the token in HF_TOKEN"),
        ("repos/create", 403, brim.InputError, "the token in HF_TOKEN may not write to some-org/some-model"),
        ("repos/create", 404, brim.InputError, "the Hub has no user or organisation 'some-org'"),
        ("preupload", 403, brim.InputError, "may not write to some-org/some-model"),
        ("objects/batch", 507, brim.errors.ExportError, "the Hub answered 507"),
        ("commit", 500, brim.errors.ExportError, "the Hub answered 500"),
    ],
)
def test_what_the_hub_refuses_is_told_without_the_token_that_it_repeats(hub, run, place, status, kind, message):
    hub.refuse[place] = (status, f"no: Bearer {TOKEN} is nobody")
    with pytest.raises(kind, match=message) as caught:
        upload(run, NAME)
    assert type(caught.value) is kind
    assert "(the Hub says: no: Bearer *** is nobody)" in str(caught.value)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert hub.commits == []


def test_what_the_hub_thinks_of_the_card_is_passed_on(hub, run):
    hub.warnings = [f"empty metadata {TOKEN}"]
    said = []
    upload(run, NAME, say=said.append)
    assert said == ["Warnings while validating metadata in README.md: - empty metadata ***"]
