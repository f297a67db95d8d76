"""The demo's data: complete, the same each time, and held out where it says so."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from stdlib_code import dataset
from stdlib_code.dataset import TEST, TRAIN, VALIDATION, Module, Row, instruction_rows, pieces

EXAMPLES = Path(__file__).parents[2] / "examples"


def module_of(text: str, *, name: str = "sample", split: int = TRAIN) -> Module:
    text = textwrap.dedent(text)
    return Module(name=name, text=text, tree=ast.parse(text), split=split)


def rows_of(text: str) -> list[Row]:
    return instruction_rows([module_of(text)])


def test_a_row_is_docstring_signature_and_source() -> None:
    [row] = rows_of(
        '''
        class Box:
            @property
            def size(self,
                     scale: int = 1) -> int:
                """How much fits in.

                    In litres.
                """

                # rounded
                return round(self.litres * scale)
        '''
    )
    header = "@property\ndef size(self,\n         scale: int = 1) -> int:"
    assert row == Row(
        module="sample",
        qualname="Box.size",
        instruction="How much fits in.\n\nIn litres.",
        input=header,
        output=header + "\n    # rounded\n    return round(self.litres * scale)",
        split=TRAIN,
    )


def test_a_function_without_docstring_or_body_is_no_row() -> None:
    for text in [
        'def f():\n    """Only words."""\n',
        "def f():\n    return 1\n",
        'def f():\n    ""\n    return 1\n',
        'def f(): "Words."; return 1\n',  # docstring and body on one line
    ]:
        assert rows_of(text) == [], text


def test_functions_under_conditions_count_and_inner_functions_do_not() -> None:
    inner = '        def inner():\n            """Inner."""\n            return 1\n'
    [row] = rows_of(f'if True:\n    async def outer():\n        """Outer."""\n{inner}        return inner\n')
    assert row.qualname == "outer"
    assert row.output.startswith("async def outer():\n    def inner():")


def test_a_row_that_was_there_before_or_that_training_text_holds_is_left_out() -> None:
    text = 'def f():\n    """Words."""\n    return 1\n'
    first, second = module_of(text, name="first"), module_of(text, name="second")
    assert [row.module for row in instruction_rows([first, second])] == ["first"]
    held_out = module_of(text, name="held", split=TEST)
    assert [row.module for row in instruction_rows([held_out, second])] == ["second"]


def test_there_are_thousands_of_rows_each_once_with_a_long_tail(rows: list[Row]) -> None:
    lengths = np.array([len(row.instruction) + len(row.input) + len(row.output) for row in rows])
    assert len(rows) > 4000
    assert len({(row.instruction, row.input, row.output) for row in rows}) == len(rows)
    assert np.quantile(lengths, 0.99) > 8 * np.median(lengths)


def test_every_output_is_a_function_without_its_docstring(rows: list[Row]) -> None:
    for row in rows:
        [function] = ast.parse(row.output).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert function.name == row.qualname.split(".")[-1]
        assert row.output.startswith(row.input + "\n")
        assert row.instruction == row.instruction.strip() != ""


def test_the_splits_share_no_top_level_module_and_have_about_the_shares_of_the_docstring(
    modules: list[Module], rows: list[Row]
) -> None:
    splits = {(module.name.split(".")[0], module.split) for module in modules}
    splits |= {(row.module.split(".")[0], row.split) for row in rows}
    assert len(splits) == len({name for name, _ in splits})
    shares = np.bincount([row.split for row in rows], minlength=3) / len(rows)
    assert 0.72 < shares[TRAIN] < 0.88
    assert shares[VALIDATION] > 0.04
    assert shares[TEST] > 0.08


def test_the_split_of_a_module_is_fixed_for_good_and_that_of_its_twin() -> None:
    """The shipped base model has read the training modules: these may never change."""
    fixed = {"argparse": TRAIN, "asyncio.tasks": TRAIN, "lib2to3.fixer_util": VALIDATION, "ipaddress": TEST}
    assert {module: dataset.split_of(module) for module in fixed} == fixed
    for module, twin in (("_pydecimal", "decimal"), ("_pyio", "io"), ("_socket", "socket")):
        assert dataset.split_of(module) == dataset.split_of(twin)


# As the script does, for the modules below a folder: reading the whole library takes seconds.
SCRIPT = """
import sys
from functools import partial
from pathlib import Path
from stdlib_code import dataset
dataset.stdlib_modules = partial(dataset.stdlib_modules, Path(sys.argv.pop()))
dataset.main()
"""


@pytest.mark.process
def test_another_process_finds_the_same_rows(tmp_path: Path) -> None:
    for name in ("asyncio", "email", "json", "unittest", "xml"):
        shutil.copytree(Path(sysconfig.get_path("stdlib"), name), tmp_path / name)
    rows = instruction_rows(dataset.stdlib_modules(tmp_path))
    assert len(rows) > 300
    dataset.write_jsonl(rows, tmp_path / "here.jsonl")
    script = [sys.executable, "-c", SCRIPT, str(tmp_path / "there.jsonl"), str(tmp_path)]
    subprocess.run(script, check=True, env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(EXAMPLES)}, capture_output=True)
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    lines = (tmp_path / "here.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line) for line in lines] == [asdict(row) for row in rows]


def test_files_that_are_tests_installed_broken_or_not_utf8_are_no_modules(tmp_path: Path) -> None:
    whole = ("json/__init__.py", "json/tests/test_it.py", "site-packages/json.py", "not_of_the_library.py", "ast.py")
    for path, content in {
        **dict.fromkeys(whole, b"x = 1\n"),
        "csv.py": b"x = \n",
        "abc.py": b"# \xff\nx = 1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert [module.name for module in dataset.stdlib_modules(tmp_path)] == ["ast", "json"]


def test_pretraining_text_comes_from_training_modules_alone_and_some_is_for_validation(modules: list[Module]) -> None:
    pretraining = list(dataset.pretraining_rows(modules))
    lines = {True: set[str](), False: set[str]()}
    for module in modules:
        lines[module.split == TRAIN].update(module.text.split("\n"))
    read = {line for row in pretraining for line in str(row["completion"]).split("\n")}
    assert read <= lines[True]
    assert len(lines[False] - read) > 20_000
    splits = np.array([row["split"] for row in pretraining])
    assert 0.015 < np.mean(splits == VALIDATION) < 0.025
    assert set(splits.tolist()) == {TRAIN, VALIDATION}


@given(bodies=st.lists(st.integers(0, 12), min_size=1, max_size=12), max_characters=st.integers(20, 200))
def test_pieces_hold_every_line_once_and_in_order(bodies: list[int], max_characters: int) -> None:
    text = "".join(f"# {n}\ndef f{n}():\n" + f"    call({n})\n" * (size + 1) for n, size in enumerate(bodies))
    cut = list(pieces(module_of(text), max_characters))
    assert "\n".join(cut).split() == text.split()
    assert all(len(piece) <= max_characters for piece in cut)
