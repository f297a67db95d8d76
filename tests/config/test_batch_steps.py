"""Tables of steps of the effective batch."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from brim.config import parse_batch_steps
from brim.units import Duration


def read(text):
    return [(str(start), size) for start, size in parse_batch_steps(text)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0sp:1024 250000sp:2048 1e6sp:4096", [("0sp", 1024), ("250000sp", 2048), ("1000000sp", 4096)]),
        ("0:8 1.5e6tok:16", [("0tok", 8), ("1500000tok", 16)]),
        ("0ep:8 0.5dur:4", [("0dur", 8), ("0.5dur", 4)]),
        ("  0sp:8\n 500ba:1\t", [("0ba", 8), ("500ba", 1)]),
        ("0ep:8 0.5ep:9 2ep:9", [("0ep", 8), ("0.5ep", 9), ("2ep", 9)]),
        ("0ep:8", [("0ep", 8)]),
        ("0:8", [("0sp", 8)]),
        (f"0:{2**40}", [("0sp", 2**40)]),
    ],
)
def test_what_tables_say(text, steps):
    assert read(text) == steps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty: steps of the form DURATION:ROWS, such as 0sp:1024 250000sp:2048 1e6sp:4096"),
        (" ", "it is empty: steps of the form DURATION:ROWS, such as 0sp:1024 250000sp:2048 1e6sp:4096"),
        (
            "0sp:8, 5sp 9sp:3",
            "'0sp:8,' has '8,' rows: a whole number of at least 1, in digits",
        ),
        ("0sp:8 5sp", "'5sp' is no step: DURATION:ROWS, such as 0sp:1024 250000sp:2048 1e6sp:4096"),
        ("5sp:8", "the first step begins at 5sp, and not at 0, such as 0sp:1024 250000sp:2048 1e6sp:4096"),
        ("0sp:8 1ep:9 3tok:10", "steps in ep and tok: a table has one unit"),
        ("0sp:8 9sp:9 9sp:10", "9sp comes after 9sp: each step begins later than the one before it"),
        ("0sp:8 9sp:9 8sp:10", "8sp comes after 9sp: each step begins later than the one before it"),
        ("0sp:8 0sp:9", "0sp comes after 0sp: each step begins later than the one before it"),
        ("0sp:8 1dur:9", "'1dur' is the end of the run, where no step begins"),
        ("0sp:0", "'0sp:0' has '0' rows: a whole number of at least 1, in digits"),
        ("0sp:-1", "'0sp:-1' has '-1' rows: a whole number of at least 1, in digits"),
        ("0sp:4e3", "'0sp:4e3' has '4e3' rows: a whole number of at least 1, in digits"),
        ("0sp:8:9", "'0sp:8:9' has '8:9' rows: a whole number of at least 1, in digits"),
        (f"0sp:{2**40 + 1}", f"'0sp:{2**40 + 1}' has '{2**40 + 1}' rows: a whole number of at least 1, in digits"),
        ("0sp:", "'0sp:' has '' rows: a whole number of at least 1, in digits"),
        ("0sp:٣", "'0sp:٣' has '٣' rows: a whole number of at least 1, in digits"),
    ],
)
def test_what_is_no_table(text, message):
    with pytest.raises(ValueError) as caught:
        parse_batch_steps(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["0sp:8 500:9", "0sp:8 5 sp:9", "0sp:8 1.5sp:9", "0sp:8 -1sp:9", "0sp:8 2dur:9"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match=r"is no |is not a whole number|is longer than the run"):
        parse_batch_steps(text)


@given(
    unit=st.sampled_from(["sp", "tok", "ep", "ba"]),
    starts=st.lists(st.integers(1, 10**12), unique=True, max_size=6),
    data=st.data(),
)
def test_what_is_written_is_read(unit, starts, data):
    starts = [0, *sorted(starts)]
    sizes = [data.draw(st.integers(1, 10**6)) for _ in starts]
    text = " ".join(f"{start}{unit}:{size}" for start, size in zip(starts, sizes, strict=True))
    expected = tuple((Duration(Fraction(start), unit), size) for start, size in zip(starts, sizes, strict=True))
    assert parse_batch_steps(text) == expected


@given(text=st.text(alphabet="0123456789.:esptokdur- \n", max_size=20))
def test_whatever_is_no_table_is_a_value_error(text):
    try:
        steps = parse_batch_steps(text)
    except ValueError:
        return
    assert steps[0][0].amount == 0
    assert all(size >= 1 for _, size in steps)
