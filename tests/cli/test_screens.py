"""What a person sees of each verb, in 80 columns and plain, kept whole in tests/golden/cli."""

import re

import pytest

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
}
# What differs from run to run, or may between machines: amounts, of any width and unit, and the digits of figures.
_AMOUNT = re.compile(r"[\d.,]+ (?:ms|s|[KMG]iB|bytes)\b|[\d,]+(?= (?:ended|at max_new_tokens|tokens in)\b)")
_FIGURE = re.compile(r"\d+\.\d+")


@pytest.mark.run
@pytest.mark.parametrize("name", SCREENS)
def test_a_verb_says_this_in_80_columns(brim, run, golden, name):
    done = brim(*SCREENS[name])
    assert done.code == 0, done.err
    shown = f"{done.err}-- stdout --\n{done.out}"
    lines = [re.sub(r"/\S+/shared", "…/shared", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    text = _AMOUNT.sub("#", "\n".join(lines))
    golden(f"cli/screen_{name}.txt", _FIGURE.sub(lambda figure: re.sub(r"\d", "0", figure[0]), text))
