"""The campaign's canaries sing: code that is trusted runs and is seen, a Hub that is asked counts, planted tokens are
found. Whether brim keeps them silent, tests/faults/test_campaign.py tells.
"""

from __future__ import annotations

import base64
import gzip
import io
import urllib.error
import urllib.request
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults.bad_input import BadInput
from faults.forked import Brim
from faults.hostile import Counter, Hostile, cases, hub, trial
from faults.token import forms, found_in
from faults.workshop import build, make_base

TOKENS = {"HF_TOKEN": "hf_" + "aB3" * 11 + "x", "OTHER": "a/b+c" * 5}


@pytest.fixture(scope="module")
def brim():
    with Brim() as started:
        yield started


@pytest.fixture(scope="module")
def project(brim, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outer") / "project"
    folder.mkdir()
    build(folder, brim)
    return folder


def auto_map_case(project):
    found = [hostile for hostile in cases(project) if hostile.bad.name == "auto_map, unknown model_type"]
    (hostile,) = found
    return hostile


def test_code_that_is_trusted_runs_and_is_seen(brim, project):
    hostile = auto_map_case(project)
    trusting = replace(hostile, bad=replace(hostile.bad, overrides=("trust_remote_code=true",)))
    told = trial(trusting, "train", brim, project, Counter(address=""))
    assert (told.outcome, told.why) == ("failed", "the folder's code ran")
    assert trial(hostile, "train", brim, project, Counter(address="")).outcome == "passed"


def test_what_is_accepted_or_changes_its_surroundings_is_seen(brim, project):
    harmless = Hostile(bad=BadInput(row="hostile", name="nothing", says=("x",)))
    told = trial(harmless, "check", brim, project, Counter(address=""))
    assert (told.outcome, told.why) == ("failed", "was accepted")
    assert trial(replace(harmless, inert=True), "check", brim, project, Counter(address="")).outcome == "passed"


def asked(request):
    """The answer, which is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    caught.value.close()
    return caught.value


def test_a_hub_that_is_asked_counts():
    with hub() as counter:
        assert asked(f"{counter.address}/api/models/x").code == 404
        assert (counter.requests, counter.last) == (1, "/api/models/x")
    with hub(echo=True) as counter:
        request = urllib.request.Request(counter.address, headers={"Authorization": "Bearer xyz"})
        assert asked(request).headers["X-Error-Message"] == "Bearer xyz"


@pytest.mark.parametrize("token", TOKENS.values())
@pytest.mark.parametrize("offset", range(3))
def test_tokens_are_found_in_every_form(token, offset):
    name = next(name for name, value in TOKENS.items() if value == token)
    hidden = base64.b64encode(b"abc"[:offset] + token.encode() + b" and more")
    for content in (
        token.encode(),
        hidden,
        hidden.replace(b"+", b"-").replace(b"/", b"_"),
        token.encode().hex().encode(),
        token.encode("utf-16"),
        gzip.compress(b"x" + token.encode()),
        *forms(token),
    ):
        assert found_in(b"before " + content if not content.startswith(b"\x1f") else content, TOKENS) == name


def test_tokens_are_found_in_parquet():
    for table in (
        pa.table({"a": ["x", f"y {TOKENS['OTHER']}"]}),
        pa.table({TOKENS["OTHER"]: [1]}),
        pa.table({"a": [1]}).replace_schema_metadata({"k": TOKENS["OTHER"]}),
    ):
        file = io.BytesIO()
        pq.write_table(table, file, compression="zstd")
        assert found_in(file.getvalue(), TOKENS) == "OTHER"


def test_what_is_no_token_is_not_found():
    assert found_in(b"hf_ nothing " * 100, TOKENS) == ""


def test_the_base_model_is_the_same_each_time(tmp_path):
    for name in ("a", "b"):
        make_base(tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
