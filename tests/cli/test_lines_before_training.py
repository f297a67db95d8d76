"""What `brim train` prints before the first step: eight lines at most, and among them all that changes what is learned."""

import json
import re
from collections import Counter

import pytest

LONG = "add 1 and 1 = " * 20
ROWS = [
    *({"question": f"add {n % 7} and {n % 5} =", "answer": f" {n % 7 + n % 5}", "split": 0} for n in range(30)),
    {"question": None, "answer": " 4", "split": 0},
    {"question": "add 2 and 2 =", "answer": "", "split": 0},
    {"question": LONG, "answer": " 5", "split": 0},
    {"question": "write </s> and <|end|>", "answer": " 6", "split": 0},
    *({"question": f"add 9 and {n} =", "answer": f" {9 + n}", "split": 1} for n in range(4)),
]
DROPPING = {"preprocessing": {"missing_value_strategy": "drop_row"}}
CHATML = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def text_rows():
    """Rows of which some are cut, dropped or odd, with columns that nothing reads."""
    return [{**row, **{f"column {n}": n for n in range(9)}, "mixed": [n] if n % 2 else n} for n, row in enumerate(ROWS)]


def chat_rows():
    rows = [
        {
            "conversations": [{"from": "human", "value": f"add {n}"}, {"from": "gpt", "value": f"{n + 1}"}],
            "split": n % 2,
        }
        for n in range(20)
    ]
    thoughts = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    rows.append({"conversations": [{"role": "user", "content": "add"}, thoughts], "split": 0})
    rows.append({"conversations": [{"role": "user", "content": "alone"}], "split": 0})
    return rows


def sized_rows():
    return [{"question": f"a number {n}", "size": ["small", "large"][n % 2], "split": n % 2} for n in range(24)]


def config(base, **changes):
    return {
        "base_model": str(base),
        "input_features": [{"name": "question", "type": "text", **DROPPING}],
        "output_features": [{"name": "answer", "type": "text"}],
        "adapter": {"type": "lora"},
        "preprocessing": {"split": "fixed", "global_max_sequence_length": 40, "drop_unlearnable": True},
        "ludwig_version": "0.10",
        **changes,
        "trainer": {
            "type": "finetune", "train_steps": 2, "epochs": 5, "effective_batch_size": 4, "batch_size": 2,
            "batch_search": "linear", "early_stop": -1, "steps_per_checkpoint": 1, "batch_lr_scaling": "linear",
            **changes.get("trainer", {}),
        },
    }  # fmt: skip


def moving(base):
    schedule = {"batch_rampup": "6ba", "initial_effective_batch_size": 2, "effective_batch_size": 8}
    return config(base, trainer={**schedule, "train_steps": 20, "batch_size": "auto"})


def chat(base):
    made = config(base, chat={"messages": "conversations", "template": "template.jinja"})
    preprocessing = {"split": "fixed", "on_bad_row": "drop"}
    return {key: value for key, value in {**made, "preprocessing": preprocessing}.items() if "features" not in key}


def category(base):
    match = {label: {"type": "contains", "value": label} for label in ("small", "large")}
    preprocessing = {"fallback_label": "none"}
    feature = {"name": "size", "type": "category", "preprocessing": preprocessing, "decoder": {"match": match}}
    return config(base, output_features=[feature])


CASES = {
    "rows of every kind": (config, text_rows, []),
    "at random": (config, text_rows, ["preprocessing.split={type: random}"]),
    "a ramp": (moving, text_rows, []),
    "defaults": (config, text_rows, ["trainer={type: finetune, epochs: 1, steps_per_checkpoint: 1}"]),
    "its own loss": (config, text_rows, ["adapter.dropout=0.1", "trainer.dropout_by_row=true", "trainer.batch_size=auto"]),
    "8 bits": (config, text_rows, ["quantization={bits: 8, bnb_4bit_use_double_quant: false}", "trainer.optimizer.type=adamw_8bit"]),
    "scarce": (config, text_rows, ["memory={budget: 1500MiB}", "trainer.batch_size=auto"]),
    "chat": (chat, chat_rows, []),
    "a category": (category, sized_rows, []),
}  # fmt: skip


@pytest.fixture
def make(project, tiny_base):
    """Write the configuration and the data of a case; the command that trains it."""

    def write(name):
        configured, rows, overrides = CASES[name]
        (project / "config.yaml").write_text(json.dumps(configured(tiny_base)))  # JSON is YAML, too
        (project / "template.jinja").write_text(CHATML)
        (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
        return ("train", "config.yaml", *overrides, "--dataset", "rows.jsonl", "--output-directory", "run")

    return write


def before_first_step(done):
    """What was printed on either stream until the first evaluation was told."""
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    steps = [number for number, line in enumerate(lines) if re.match(r"step \d", line)]
    assert steps, "nothing was evaluated"
    return lines[: steps[0]]


@pytest.mark.parametrize("name", CASES)
def test_there_are_eight_lines_at_most_and_every_note_is_kept(brim, project, make, name):
    command = make(name)
    shown = before_first_step(brim(*command))
    assert len(shown) <= 8
    kept = (project / "run/notes.txt").read_text().splitlines()[1:]
    assert len(kept) > 8, "there is too much to be told"
    more = re.fullmatch(r"(\d+) more notes: run/notes.txt or --verbose", shown[-1])
    told = "; ".join(shown[:-1])
    hidden = [line for line in kept if line not in told]
    assert more
    assert len(hidden) - sum("kept the weights" in line for line in kept) == int(more[1])
    rows = re.compile(r"[\d,]+ of [\d,]+ rows|the answer of 1 row is empty")
    assert Counter(rows.findall(told)) == Counter(rows.findall("; ".join(kept))), "told, if only in short"
    for words in ("has no effect, the", "decides", "never found", "drops the thoughts", "Ludwig's"):
        assert not [line for line in hidden if words in line]
    on_speed = [line for line in kept if line.startswith("a step is bound by ")]
    assert all(line in hidden for line in on_speed), "of use to few"


def test_a_run_that_goes_on_prints_no_more(brim, project, make):
    command = make("rows of every kind")
    assert brim(*command).code == 0
    again = (*command, "--resume", "trainer.early_stop=9", "generation.max_new_tokens=3", "trainer.batch_size=1")
    done = brim(*again, "memory.budget=3GiB")
    assert done.code == 0
    shown = done.err.splitlines()
    assert len(shown) <= 8
    assert "nothing is left to train: the run ended after step 2 (8 samples)" in "; ".join(shown)
    assert "trainer.early_stop is now 9; it was -1" in "; ".join(shown)


def test_verbose_shows_every_note(brim, project, make):
    shown = before_first_step(brim(*make("rows of every kind"), "-v"))
    kept = (project / "run/notes.txt").read_text().splitlines()[1:]
    assert shown == [line for line in kept if "kept the weights" not in line]


def test_python_prints_no_more_than_the_command_line(project, make, capfd):
    from brim import Model

    make("rows of every kind")
    Model("config.yaml").train("rows.jsonl", output_directory="run")
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len([line for line in lines if not re.match("step|kept", line)]) <= 8
    assert any(re.fullmatch(r"\d+ more notes: run/notes.txt", line) for line in lines)
