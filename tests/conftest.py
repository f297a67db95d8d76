"""What tests share: a tiny base model with a tokenizer, and small data."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults.workshop import make_llama
from filelock import FileLock
from hypothesis import settings
from tests.gallery import Gallery, sums as gallery_rows
from tests.golden import Golden
from tests.properties import register_profiles

from brim.lazy import without_collector
from faults import workshop

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TEXTS = [f"add {a} and {b} = {a + b}; the sum of {a} plus {b}" for a in range(20) for b in range(20)]


register_profiles()


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples every time, unless another profile is asked for, whatever the environment says of CI."""
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("suite")
    # A shell's background job ignores Ctrl-C, and what `nohup` starts a hang-up; so would all that tests start.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported: it looks again and again at what all of them hold, and frees little."""
    with without_collector():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what has no mark of its own as a unit; show a GPU test's warnings, unless they are brim's.

    Libraries warn on a GPU of what no other test meets: of a kernel, of a card, of another torch.
    """
    for item in items:
        if "gallery" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.run)
        if not any(item.get_closest_marker(name) for name in ("run", "process", "gpu")):
            item.add_marker(pytest.mark.unit)
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default", "error:::brim"))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run of the suite share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker's own lies in it
    (folder / "shared").mkdir(exist_ok=True)
    return folder / "shared"


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Collect garbage among a module's own objects alone, not among those of all libraries.

    Each recovery from too little memory collects, and so does each run before it is planned.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither finds nor leaves anything in the user's cache; processes that tests start inherit it.

    Workers share what was traced or tried, which is the same whoever does it; plans depend on the memory that was free.
    """
    cache = tmp_path_factory.mktemp("cache")
    for kind in ("packing", "traces"):
        (shared_folder / kind).mkdir(exist_ok=True)
        (cache / kind).symlink_to(shared_folder / kind)
    os.environ["BRIM_CACHE_DIR"] = str(cache)


@pytest.fixture(scope="session")
def tiny_base(shared_folder: Path) -> Path:
    """A Llama of 30,000 random weights, with a byte-level tokenizer. Never written to."""
    folder = shared_folder / "base"
    with FileLock(f"{folder}.lock"):
        if not (folder / "model.safetensors").exists():
            folder.mkdir(exist_ok=True)
            make_tokenizer(folder)
            make_llama(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def brim(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """brim("check", "config.yaml", code=0) as the shell would run it, but for the process; it ends with that code, if any."""
    from brim.cli import main

    def run(*arguments: object, code: int | None = None) -> Done:
        monkeypatch.setattr(sys, "argv", ["brim", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        capfd.readouterr()
        ended: object = 0
        try:
            main()
        except SystemExit as leaving:
            ended = leaving.code or 0
        out, err = capfd.readouterr()
        assert isinstance(ended, int)
        assert "Traceback" not in out + err
        assert code in (None, ended), err
        return Done(code=ended, out=out, err=err)

    return run


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """golden("memory/table.txt", text): the text is what tests/golden holds."""
    return Golden(write=request.config.getoption("--write-golden"))


@pytest.fixture(scope="session")
def gallery(shared_folder: Path, tiny_base: Path) -> Iterator[Gallery]:
    """gallery("lora"): a finished run with its configuration and its rows; see tests/gallery.py. Never written to."""
    folder = shared_folder / "gallery"
    folder.mkdir(exist_ok=True)
    runs = Gallery(folder, base=tiny_base)
    yield runs
    runs.check_untouched()


@pytest.fixture(scope="session")
def teachable_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As tiny_base, with weights ten times as large, whose logits can move: what it learns is unmistakable.

    Those of tiny_base lie within 0.6, so that no training brings its loss from 5.7 to below 5.1. Never written to.
    """
    folder = tmp_path_factory.mktemp("teachable")
    make_tokenizer(folder)
    make_llama(folder, initializer_range=0.2)
    return folder


@pytest.fixture
def sums() -> list[dict[str, object]]:
    """40 rows: a sum to learn, with a fixed split of 28, 4 and 8."""
    return gallery_rows()


@pytest.fixture
def sums_file(tmp_path: Path, sums: list[dict[str, object]]) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return path


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 300 tokens whose end-of-sequence and padding tokens differ."""
    workshop.make_tokenizer(folder, TEXTS)
