"""The judge of the order of writes, on logs of a few lines."""

import pytest
from faults.order import renames
from faults.shim import Operation, read_log


def log(*lines):
    """name path [new path]"""
    operations = []
    for number, line in enumerate(lines, start=1):
        name, path, *new = line.split()
        operations.append(
            Operation(number=number, name=name, num_bytes=9, path=path, new_path=new[0] if new else None)
        )  # fmt: skip
    return operations


WRITE = ["create .a.tmp", "write .a.tmp"]
FOLDER = ["mkdir checkpoints/.s.tmp", "write checkpoints/.s.tmp/f", "fsync checkpoints/.s.tmp/f"]
SHOW = ["rename checkpoints/.s.tmp checkpoints/s", "fsync checkpoints"]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([*WRITE, "fsync .a.tmp", "rename .a.tmp a", "fsync ."], ""),
        ([*WRITE, "rename .a.tmp a", "fsync ."], ".a.tmp was not synced"),
        ([*WRITE, "fsync .a.tmp", "write .a.tmp", "rename .a.tmp a", "fsync ."], ".a.tmp was not synced"),
        ([*WRITE, "fsync .a.tmp", "rename .a.tmp a"], ". was not synced"),
        ([*WRITE, "fsync .a.tmp", "rename .a.tmp a", "unlink b", "fsync ."], "unlink of b before . was synced"),
        ([*FOLDER, "fsync metrics.jsonl", *SHOW], ""),
        ([*FOLDER, "fsync metrics.jsonl", "write metrics.jsonl", *SHOW], "metrics.jsonl was not synced"),
        ([*FOLDER, "write checkpoints/.s.tmp/g", "fsync metrics.jsonl", *SHOW], "checkpoints/.s.tmp/g was not synced"),
    ],
)
def test_a_name_is_shown_between_two_syncs(lines, wrong):
    ((_, found),) = renames(log(*lines))
    assert found == wrong


def test_a_temporary_file_whose_rename_was_not_seen_counts_as_the_file_that_was_synced_after_it():
    lines = ["write checkpoints/.s.tmp/.tmpAbc", "fsync checkpoints/.s.tmp/m.safetensors", "fsync metrics.jsonl", *SHOW]
    assert list(renames(log(*lines))) == [("checkpoints/s", "")]
    ((_, wrong),) = renames(log(lines[1], lines[0], *lines[2:]))
    assert wrong == "checkpoints/.s.tmp/.tmpAbc was not synced"


def test_a_log_is_read(tmp_path):
    file = tmp_path / "log"
    file.write_text("1 write 12 /r/a/b\n2 rename 0 /r/.c.tmp /r/c\n3 fsync 0 /r\n")
    assert read_log(file, tmp_path.__class__("/r")) == [
        Operation(number=1, name="write", num_bytes=12, path="a/b"),
        Operation(number=2, name="rename", num_bytes=0, path=".c.tmp", new_path="c"),
        Operation(number=3, name="fsync", num_bytes=0, path="."),
    ]
