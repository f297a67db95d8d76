"""Manifests: what was changed, is missing or lies outside is known."""

import json
import os

import pytest

from brim.storage import sha256, verified, write_manifest

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # as published


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "a").write_bytes(b"abc")
    (folder / "below" / "b").write_bytes(b"")
    write_manifest(folder)
    return folder


def test_sha256_is_the_published_one(folder):
    assert sha256(folder / "a") == ABC


def test_a_manifest_has_a_digest_for_every_file_but_itself(folder):
    assert json.loads((folder / "manifest.json").read_text())["a"] == ABC
    write_manifest(folder)
    assert verified(folder) == ["a", "below/b"]


def test_a_changed_file_is_named(folder):
    (folder / "a").write_bytes(b"abd")
    with pytest.raises(ValueError, match=r"^a changed since it was written$"):
        verified(folder)


def test_a_missing_file_is_named(folder):
    (folder / "a").unlink()
    with pytest.raises(OSError, match=r"No such file or directory: .*/folder/a'"):
        verified(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "below/../../secret", "", ".", "..\\\\secret"])
def test_a_manifest_that_names_what_lies_outside_is_refused(folder, name):
    (folder.parent / "secret").write_bytes(b"abc")
    (folder / "manifest.json").write_text(json.dumps({name: ABC}))
    with pytest.raises(ValueError, match="names what lies outside the folder"):
        verified(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{", '"a"'])
def test_a_manifest_that_is_none_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"is no list of files and digests|Expecting"):
        verified(folder)


@pytest.mark.parametrize("name", ["a", "manifest.json"])
@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_what_may_never_end_is_not_read(folder, name, spoil):
    (folder / name).unlink()
    spoil(folder / name)
    with pytest.raises(ValueError, match=f"{name} is no regular file"):
        verified(folder)
