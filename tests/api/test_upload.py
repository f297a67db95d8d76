"""Upload to a fake Hub: what arrives is what was exported, and the token arrives nowhere but where it belongs."""

import json
import traceback

import huggingface_hub
import pytest
from tests.api.fake_hub import fake_hub

import brim
from brim.workflows.export import upload

TOKEN = "hf_" + "PlantedTokenOfNobody" + "0123456789abcd"


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


@pytest.fixture
def run(config, sums_file, tmp_path):
    brim.Model(config).train(sums_file, output_directory=tmp_path / "run")
    return tmp_path / "run"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_arrives_as_it_would_be_exported(hub, run, tmp_path):
    result = upload(run, "some-org/some-model")
    brim.Model.load(run).export(tmp_path / "out")
    assert hub.files["some-org/some-model", "main"] == content(tmp_path / "out")
    assert result.files == tuple(sorted(content(tmp_path / "out")))
    assert result.num_bytes == sum(map(len, content(tmp_path / "out").values()))
    assert (result.url, result.private) == (f"{hub.url}/some-org/some-model/commit/1234", False)
    assert hub.commits == ["Upload adapter by brim"]


def test_an_exported_folder_arrives_byte_by_byte_with_what_its_owner_wrote_into_the_card(hub, run, tmp_path):
    brim.Model.load(run).export(tmp_path / "out", merge=True, max_divergence=1)
    with (tmp_path / "out" / "README.md").open("a") as card:
        card.write("\nMade for the workshop.\n")
    (tmp_path / "out" / "notes.txt").write_text("not part of it")
    upload(tmp_path / "out", "some-org/some-model", commit_message="The merged one")
    expected = content(tmp_path / "out")
    del expected["notes.txt"]
    assert hub.files["some-org/some-model", "main"] == expected
    assert hub.commits == ["The merged one"]


def test_nothing_of_the_run_but_the_package_is_sent(hub, run):
    (run / "model" / ".notes").write_bytes(b"not in the manifest")
    upload(run, "some-org/some-model")
    sent = b"".join(hub.received)
    for planted in (b"not in the manifest", str(run).encode(), str(run.parent).encode()):
        assert planted not in sent
    assert set(hub.files["some-org/some-model", "main"]) == {
        *("adapter_config.json", "adapter_model.safetensors", "generation_config.json", "tokenizer.json"),
        *("tokenizer_config.json", "export.json", "manifest.json", "README.md"),
    }


def test_a_second_upload_to_a_branch_leaves_the_first_alone(hub, run, tmp_path):
    upload(run, "some-org/some-model")
    before = dict(hub.files["some-org/some-model", "main"])
    brim.Model.load(run).export(tmp_path / "out", merge=True, max_divergence=1)
    upload(tmp_path / "out", "some-org/some-model", revision="merged")
    assert hub.files["some-org/some-model", "main"] == before
    assert hub.files["some-org/some-model", "merged"] == {**before, **content(tmp_path / "out")}


def test_private_is_private_or_refused(hub, run):
    assert upload(run, "some-org/hidden", private=True).private
    assert hub.private == {"some-org/hidden": True}
    upload(run, "some-org/open")
    hub.files["some-org/open", "main"].clear()
    with pytest.raises(brim.InputError, match="some-org/open exists and is public; nothing was uploaded"):
        upload(run, "some-org/open", private=True)
    assert hub.files["some-org/open", "main"] == {}
    assert upload(run, "some-org/hidden").private


def test_the_token_is_sent_as_authorization_and_is_nowhere_else(hub, run, capfd, tmp_path):
    upload(run, "some-org/some-model")
    assert hub.authorizations == {f"Bearer {TOKEN}"}
    assert TOKEN.encode() not in b"".join(hub.received)
    assert TOKEN not in "".join(capfd.readouterr())
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_stored_login_is_not_used(hub, run, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("hf_" + "s" * 34)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "  ")
    with pytest.raises(brim.InputError, match="there is no token: HF_TOKEN is not set in the environment"):
        upload(run, "some-org/some-model")
    assert hub.received == []


