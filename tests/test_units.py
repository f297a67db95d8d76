"""Bytes and durations, as people read them."""

import pytest

from brim.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (17 * 2**30, "17.0 GiB"), (2**42, "4.0 TiB")],
)
def test_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (59.99, "1 min 0 s"), (95, "1 min 35 s"), (7500, "2 h 5 min")]
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
