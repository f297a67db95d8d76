"""What is said of dropout in a plan."""

import pytest

from brim.config import load_config
from brim.planning.training import dropout_notes

ALIKE = "cut otherwise, under another memory, the losses are alike and not equal"


def notes(adapter, base=None, **trainer):
    loaded = load_config(
        {"base_model": "x/y", "adapter": adapter, "trainer": {"type": "finetune", "batch_size": 1, **trainer}}
    )
    return list(dropout_notes(loaded.config, base or {}))


@pytest.mark.parametrize(
    ("adapter", "by_row", "base", "expected"),
    [
        ({"type": "lora", "dropout": 0.0}, False, {}, []),
        ({"type": "lora", "dropout": 0.1}, True, {}, []),
        (None, False, {}, []),
        (
            {"type": "lora"},
            False,
            {},
            [
                f"adapter.dropout 0.05 is drawn for the rows that go together: {ALIKE}. "
                "trainer.dropout_by_row: true makes them equal"
            ],
        ),
        (None, True, {}, ["trainer.dropout_by_row changes nothing: there is no adapter"]),
        ({"type": "lora", "dropout": 0}, True, {}, ["trainer.dropout_by_row changes nothing: adapter.dropout is 0"]),
        (
            {"type": "lora"},
            True,
            {"attn_pdrop": 0.1, "embd_pdrop": 0.25},
            [
                "the base model has dropout of its own (attn_pdrop 0.1, embd_pdrop 0.25), which trainer.dropout_by_row "
                f"leaves as it is: {ALIKE}"
            ],
        ),
        (None, False, {"dropout": 0.1}, [f"the base model has dropout of its own (dropout 0.1): {ALIKE}"]),
    ],
)
def test_notes(adapter, by_row, base, expected):
    assert notes(adapter, base, dropout_by_row=by_row) == expected
