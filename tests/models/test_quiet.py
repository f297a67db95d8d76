"""Warnings of libraries do not reach a user; those of the user's own code do."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from brim.models import no_library_warnings

SCRIPT = """
import sys, warnings
import brim

rows = {"question": ["add 1 and 2 ="] * 8, "answer": ["3"] * 8}
config = {
    "base_model": sys.argv[1],
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "adapter": {"type": "lora", "dropout": 0},
    "trainer": {"type": "finetune", "epochs": 1, "effective_batch_size": 4, "enable_gradient_checkpointing": True},
    "generation": {"max_new_tokens": 2},
}
brim.Model(config).train(rows, output_directory=sys.argv[2] + "/run")
model = brim.Model.load(sys.argv[2] + "/run")
model.predict(rows)
model.evaluate(rows)
model.generate("add 1 and 2 =")
model.export(sys.argv[2] + "/merged", merge=True)
warnings.warn("my own", FutureWarning, stacklevel=1)
"""


def test_a_run_from_python_shows_the_warnings_of_the_users_code_alone(tiny_base, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_base), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "Warning" in line] == [
        f"<string>:{SCRIPT.count(chr(10))}: FutureWarning: my own"
    ]


def warn_from(module, category):
    warnings.warn_explicit("of it", category, f"{module}.py", 1, module=module)


@pytest.mark.parametrize("module", ["transformers.modeling_utils", "peft", "torch.nn.functional", "brim.models.load"])
@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning])
def test_what_a_library_will_change_is_not_told(module, category):
    with no_library_warnings():
        warn_from(module, category)
    with pytest.warns(category):  # afterwards all is as it was
        warn_from(module, category)


@pytest.mark.parametrize(
    ("module", "category"),
    [("__main__", FutureWarning), ("transformers_of_mine", FutureWarning), ("torch.optim", UserWarning)],
)
def test_what_others_say_and_what_may_matter_is_told(module, category):
    with pytest.warns(category), no_library_warnings():
        warn_from(module, category)
