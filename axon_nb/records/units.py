"""Human-readable bytes, durations, counts and tables of text."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: int) -> str:
    """Format bytes in binary units with 3 significant digits: ``512 B``, ``1.50 KiB``, ``-23.4 GiB``."""
    sign, value, unit = ("-" if num_bytes < 0 else ""), float(abs(num_bytes)), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{sign}{int(value)} B"
    digits = 3 if value < 0.9995 else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {_UNITS[unit]}"


def exact_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that needs 2 decimals at most: ``4 MiB``, ``1.25 GiB``, ``1000 B``."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        value = num_bytes / 2**power
        if value >= 1 and (value * 100) % 1 == 0:
            return f"{value:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{int(num_bytes)} B"


def format_seconds(seconds: float) -> str:
    """Format a duration: ``0.25 s``, ``2.1 s``, ``3 min 12 s``, ``2 h 05 min``."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count_of(number: int, noun: str) -> str:
    """Format a number of things: ``1 rank``, ``2 ranks``, ``1,024 ranks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> list[str]:
    """Format rows of text as lines with columns of equal width, flush left but for those that `right` says."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = [str.rjust if is_right else str.ljust for is_right in right] or [str.ljust] * len(widths)
    placed = ((put(cell, width) for put, cell, width in zip(flush, row, widths, strict=True)) for row in rows)
    return ["  ".join(cells).rstrip() for cells in placed]
