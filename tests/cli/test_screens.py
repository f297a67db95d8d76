"""What a person sees of each verb, in 80 columns and plain, kept whole in tests/golden/cli."""

import io
import re
import sys

import pytest

from brim.workflows.compare.results import run as run_here
from brim.workflows.runs import Ended

DATA = ("--dataset", "sums.jsonl")
SCREENS = {  # what stands in 80 columns: a verb's arguments
    "check": ("check", "config.yaml", *DATA),
    "memory": ("memory", "config.yaml", "--device", "t4", "--sequence-length", 64),
    "memory_compare": ("memory", "config.yaml", "--compare", "--sequence-length", 64),
    "plan": ("plan", "config.yaml", *DATA, "--device", "t4"),
    "plan_too_large": ("plan", "config.yaml", *DATA, "--memory", "667MiB", "memory.margin=0"),
    "train": ("train", "config.yaml", *DATA, "--output-directory", "made"),
    "evaluate": ("evaluate", "run", *DATA),
    "evaluate_against_base": ("evaluate", "run", *DATA, "--against-base"),
    "predict_plan": ("predict", "run", *DATA, "--plan", "--device", "t4"),
    "predict": ("predict", "run", *DATA, "--output", "answers.jsonl"),
    "embed": ("embed", "run", *DATA, "--output", "vectors.parquet"),
    "export": ("export", "run", "--output", "exported"),
    "chat": ("chat", "conversing"),
    "compare": ("compare", "config.yaml", "other.yaml", *DATA, "--seeds", 2, "--output-directory", "compared"),
}
# What differs from run to run, or may between machines: amounts, of any width and unit, and the digits of figures.
_AMOUNT = re.compile(r"[\d.,]+ (?:ms|s|[KMG]iB|bytes)\b|[\d,]+(?= (?:ended|at max_new_tokens|tokens in)\b)")
_FIGURE = re.compile(r"\d+\.\d+")
_ALIGNED = re.compile(
    r"(?<=\d)  +(?=#)|(?<=s)  +(?=time  )|  +(?=memory$)", re.MULTILINE
)  # columns of amounts are as wide as these


def in_this_process(order, *, observer, say, stop):
    """Train a run of a comparison, which has a process of its own otherwise."""
    return Ended(code=0, is_done=True, result=run_here(order, observer=observer, say=say))


@pytest.fixture
def surroundings(project, run, gallery, monkeypatch):
    """The project with two runs, one of them of conversations, and another configuration; what is typed."""
    (project / "conversing").symlink_to(gallery("chat").run)
    (project / "other.yaml").write_text((project / "config.yaml").read_text() + "  noise_scale_every: 9\n")
    monkeypatch.setattr("brim.workflows.compare.run.run_in_process", in_this_process)
    monkeypatch.setattr(sys, "stdin", io.StringIO("odd?\n"))


@pytest.mark.run
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", SCREENS)
def test_a_verb_says_this_in_80_columns(brim, golden, name):
    done = brim(*SCREENS[name], code=0)
    shown = f"{done.err}-- stdout --\n{done.out}"
    lines = [re.sub(r"/\S+/shared", "…/shared", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    text = _ALIGNED.sub("  ", _AMOUNT.sub("#", "\n".join(lines)))
    golden(f"cli/screen_{name}.txt", _FIGURE.sub(lambda figure: re.sub(r"\d", "0", figure[0]), text))
