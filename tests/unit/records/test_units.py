"""Bytes and seconds as text."""

from __future__ import annotations

import pytest

from axon_nb.records.units import exact_bytes, format_bytes, format_seconds

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (KIB, "1.00 KiB"),
        (int(9.994 * KIB), "9.99 KiB"),
        (int(9.996 * KIB), "10.0 KiB"),
        (int(99.96 * KIB), "100 KiB"),
        (999 * KIB, "999 KiB"),
        (1023 * KIB, "0.999 MiB"),
        (int(23.44 * GIB), "23.4 GiB"),
        (141 * GIB, "141 GiB"),
        (5000 * 2**50, "5000 PiB"),
        (-12 * MIB, "-12.0 MiB"),
    ],
)
def test_bytes_have_three_digits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1000, "1000 B"), (KIB, "1 KiB"), (1536, "1.5 KiB"), (4 * MIB, "4 MiB"), (MIB + 1, "1048577 B")],
)
def test_exact_bytes_are_lossless(num_bytes: int, text: str) -> None:
    assert exact_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.254, "0.25 s"),
        (0.999, "1.0 s"),
        (2.14, "2.1 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds_grow_into_minutes_and_hours(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
