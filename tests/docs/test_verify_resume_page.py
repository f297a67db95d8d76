"""docs/verify-resume.md shows the table as it is printed, and the tolerances that are used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.api.hand_made_proof import PROOF

from brim.cli.studies import print_proof
from brim.workflows.verify_resume.comparison import promise_of

PAGE = (Path(__file__).parents[2] / "docs" / "verify-resume.md").read_text(encoding="utf-8")


def test_the_table_is_the_one_that_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (block,) = re.findall(r"^```\n\$ brim verify-resume results/demo\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    print_proof(PROOF)
    assert block == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("fp32, LoRA or SGD", {"precision": "fp32", "adapter": {"r": 8}}),
        ("fp32, other", {"precision": "fp32"}),
        ("bf16, fp16, 4 and 8 bits", {"precision": "bf16-mixed"}),
    ],
)
def test_the_tolerances_are_those_that_are_used(words, settings):
    trainer = {"optimizer": {"type": "adamw"}, "dropout_by_row": False}
    promise = promise_of({"trainer": trainer, **settings}, device="a GPU", ran_out_of_memory=False)
    (tolerance,) = re.findall(rf"(\S+) \({words}\)", PAGE)
    assert float(tolerance) == promise.loss_tolerance
