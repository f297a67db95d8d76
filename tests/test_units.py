"""Bytes and durations, as people read them."""

import pytest

from brim.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (17 * 2**30, "17.0 GiB"), (2**42, "4.0 TiB")],
)
def test_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00421, "4.2 ms"),
        (0.0421, "42 ms"),
        (0.0995, "0.1 s"),
        (0, "0.0 s"),
        (3.21, "3.2 s"),
        (59.99, "1 min 0 s"),
        (95, "1 min 35 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("14GiB", 14 * 2**30),
        ("14.5 GiB", 29 * 2**29),
        ("16384MiB", 2**34),
        ("14 GB", 14 * 10**9),
        (" 80gb ", 80 * 10**9),
        ("1TiB", 2**40),
        ("512 KiB", 2**19),
        ("1024B", 1024),
    ],
)
def test_bytes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "14", "GiB", "14 G", "-3GiB", "1e3GiB", "14GiB 2", "14,5GiB", "nanGiB"])
def test_what_is_not_a_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="is not a number of bytes with a unit"):
        parse_bytes(text)