def test_a_token_that_is_none_is_refused_before_it_is_sent(hub, run, monkeypatch):
    for broken in (f"{TOKEN}\nX-Injected: 1", f"{TOKEN} {TOKEN}", f"{TOKEN}é"):
        monkeypatch.setenv("HF_TOKEN", broken)
        with pytest.raises(
            brim.InputError, match="HF_TOKEN is no token: it has blanks or other characters that no token has"
        ) as caught:
            upload(run, "some-org/some-model")
        assert TOKEN not in str(caught.value)
    assert hub.received == []


@pytest.mark.parametrize(
    "name", ["some-model", "some-org/", "/some-model", "a/b/c", "some org/x", "some-org/x.git", ""]
)
def test_a_name_that_is_not_organisation_and_name_is_refused_before_all_else(hub, run, name):
    with pytest.raises(brim.InputError, match=r"names no repository of the Hub\n  expected: organisation/name"):
        upload(run, name)
    assert hub.received == []


@pytest.mark.parametrize(
    ("place", "status", "kind", "message"),
    [
        ("repos/create", 401, brim.InputError, "the Hub does not accept the token in HF_TOKEN"),
        ("repos/create", 403, brim.InputError, "the token in HF_TOKEN may not write to some-org/some-model"),
        ("repos/create", 404, brim.InputError, "the Hub has no user or organisation 'some-org'"),
        ("preupload", 403, brim.InputError, "may not write to some-org/some-model"),
        ("objects/batch", 507, brim.ExportError, "the Hub answered 507"),
        ("commit", 500, brim.ExportError, "the Hub answered 500"),
    ],
)
def test_what_the_hub_refuses_is_told_without_the_token_that_it_repeats(hub, run, place, status, kind, message):
    hub.refuse[place] = (status, f"no: Bearer {TOKEN} is nobody")
    with pytest.raises(kind, match=message) as caught:
        upload(run, "some-org/some-model")
    assert type(caught.value) is kind
    assert "(the Hub says: no: Bearer *** is nobody)" in str(caught.value)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert hub.commits == []


def test_no_network_is_the_networks_fault(hub, run, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(brim.ExportError, match=r"the Hub could not be reached \(ConnectError"):
        upload(run, "some-org/some-model")


def test_offline_mode_is_told(hub, run, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(brim.InputError, match="switched off by HF_HUB_OFFLINE"):
        upload(run, "some-org/some-model")


def test_what_the_hub_thinks_of_the_card_is_passed_on(hub, run):
    hub.warnings = [f"empty metadata {TOKEN}"]
    said = []
    upload(run, "some-org/some-model", say=said.append)
    assert said == ["Warnings while validating metadata in README.md: - empty metadata ***"]


def test_the_front_matter_is_yaml_that_the_hub_takes(hub, run, tmp_path):
    upload(run, "some-org/some-model")
    (tmp_path / "README.md").write_bytes(hub.files["some-org/some-model", "main"]["README.md"])
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["brim"]}


def test_a_changed_export_is_refused(hub, run, tmp_path):
    brim.Model.load(run).export(tmp_path / "out")
    with (tmp_path / "out" / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(brim.ExportError, match=r"this export is not whole \(tokenizer.json changed"):
        upload(tmp_path / "out", "some-org/some-model")
    assert hub.received == []


def test_a_model_in_python_uploads_its_run(hub, config, sums_file, tmp_path):
    model = brim.Model(config)
    with pytest.raises(brim.InputError, match="there is nothing trained to hand on"):
        model.upload("some-org/some-model")
    model.train(sums_file, output_directory=tmp_path / "run")
    model.upload("some-org/some-model", private=True)
    facts = json.loads(hub.files["some-org/some-model", "main"]["export.json"])
    assert facts == {"kind": "adapter"}


def test_what_is_neither_a_run_nor_an_export_is_told_with_what_to_name(hub, run):
    with pytest.raises(brim.InputError, match="this is neither a run nor an export") as caught:
        upload(run / "model", "some-org/some-model")
    assert caught.value.problems[0].fix == "name the run's folder, not the one in it"
    assert not hub.received


def test_what_save_wrote_arrives(hub, run, tmp_path):
    brim.Model.load(run).save(tmp_path / "saved")
    assert upload(tmp_path / "saved", "some-org/some-model").files == upload(run, "some-org/some-model").files
