"""Bytes and durations, as people read them."""

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from brim.units import Duration, format_bytes, format_count, format_seconds, gib, parse_bytes, parse_duration


def test_bytes_counts_and_seconds_as_people_read_them():
    for num_bytes, text in {
        0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 17 * 2**30: "17.0 GiB", 2**42: "4.0 TiB",
    }.items():  # fmt: skip
        assert format_bytes(num_bytes) == text
    assert [format_count(number, "row") for number in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
    micro_batches = [format_count(number, "micro-batch", "micro-batches") for number in (1, 2)]
    assert micro_batches == ["1 micro-batch", "2 micro-batches"]
    for seconds, text in {
        0.00421: "4.2 ms", 0.0421: "42 ms", 0.0995: "0.1 s", 0: "0.0 s", 3.21: "3.2 s", 59.99: "1 min 0 s",
        95: "1 min 35 s", 7500: "2 h 5 min",
    }.items():  # fmt: skip
        assert format_seconds(seconds) == text
    assert [gib(n) for n in (0, 2**30 // 20, 2**30, 1234 * 2**30)] == ["0", "0.050", "1.00", "1,234.00"]


def test_bytes_are_read():
    for text, num_bytes in {
        "14GiB": 14 * 2**30, "14.5 GiB": 29 * 2**29, "16384MiB": 2**34, "14 GB": 14 * 10**9, " 80gb ": 80 * 10**9,
        "1TiB": 2**40, "512 KiB": 2**19, "1024B": 1024,
    }.items():  # fmt: skip
        assert parse_bytes(text) == num_bytes
    for text in ("", "14", "GiB", "14 G", "-3GiB", "1e3GiB", "14GiB 2", "14,5GiB", "nanGiB"):
        with pytest.raises(ValueError, match="is not a number of bytes with a unit"):
            parse_bytes(text)


def test_durations_are_read_exactly():
    for text, (amount, unit) in {
        "500ba": (500, "ba"), "0ba": (0, "ba"), "2ep": (2, "ep"), "0.5ep": (Fraction(1, 2), "ep"),
        "5000sp": (5000, "sp"), " 5000 sp ": (5000, "sp"), "1e6tok": (10**6, "tok"), "1.5e6tok": (1_500_000, "tok"),
        "1E+12tok": (10**12, "tok"), "1200e-2sp": (12, "sp"), "0.1dur": (Fraction(1, 10), "dur"),
        "1e-1dur": (Fraction(1, 10), "dur"), "1dur": (1, "dur"), "1.0dur": (1, "dur"),
    }.items():  # fmt: skip
        assert parse_duration(text) == Duration(Fraction(amount), unit), text
    for text, shown in {"500ba": "500ba", "1.5e6tok": "1500000tok", "0.10dur": "0.1dur", "1e-6dur": "1e-06dur"}.items():
        assert str(parse_duration(text)) == shown


def test_what_is_no_duration_is_refused():
    for text in (
        "", "500", "ba", "0.1", "-3ba", "+3ba", "1,5ep", ".5dur", "5.dur", "1e6", "1etok", "1e1000tok", "500BA",
        "500 steps", "1e6 tokens", "0.1dur 2ep", "0.1dur2ep", "0x10sp", "nandur", "infep", "٣ba", "1_000sp",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is not a duration: a number and a unit"):
            parse_duration(text)
    for text, message in {
        "1.5ba": "'1.5ba' is not a whole number of batches",
        "0.5sp": "'0.5sp' is not a whole number of samples",
        "1e-3tok": "'1e-3tok' is not a whole number of tokens",
        "1.00001dur": "'1.00001dur' is longer than the run: a share from 0dur to 1dur",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_duration(text)


@given(digits=st.integers(0, 10**9), exponent=st.integers(0, 9), unit=st.sampled_from(["ep", "dur"]))
def test_what_is_shown_of_a_duration_is_that_duration(digits, exponent, unit):
    amount = Fraction(digits, 10**exponent)
    if unit == "dur":
        amount %= 1
    duration = Duration(amount, unit)
    assert parse_duration(str(duration)) == duration
