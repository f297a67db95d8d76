"""docs/python.md: its session runs as it stands, and what it says of observers and `say` is so."""

import inspect
import json
import re
from pathlib import Path

import pytest

import brim

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def project(tmp_path, monkeypatch, tiny_base, sums):
    monkeypatch.chdir(tmp_path)
    config = {
        "base_model": str(tiny_base),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "preprocessing": {"split": "fixed"},
        "trainer": {"type": "finetune", "train_steps": 3, "effective_batch_size": 4},
    }
    Path("config.yaml").write_text(json.dumps(config))
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


def test_the_session_runs(project, capsys):
    pytest.importorskip("matplotlib")
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "python.md", "exec"), names)  # noqa: S102
    out = capsys.readouterr().out.splitlines()
    history = names["result"].history
    losses = history.loc[history["split"] == "train", "loss"]
    assert out[0].startswith("TrainResult: 3 steps in ")
    assert out[-2].split()[0] == str(losses.iloc[-1])
    assert out[-1] == f"{losses.argmax() + 1} {losses.max()}", "the second run is the first again"
    assert Path("losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_methods_of_an_observer_are_told_with_what_they_are_called_with():
    told = dict(re.findall(r"^\| `(start|write|close)` \|.*\| (.*) \|$", PAGE, flags=re.MULTILINE))
    assert list(told) == [name for name in vars(brim.Observer) if name in ("start", "write", "close")]
    for name in ("first_step", "total_steps", "total_samples"):
        assert name in inspect.signature(brim.Observer.start).parameters
        assert f"`{name}`" in told["start"]


def test_what_has_a_say_is_named():
    named = re.search(r"So it is with (.*?)\.\n", PAGE, flags=re.DOTALL)[1]
    faces = {name: getattr(brim.Model, name) for name in vars(brim.Model) if not name.startswith("_")}
    faces |= {f"brim.{name}": getattr(brim, name) for name in ("plan", "compare", "verify_resume", "predict_memory")}
    for name, face in faces.items():
        has_say = callable(face) and "say" in inspect.signature(face).parameters
        assert has_say == (f"`{name}`" in named), name
