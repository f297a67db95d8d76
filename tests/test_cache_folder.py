"""Where the cache lies."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from brim.storage import cache_folder


def test_its_own_variable_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("BRIM_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("BRIM_CACHE_DIR", "")
    assert cache_folder() == tmp_path / "xdg" / "brim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "brim"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    def home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("BRIM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache_folder() == Path(tempfile.gettempdir())
